"""Prepares everything that a rank needs to run a step, given its number, ahead of training."""
