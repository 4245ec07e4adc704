"""Conversations in the words of a model's own chat template."""
