"""Errors that only a schedule with split backwards and sample subsets can meet."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from megatron.runtime.execution.activation_store import ActivationStore
from multimodal.model.weight_gradient_queue import LinearWeightGradient
from multimodal.values.action import Place

_compute_weight_gradient = LinearWeightGradient.compute


@contextmanager
def _weight_gradients(compute: Callable[[LinearWeightGradient], None]) -> Iterator[None]:
    with patch.object(LinearWeightGradient, "compute", compute):
        yield


def _computed_twice(pending: LinearWeightGradient) -> None:
    _compute_weight_gradient(pending)
    _compute_weight_gradient(pending)


def _without_bias(pending: LinearWeightGradient) -> None:
    _compute_weight_gradient(pending._replace(bias=None))


@contextmanager
def _subsets_exchanged() -> Iterator[None]:
    """Forwards keep another sample subset's graph than the one whose gradient comes back."""
    original = ActivationStore.put

    def put(store: ActivationStore, key: Any, value: Any, *, size_bytes: int) -> None:
        if key[0] == "open" and key[1] == Place("vision", 0, 0, 0):  # the one with two subsets
            key = (*key[:2], 1 - key[2])
        original(store, key, value, size_bytes=size_bytes)

    with patch.object(ActivationStore, "put", put):
        yield


ERRORS_IN_CUT_BACKWARDS: Mapping[str, Callable[[], Any]] = {
    "weight gradients are forgotten": lambda: _weight_gradients(lambda pending: None),
    "weight gradients are computed twice": lambda: _weight_gradients(_computed_twice),
    "gradients of biases are forgotten": lambda: _weight_gradients(_without_bias),
    "a gradient goes to another sample subset": _subsets_exchanged,
}
