"""Megatron's forward-backward function, run from a Braid schedule."""
