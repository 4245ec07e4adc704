"""Weight gradients that a backward leaves for later: the second half of a backward that is split (zero bubble)."""

from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class PendingGradient(Protocol):
    """A gradient that a layer leaves for later."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that are kept until then."""

    def compute(self) -> None:
        """Compute the gradient and hand it to autograd; makes no collective calls."""


class LinearWeightGradient(NamedTuple):
    """The gradients of one linear layer's weight and bias."""

    inputs: Tensor
    """[..., input_size], all rows that the layer saw."""
    output_gradient: Tensor
    """[..., output_size]."""
    weight: Tensor
    """[output_size, input_size], a parameter."""
    bias: Tensor | None
    """[output_size], a parameter."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that are kept until then."""
        return self.inputs, self.output_gradient

    def compute(self) -> None:
        """Compute them; the hooks of the parameters (gradient buffers) run as after any backward."""
        torch.autograd.backward((self.weight,), (self.of_weight(),))
        of_bias = self.of_bias()
        if self.bias is not None and of_bias is not None:
            torch.autograd.backward((self.bias,), (of_bias,))

    def of_weight(self) -> Tensor:
        """Return the weight's gradient."""
        return self.output_gradient.flatten(0, -2).t().matmul(self.inputs.flatten(0, -2))

    def of_bias(self) -> Tensor | None:
        """Return the bias's gradient."""
        return None if self.bias is None else self.output_gradient.flatten(0, -2).sum(dim=0)


class WeightGradientQueue:
    """The pending weight gradients of one backward; computed once, all together, in the order of the backward."""

    def __init__(self) -> None:
        self._pending: list[PendingGradient] = []

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def size_bytes(self) -> int:
        """Bytes of the storages that are kept for it."""
        storages = [tensor.untyped_storage() for pending in self._pending for tensor in pending.tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def put(self, pending: PendingGradient) -> None:
        """Leave one layer's weight gradient for later."""
        self._pending.append(pending)

    def compute(self) -> None:
        """Compute everything pending, each once; tensor parallel ranks may do so at different moments."""
        while self._pending:
            self._pending.pop(0).compute()


_ACTIVE: ContextVar[WeightGradientQueue | None] = ContextVar("weight_gradient_queue", default=None)


class DeferWeightGradients(AbstractContextManager[None]):
    """Linear layers whose forward runs inside leave their weight gradients to `queue`; None: they compute them at once."""

    def __init__(self, queue: WeightGradientQueue | None) -> None:
        self._queue = queue
        self._tokens: list[Token[WeightGradientQueue | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_ACTIVE.set(self._queue))

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        _ACTIVE.reset(self._tokens.pop())


def active_queue() -> WeightGradientQueue | None:
    """Return the queue to which the current forward leaves weight gradients."""
    return _ACTIVE.get()
