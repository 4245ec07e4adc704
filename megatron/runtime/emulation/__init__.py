"""What stands in for data and computations where computing is only waited for."""
