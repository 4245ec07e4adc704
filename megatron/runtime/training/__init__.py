"""A training run: built from the flags, resumed, and trained to the end."""
