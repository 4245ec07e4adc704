"""Costs of a step's pieces, all at once: computations by stage and load, messages by size."""
