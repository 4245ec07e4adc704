"""Gradients and weights over the replicas of a unit: reduction, sharding, clipping, optimizers."""
