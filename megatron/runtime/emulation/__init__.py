"""Runs schedules with timed waits in place of data and computations."""
