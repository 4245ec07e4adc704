"""One training step as a value: what was decided, what this rank loaded, where every token is."""
