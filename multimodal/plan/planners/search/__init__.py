"""What a search by simulation is made of: the runs that it tries, their simulations, and planners tuned by them."""
