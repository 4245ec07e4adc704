"""Gradients and weights over the replicas of a unit: reduced, sharded, clipped, stepped by optimizers."""
