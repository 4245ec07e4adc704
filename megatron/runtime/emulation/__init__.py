"""Schedules run with timed waits: stand-ins for data and computations."""
