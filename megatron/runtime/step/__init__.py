"""One training step as a value: its decision, this rank's inputs, and the places of tokens."""
