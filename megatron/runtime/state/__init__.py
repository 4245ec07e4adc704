"""Weights and optimizer state by names that no plan changes: which of them a rank holds, and how others get them."""
