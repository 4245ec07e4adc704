"""How many pixels of an image file are decoded; known to the flags, which load no image library."""

DEFAULT_MAX_PIXELS = 89_478_485
"""From here on Pillow warns of decompression bombs: 256 MiB as RGB."""
PILLOW_MAX_PIXELS = 2 * DEFAULT_MAX_PIXELS
"""Pillow opens nothing larger."""
