"""Experts: MLPs, of which a router selects a few for every token."""
