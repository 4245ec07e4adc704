"""Search by simulation: the runs that are tried, their simulations, and the tuning of other planners by simulation."""
