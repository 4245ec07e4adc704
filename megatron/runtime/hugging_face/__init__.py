"""Weights from folders of Hugging Face and back: every rank reads and writes its own part of them."""
