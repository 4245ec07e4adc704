"""Planners, one file each: they turn a model graph and sizes into a Plan, the place of each layer."""
