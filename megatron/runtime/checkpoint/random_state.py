"""The states of Python's, NumPy's and torch's random number generators, as plain values that fit into a JSON file."""

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture_random_state() -> dict[str, Any]:
    """The generators of this process; CUDA's where there is one."""
    version, values, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(values), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    return {**state, "cuda": _encode(torch.cuda.get_rng_state())} if torch.cuda.is_available() else state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators to what `capture_random_state` returned; CUDA's stays where the state has none, or the process."""
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_decode(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
