"""Samples: reading them, turning them into tokens and patches, drawing global batches, and packing microbatches."""
