"""A training run: built as the flags say, resumed, and trained to the end."""
