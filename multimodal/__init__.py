"""Braid's decisions: the place of each sample, the place of each layer, and the time of each action."""

import importlib
from typing import Any

_FUNCTIONS = {
    "compose": "multimodal.hugging_face.composition",
    "generate": "megatron.runtime.generation.answering",
    "make_item": "megatron.runtime.generation.drawing",
    "open_model": "megatron.runtime.generation.whole_model",
}
"""Public name of this package -> the module that has it, which is read when it is asked for."""


def __getattr__(name: str) -> Any:
    """Return one of `_FUNCTIONS`."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
