"""Bounds of the numbers that describe a unit."""

from typing import Any

MOST_LAYERS = 10_000
"""Transformer layers of a unit; every list of layers is bounded by it."""


def up_to(maximum: int) -> dict[str, Any]:
    """Return the metadata of a positive integer."""
    return {"minimum": 1, "maximum": maximum}
