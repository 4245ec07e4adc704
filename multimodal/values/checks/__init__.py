"""Checks of what people write: a model's units and edges, and a plan for them."""
