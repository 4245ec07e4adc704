"""Tiny random models of transformers that compute in float64 throughout, and what one of them makes of a batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):
    """Norms, rotary positions and softmax ask for float32 in places; inside, they get float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wide_args = tuple(_wide(value) for value in args)
        return func(*wide_args, **{key: _wide(value) for key, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def double_precision() -> Iterator[None]:
    """New tensors and all computations are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with KeepDouble():
            yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def randomize_vectors(model: torch.nn.Module) -> None:
    """Give biases and norms random values: as zeros and ones they would hide what adds or scales twice."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.4 - 0.2)


def build_wide_model(build: Callable[[], Any], folder: Path, **options: Any) -> Any:
    """Build a model in float64, save it and return it; options: of `save_pretrained`."""
    torch.manual_seed(5)
    with double_precision():
        model = build()
        randomize_vectors(model)
    model.train().save_pretrained(folder, **options)
    return model


def gradients_by_key(model: torch.nn.Module) -> Mapping[str, np.ndarray]:
    """Gradients under the names that files have."""
    found = {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None}
    found = {key: values for name, stacked in found.items() for key, values in _of_experts(model, name, stacked)}
    return _of_dinov2(found) if any(".layer_scale1." in key for key in found) else found


_DINOV2 = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.down_proj": "mlp.weights_out",
}


def _of_dinov2(found: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Newer versions of transformers call modules of a DINOv2 otherwise than files do, and hold gate and up apart."""
    renamed = {}
    for key, values in found.items():
        if "vision_tower.encoder.layer." not in key:
            renamed[key] = values
        elif ".mlp.gate_proj." in key:
            both = values, found[key.replace("gate_proj", "up_proj")]
            renamed[key.replace("gate_proj", "weights_in")] = np.concatenate(both)
        elif ".mlp.up_proj." not in key:
            layer, name = key.split(".layer.", 1)
            theirs = next((name.replace(ours, each) for ours, each in _DINOV2.items() if ours in name), name)
            renamed[f"{layer}.layer.{theirs}"] = values
    return renamed


def _of_experts(model: Any, name: str, gradient: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield gradients of single experts, which modules hold together and files apart."""
    is_mixtral = model.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    block, _, last = (name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name).rpartition(".")
    if last == "gate_up_proj":
        for expert, both in enumerate(gradient):
            yield from zip((f"{block}.{expert}.{each}.weight" for each in (gate, up)), np.split(both, 2), strict=True)
    elif last == "down_proj":
        yield from ((f"{block}.{expert}.{down}.weight", values) for expert, values in enumerate(gradient))
    else:
        yield f"{block}.{last}", gradient
