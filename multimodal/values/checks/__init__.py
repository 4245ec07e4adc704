"""Checks of files that users write: the units of a model, and a plan for them."""
