"""Initial values that do not depend on the layout: every whole parameter is drawn from its own name, then sharded.

So two runs with the same seed start alike whatever their TP, PP and DP, which makes them comparable to 1e-9.
"""

import hashlib

import torch

from multimodal.model.adapter import DOWN, is_adapter
from multimodal.model.layers.registry import kind_of, sharding_of
from multimodal.model.parameter_sharding import full_shape, mark_sharding, take_shard
from multimodal.model.unit_stage import UnitStage


@torch.no_grad()
def initialize_parameters(stage: UnitStage, *, seed: int) -> None:
    """Fill a stage's parameters: normal(0, std) matrices, ones for norms, zeros for biases (Megatron's scheme).

    Matrices that end a residual branch get std / sqrt(2 num_layers); an adapter's second matrix is zero.
    """
    size, rank = stage.groups.tp.size(), stage.groups.tp.rank()
    for name, parameter in stage.named_parameters():
        kind = kind_of(stage.unit, int(name.split(".")[1]))
        sharding = sharding_of(stage.unit, name)
        mark_sharding(parameter, sharding)
        if kind.initialises_itself:
            continue
        if parameter.dim() < 2:
            is_from_zero = stage.unit.transformer.layernorm_zero_centered_gamma and name.endswith("norm.weight")
            parameter.fill_(0.0 if is_from_zero else kind.initial_vector(name))
            continue
        whole = full_shape(parameter.shape, sharding, tensor_parallel_size=size)
        values = kind.initial_matrix(name.split(".", 2)[2], whole)
        if values is None:
            std = kind.initial_std(stage.unit, name)
            if is_adapter(name):  # as in PEFT, which draws uniformly
                std = (3 * whole[1]) ** -0.5 if name.endswith(DOWN) else 0.0
            digest = hashlib.sha256(f"{seed}:{stage.unit.name}.{name}".encode()).digest()
            generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7], "little"))
            values = torch.randn(whole, generator=generator, device=parameter.device, dtype=torch.float32) * std
        parameter.copy_(take_shard(values, sharding, rank=rank, tensor_parallel_size=size))
