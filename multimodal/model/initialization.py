"""Initial values that do not depend on the layout: every parameter is drawn whole from its own name, then sharded.

So two runs with the same seed start alike whatever their TP, PP and DP, which is what makes them comparable to 1e-9.
"""

import hashlib
import math

import torch
from torch import Tensor

from multimodal.model.parameter_sharding import full_shape, mark_sharding, sharding_of, take_shard
from multimodal.model.unit_stage import UnitStage
from multimodal.values.model_graph import LayerKind


@torch.no_grad()
def initialize_parameters(stage: UnitStage, *, seed: int) -> None:
    """Fill a stage's parameters: normal(0, std) matrices, ones for norms, zeros for biases (Megatron's scheme).

    Matrices that end a residual branch get std / sqrt(2 x num_layers).
    """
    shape = stage.unit.transformer
    size, rank = stage.groups.tp.size(), stage.groups.tp.rank()
    for name, parameter in stage.named_parameters():
        layer = stage.unit.layers[int(name.split(".")[1])]
        sharding = sharding_of(stage.unit, name)
        mark_sharding(parameter, sharding)
        if parameter.dim() < 2:
            parameter.fill_(1.0 if name.endswith(("norm.weight", "layer_norm_weight")) else 0.0)
            continue
        std = shape.init_method_std
        if layer is LayerKind.TRANSFORMER and ("linear_proj" in name or "linear_fc2" in name):
            std /= math.sqrt(2 * shape.num_layers)
        whole = full_shape(parameter.shape, sharding, tensor_parallel_size=size)
        values = _draw(whole, std=std, name=f"{stage.unit.name}.{name}", seed=seed, device=parameter.device)
        parameter.copy_(take_shard(values, sharding, rank=rank, tensor_parallel_size=size))


def _draw(shape: tuple[int, ...], *, std: float, name: str, seed: int, device: torch.device) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * std
