"""Placement of balanced batches on nodes, so that little of their data crosses nodes (OrchMLLM, Alg. 3)."""
