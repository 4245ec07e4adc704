"""An encoder's last layer: merge neighbouring patches and map them to the LLM's hidden size."""

import dataclasses

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.model.layers.transformer import MLP_SUBMODULES
from multimodal.model.norm import Norm
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit


class Projector(torch.nn.Module):
    """Norm, concatenation of merge_size^2 neighbouring patches, two-layer GELU MLP (Qwen2-VL's patch merger)."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        merge_factor: int,
        projector_hidden_size: int | None,
        output_size: int,
    ) -> None:
        super().__init__()
        merged_size = config.hidden_size * merge_factor
        plain = dataclasses.replace(
            config,
            hidden_size=output_size,
            ffn_hidden_size=projector_hidden_size or merged_size,
            sequence_parallel=False,
            gated_linear_unit=False,
            activation_func=torch.nn.functional.gelu,
            add_bias_linear=True,
        )
        self.merged_size = merged_size
        self.is_sequence_sharded = config.sequence_parallel
        self.group = groups.tp
        self.norm = Norm(dataclasses.replace(config, sequence_parallel=False), config.hidden_size, eps=config.layernorm_epsilon)
        self.mlp = MLP(plain, MLP_SUBMODULES, input_size=merged_size, ffn_hidden_size=plain.ffn_hidden_size, tp_group=groups.tp)

    def forward(self, hidden: Tensor, num_patches: int) -> Tensor:
        """hidden: [num_patches (padded and / tp under sequence parallelism), 1, hidden_size].

        Returns [num_patches / merge_size^2, output_size], the same on every tensor parallel rank.
        """
        if self.is_sequence_sharded:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        merged = self.norm(hidden[:num_patches]).reshape(-1, 1, self.merged_size)
        output, bias = self.mlp(merged)
        result: Tensor = (output + bias)[:, 0]
        return result


class ProjectorKind(LayerKind):
    """Gives the rows that the LLM takes; their width is its hidden size."""

    column_parallel = ("linear_fc1",)
    row_parallel = ("linear_fc2",)

    def build(self, context: LayerContext, index: int) -> Projector:
        """Build it for the LLM downstream."""
        return Projector(
            config=context.config,
            groups=context.groups,
            merge_factor=context.unit.merge_factor,
            projector_hidden_size=context.unit.projector_hidden_size,
            output_size=self.output_size(context),
        )

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Merge and map; returns [num_merged_tokens, output_size]."""
        projected: Tensor = layer(hidden, given.batch.num_tokens)
        return projected

    def output_size(self, context: LayerContext) -> int:
        """Return the hidden size of the units downstream; raises ModelError where they differ."""
        unit, graph = context.unit, context.graph
        sizes = {graph.unit(name).transformer.hidden_size for name in graph.downstream(unit.name)}
        if len(sizes) > 1:
            raise ModelError(
                f"unit '{unit.name}' feeds units of different hidden sizes {sorted(sizes)}; it can feed only one size"
            )
        return sizes.pop() if sizes else unit.transformer.hidden_size

    def num_tokens_per_output(self, unit: Unit) -> int:
        """Return the neighbouring tokens that are merged."""
        return unit.merge_factor
