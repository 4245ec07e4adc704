"""Attention over packed sequences."""
