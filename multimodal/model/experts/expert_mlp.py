"""The MLP of a layer with experts: a router, the experts that this rank holds, and optionally a shared expert."""

import dataclasses
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList

from multimodal.model.collectives import RankLink, gather_for_products, sum_rows
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear, deferrable_linear
from multimodal.model.experts.dispatch import compute_by_experts
from multimodal.model.experts.grouped_linear import build_engine_linear, grouped_linear, has_grouped_kernel
from multimodal.model.experts.router import Router, RowSequences, attach_loss, sequence_balance_loss
from multimodal.model.tensor_parallel_waits import TensorParallelWaits
from multimodal.values.units.transformer import Experts


def is_of_expert(name: str) -> bool:
    """Return True if a parameter, by its name, belongs to experts that ranks may share."""
    return ".mlp.experts." in name


class Expert(Module):
    """One MLP without biases, whose inner width tensor parallel ranks share; makes no collective calls."""

    def __init__(self, config: TransformerConfig, inner_size: int, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.activation, self.is_gated = config.activation_func, config.gated_linear_unit
        given: dict[str, Any] = {
            "config": dataclasses.replace(config, sequence_parallel=False),
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "tp_group": groups.tp,
        }
        outer, inner = config.hidden_size, inner_size * (2 if self.is_gated else 1)
        self.linear_fc1 = DeferrableColumnParallelLinear(outer, inner, gather_output=False, **given)
        self.linear_fc2 = DeferrableRowParallelLinear(inner_size, outer, input_is_parallel=True, **given)

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [num_rows, hidden_size]; returns this rank's part of the sum over tensor parallel ranks."""
        inner = self.activated(deferrable_linear(rows, self.linear_fc1.weight, None))
        return deferrable_linear(inner, self.linear_fc2.weight, None)

    def activated(self, inner: Tensor) -> Tensor:
        """Return what the second product multiplies."""
        if not self.is_gated:
            return self.activation(inner)
        gate, value = inner.chunk(2, dim=-1)
        return self.activation(gate) * value


class ExpertMLP(Module):
    """Replaces the MLP of a transformer layer.

    Expert parallel ranks hold equally many experts, in order. A parameter's name has the expert's number among all experts, so
    the plan determines which ranks hold it, as with layers.
    """

    waits: TensorParallelWaits | None = None
    sequences: RowSequences | None = None
    """The sequences of the next rows, if the loss that balances experts is wanted."""
    num_step_tokens = 1
    engine: ModuleList | None = None
    """Both products of all own experts by Transformer Engine, if it is used."""
    row_multiple = 1

    def __init__(self, config: TransformerConfig, experts: Experts, inner_size: int, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.experts_shape, self.groups, self.is_sequence_parallel = experts, groups, config.sequence_parallel
        self.router = Router(config, experts)
        num_own = experts.num_experts // groups.ep.size()
        # The last one comes first, so that the weights lie in order in Megatron's buffers, which start with the last parameter.
        own = reversed(range(groups.ep.rank() * num_own, (groups.ep.rank() + 1) * num_own))
        self.experts = ModuleDict({str(number): Expert(config, inner_size, groups) for number in own})
        for parameter in self.experts.parameters():
            parameter.allreduce = groups.ep.size() == 1  # type: ignore[attr-defined]  # megatron-core: not with all replicas
        shared = experts.shared_expert_intermediate_size
        self.shared_expert = Expert(config, shared, groups) if shared is not None else None
        self._losses: list[Tensor] = []
        """Losses that balance experts, of all backwards since they were last taken."""

    def use_engine(self, *, accumulates: bool, delays: bool, row_multiple: int) -> None:
        """Let Transformer Engine multiply; row_multiple: of the rows of each expert; others: see `build_engine_linear`."""
        self.row_multiple = row_multiple
        self.engine = ModuleList(
            build_engine_linear(weights, accumulates=accumulates, delays=delays) for weights in self._weights
        )

    @property
    def _weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """The first and the second weight of each own expert, in order."""
        own: list[Any] = [self.experts[name] for name in sorted(self.experts, key=int)]
        return [each.linear_fc1.weight for each in own], [each.linear_fc2.weight for each in own]

    def take_losses(self) -> float:
        """Return the sum of `sequence_balance_loss` over this rank's backwards; those of all ranks add up to the total."""
        taken, self._losses[:] = float(sum(self._losses)), ()
        return taken if self.is_sequence_parallel else taken / self.groups.tp.size()

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """hidden: [rows, 1, hidden_size], / tp under sequence parallelism. Returns the same shape, and no bias."""
        link = RankLink(self.groups.tp, self.is_sequence_parallel, self.waits)
        routing = self.router(hidden[:, 0])
        weights = routing.weights
        if self.sequences is not None:
            loss = sequence_balance_loss(routing, self.sequences, experts=self.experts_shape)
            weight = self.experts_shape.aux_loss_coeff / self.num_step_tokens
            weights = attach_loss(weights, loss, weight=weight, note=self._losses.append)
        silent = link._replace(waits=None)
        rows = gather_for_products(hidden, link)[:, 0]
        made = compute_by_experts(
            rows,
            silent.start_gathering(routing.experts).wait(),
            gather_for_products(weights, silent),
            num_experts=self.experts_shape.num_experts,
            group=self.groups.ep,
            compute=self._compute,
        )
        if self.shared_expert is not None:
            made = made + self.shared_expert(rows)
        return sum_rows(made.unsqueeze(1), link), None

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        first, second = self._weights
        expert: Expert = next(iter(self.experts.values()))  # type: ignore[assignment]
        if self.engine is None:
            given = counts if has_grouped_kernel(rows, (first[0], second[0])) else counts.tolist()
            return grouped_linear(expert.activated(grouped_linear(rows, given, first)), given, second)
        padded = -(-counts // self.row_multiple) * self.row_multiple
        sizes: list[int] = padded.tolist()
        added = padded - counts
        places = torch.arange(len(rows), device=rows.device)
        places += (added.cumsum(0) - added).repeat_interleave(counts, output_size=len(rows))
        spread = rows if self.row_multiple == 1 else rows.new_zeros(sum(sizes), rows.shape[1]).index_copy(0, places, rows)
        up, down = self.engine
        made: Tensor = down(expert.activated(up(spread, sizes)), sizes)
        return made if self.row_multiple == 1 else made.index_select(0, places)
