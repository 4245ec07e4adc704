"""Braid's decisions: the place of each sample, the place of each layer, and the time of each action."""
