"""A kind of layer that Braid does not have: a class on each side and a row for each, as docs/write_your_own.md says."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from multimodal.cost.cluster import Cluster
from multimodal.cost.layers import registry as costs
from multimodal.cost.layers.collectives import LayerCollectives, collective_per_token
from multimodal.cost.layers.layer import ActivationBytes, ActivationCase, Layer
from multimodal.cost.unit_load import UnitLoad
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear
from multimodal.model.layers import registry as kinds
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass

NAME = "gated_residual"


class GatedResidualLayer(Layer):
    """hidden + gate x down(gelu(up(hidden))), without a norm."""

    num_products = 2

    @property
    def num_weights(self) -> int:
        shape = self.unit.transformer
        return 2 * shape.hidden_size * shape.ffn_hidden_size

    @property
    def num_vector_entries(self) -> int:
        return self.unit.transformer.hidden_size

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        shape, trains = self.unit.transformer, case.need.trains_weights
        per_token = case.bytes_per_element * load.num_tokens
        whole = 2 * shape.hidden_size if trains else 0
        return ActivationBytes(1.0 * per_token * whole, 1.0 * per_token * shape.ffn_hidden_size * (2 if trains else 1))

    def collectives(self, *, tensor_parallel_size: int, ranks: Sequence[int], cluster: Cluster) -> LayerCollectives:
        size = cluster.bytes_per_element * self.unit.transformer.hidden_size
        return LayerCollectives(collective_per_token(size, ranks=ranks[:tensor_parallel_size], cluster=cluster).times(2))


class GatedResidual(Module):
    """`up` is split by outputs, `down` by inputs, `gate` is whole on every rank."""

    def __init__(self, config: TransformerConfig, context: LayerContext) -> None:
        super().__init__()
        shared: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "tp_group": context.groups.tp,
        }
        inner = config.ffn_hidden_size
        self.up = DeferrableColumnParallelLinear(config.hidden_size, inner, gather_output=False, **shared)
        self.down = DeferrableRowParallelLinear(inner, config.hidden_size, input_is_parallel=True, skip_bias_add=False, **shared)
        self.gate = torch.nn.Parameter(torch.empty(config.hidden_size, dtype=config.params_dtype))
        self.gate.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * self.down(torch.nn.functional.gelu(self.up(hidden)[0]))[0]


class GatedResidualKind(LayerKind):
    """Reads nothing but hidden states."""

    column_parallel = ("up",)
    row_parallel = ("down",)
    residual_ends = ("down",)

    def build(self, context: LayerContext, index: int) -> GatedResidual:
        return GatedResidual(context.config, context)

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        output: Tensor = layer(hidden)
        return output

    def initial_vector(self, name: str) -> float:
        return 0.5


def register() -> None:
    costs.LAYER_KINDS[NAME], kinds.LAYER_KINDS[NAME] = GatedResidualLayer, GatedResidualKind()


def remove() -> None:
    del costs.LAYER_KINDS[NAME], kinds.LAYER_KINDS[NAME]
