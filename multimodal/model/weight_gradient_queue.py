"""Weight gradients that a backward defers: the second half of a split backward (zero bubble)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Module


class PendingGradient(Protocol):
    """A gradient that a layer has deferred."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that are kept until it is computed."""

    def compute(self) -> None:
        """Compute the gradient and hand it to autograd; makes no collective calls."""


Accumulate = Callable[[Tensor, Tensor, Tensor], object]
"""Adds a product's weight gradient to a buffer; called with inputs and output gradient, both [rows, size], and buffer."""


@cache
def find_accumulation(params_dtype: torch.dtype) -> Accumulate | None:
    """Return what adds in products: torch to buffers of the weights' type, else Apex; None if that is not installed."""
    if params_dtype != torch.bfloat16:
        return torch.no_grad()(lambda rows, gradient, buffer: buffer.addmm_(gradient.t(), rows))
    try:
        accumulate: Accumulate = import_module("fused_weight_gradient_mlp_cuda").wgrad_gemm_accum_fp32
    except ImportError:
        return None
    return accumulate


def accumulate_into_buffers(parameters: Iterable[Tensor], accumulate: Accumulate) -> None:
    """Let products add the gradients of these matrices to Megatron's float32 buffers (`main_grad`) as soon as these exist."""
    for parameter in parameters:
        if parameter.dim() == 2:
            parameter.accumulate_gradient = accumulate  # type: ignore[attr-defined]


class LinearWeightGradient(NamedTuple):
    """The gradients of one linear layer's weight and bias."""

    inputs: Tensor
    """[..., input_size], all input rows of the layer."""
    output_gradient: Tensor
    """[..., output_size]."""
    weight: Tensor
    """[output_size, input_size], a parameter."""
    bias: Tensor | None
    """[output_size], a parameter."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that are kept until they are computed."""
        return self.inputs, self.output_gradient

    def compute(self) -> None:
        """Compute the gradients; the hooks of the parameters (gradient buffers) run as after any backward."""
        torch.autograd.backward((self.weight,), (self.of_weight(),))
        of_bias = self.of_bias()
        if self.bias is not None and of_bias is not None:
            torch.autograd.backward((self.bias,), (of_bias,))

    def of_weight(self) -> Tensor:
        """Return the weight's gradient; if it was added to its buffer, a tensor of its shape for hooks that wait for it."""
        rows, gradient = self.inputs.flatten(0, -2), self.output_gradient.flatten(0, -2)
        accumulate: Accumulate | None = getattr(self.weight, "accumulate_gradient", None)
        if accumulate is None or not hasattr(self.weight, "main_grad"):
            return gradient.t().matmul(rows)
        accumulate(rows.contiguous(), gradient.contiguous(), self.weight.main_grad)
        self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # Megatron's hook adds nothing then
        return torch.empty_like(self.weight)

    def of_bias(self) -> Tensor | None:
        """Return the bias's gradient."""
        return None if self.bias is None else self.output_gradient.flatten(0, -2).sum(dim=0)


class WeightGradientQueue:
    """The deferred weight gradients of one backward; computed once, all together, in the order of the backward."""

    def __init__(self) -> None:
        self._pending: list[PendingGradient] = []
        self._modules: set[Module] = set()

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def size_bytes(self) -> int:
        """Bytes of the storages that are kept for these gradients."""
        storages = [tensor.untyped_storage() for pending in self._pending for tensor in pending.tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def put(self, pending: PendingGradient) -> None:
        """Defer one layer's weight gradient."""
        self._pending.append(pending)

    def put_module(self, module: Module) -> None:
        """Defer a module's weight gradients, once: recomputed layers call this twice."""
        if module not in self._modules:
            self._modules.add(module)
            self._pending.append(DelayedModuleGradient(module))

    def compute(self) -> None:
        """Compute all deferred gradients, each once; tensor parallel ranks may do so at different times."""
        while self._pending:
            self._pending.pop(0).compute()


_ACTIVE: ContextVar[WeightGradientQueue | None] = ContextVar("weight_gradient_queue", default=None)


@contextmanager
def defer_weight_gradients(queue: WeightGradientQueue | None) -> Iterator[None]:
    """Linear layers whose forward runs inside defer their weight gradients to `queue`; None: they compute them at once."""
    token = _ACTIVE.set(queue)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


class DelayedModuleGradient(NamedTuple):
    """The weight gradients of a Transformer Engine module, which keeps them until requested (`delay_wgrad_compute`)."""

    module: Any

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Unknown: the module keeps them."""
        return ()

    def compute(self) -> None:
        """Compute the oldest gradient that the module keeps; hooks of the parameters run as after any backward.

        The module's own `backward_dw` expects a gradient of every bias, either here or already in the parameter. But Megatron
        adds some biases outside the product (`skip_bias_add`), and FP8 sums the bias's gradient in the backward itself;
        Megatron's gradient buffers have taken those by now.
        """
        (of_weight, of_bias, *_), kept = self.module.wgrad_store.pop()
        if hasattr(self.module, "num_gemms"):  # of experts: what was kept has the places that the gradients were written to
            found = list(zip(delayed_weights(self.module), kept[2], strict=True))
        else:
            found = [(self.module.weight, of_weight)]
        if isinstance(of_bias, Tensor) and of_bias.numel():
            found.append((self.module.bias, of_bias))
        for parameter, gradient in found:
            torch.autograd.backward((parameter,), (gradient.to(parameter.dtype),))


def delayed_weights(module: Any) -> list[Tensor]:
    """Return the weight of a module of Transformer Engine, or those of its experts."""
    names = ["weight"] if not hasattr(module, "num_gemms") else [f"weight{index}" for index in range(module.num_gemms)]
    return [getattr(module, name) for name in names]


def defer_in_modules(root: Module) -> bool:
    """Let modules that delay weight gradients defer them to the queue of each forward; returns True if there are any."""
    delaying = [each for each in root.modules() if (store := getattr(each, "wgrad_store", None)) and store.delay_wgrad_compute()]
    for module in delaying:
        module.register_forward_hook(_leave_to_queue)
    return bool(delaying)


def _leave_to_queue(module: Module, inputs: Any, output: Any) -> None:
    """Let the module's backward put it into the queue, which is in the order of the backward."""
    queue = active_queue()
    if queue is not None and torch.is_grad_enabled() and delayed_weights(module)[0].requires_grad:
        (output[0] if isinstance(output, tuple) else output).register_hook(lambda _: queue.put_module(module))


def active_queue() -> WeightGradientQueue | None:
    """Return the queue to which the current forward defers weight gradients."""
    return _ACTIVE.get()
