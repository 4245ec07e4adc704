"""Transformer layers with a mixture of experts in place of the MLP."""

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import Module

from multimodal.model.experts.expert_mlp import ExpertMLP
from multimodal.model.experts.router import RowSequences
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.model.layers.transformer import TransformerKind, accumulates_in_engine
from multimodal.model.norm import Norm


class MoeTransformerKind(TransformerKind):
    """A transformer layer with another MLP, which several ranks may share (expert parallelism); it runs as a whole."""

    num_segments = 1

    def build(self, context: LayerContext, index: int) -> Module:
        """Build the layer without an MLP, and the experts."""
        shape = context.unit.transformer
        assert shape.experts is not None, "a model with such layers describes their experts"
        layer = super().build(context, index)
        layer.mlp = mlp = ExpertMLP(context.config, shape.experts, shape.expert_hidden_size, context.groups)
        if context.implementation != "local":
            options = context.options
            mlp.use_engine(
                accumulates=accumulates_in_engine(options),
                delays=options.delays_weight_gradients,
                row_multiple=options.row_multiple,
            )
        return layer

    def adapt(self, spec: ModuleSpec) -> None:
        """Leave the MLP out of the spec, and with it the norm that Transformer Engine fuses with it."""
        spec.submodules.mlp, spec.submodules.pre_mlp_layernorm = IdentityOp, Norm

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Run the layer on packed sequences, which the loss that balances experts distinguishes."""
        mlp = layer.mlp
        assert isinstance(mlp, ExpertMLP)
        wants_loss = mlp.experts_shape.aux_loss_coeff > 0 and mlp.router.weight.requires_grad and torch.is_grad_enabled()
        mlp.sequences = _sequences(mlp, given, len(hidden)) if wants_loss else None
        mlp.num_step_tokens = given.num_step_tokens
        output = super().run(layer, hidden, given)
        mlp.sequences = None
        return output

    segments = LayerKind.segments  # it is not cut


def _sequences(mlp: ExpertMLP, given: StagePass, num_rows: int) -> RowSequences:
    """Return the sequences of this rank's rows; num_rows: of this rank."""
    tensor = mlp.groups.tp
    numbers = given.lengths.sequence_numbers(given.batch.positions.device)[: given.batch.num_tokens]
    num_all = num_rows * (tensor.size() if mlp.is_sequence_parallel else 1)
    padded = torch.nn.functional.pad(numbers, (0, num_all - len(numbers)), value=-1)
    groups = [mlp.groups.cp, *([tensor] if mlp.is_sequence_parallel else [])]
    return RowSequences(
        padded.chunk(tensor.size())[tensor.rank()] if mlp.is_sequence_parallel else padded,
        given.batch.lengths,
        tuple(group for group in groups if group.size() > 1),
    )
