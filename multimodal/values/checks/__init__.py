"""Checks of what people write: the units of a model, and a plan for them."""
