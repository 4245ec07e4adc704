"""Planners, one file each, which turn a model graph and sizes into a Plan, the place of each layer."""
