"""Costs of work: FLOPs, seconds, bytes."""
