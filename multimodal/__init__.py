"""Braid's decisions: the place of each sample, the place of each layer, and the time of each action."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Return `compose`, whose module is read when it is asked for."""
    if name == "compose":
        return importlib.import_module("multimodal.hugging_face.composition").compose
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
