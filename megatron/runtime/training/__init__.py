"""A training run: what the flags ask for is built, resumed, and trained to the end."""
