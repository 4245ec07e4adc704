"""Experts: MLPs of which a router picks a few for every token."""
