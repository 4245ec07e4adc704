"""Conversations in the format of a model's own chat template."""
