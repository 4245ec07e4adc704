"""Reports of a run: lines, logs and pictures."""
