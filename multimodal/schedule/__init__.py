"""Schedules, the order of all actions: builders emit them, passes rewrite them, one validator checks them."""
