"""Processes come and go: who starts them, who decides which are in the run, and how a rank leaves and joins."""
