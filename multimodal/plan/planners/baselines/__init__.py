"""Planners of the systems and simple baselines that papers compare with."""
