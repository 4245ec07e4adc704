"""Checkpoints: sharded, atomic, checked, and independent of the plan."""
