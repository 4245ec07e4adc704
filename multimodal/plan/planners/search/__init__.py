"""Search by simulation: the runs that it tries, their simulations, and planners tuned by them."""
