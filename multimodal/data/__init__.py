"""Samples: where they come from, how they become tokens and patches, which batch they fall into, how they are packed."""
