"""Weights and optimizer state by names that no plan changes: the parts that a rank holds, and their transfer to others."""
