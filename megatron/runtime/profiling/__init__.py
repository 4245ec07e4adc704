"""Measures the device at hand: its layers, what steps take beside them, its peak."""
