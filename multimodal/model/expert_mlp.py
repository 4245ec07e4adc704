"""The MLP of a layer with experts: a router, the experts that this rank holds, and optionally a shared expert.

Every rank of an expert parallel group holds equally many experts, in order. Rows are sorted by expert, so those for one rank are
consecutive; after the exchange, which is as uneven as the choices, they are sorted by expert again. No row is dropped.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, Parameter

from multimodal.balance.exchange.module_exchange import exchange_rows
from multimodal.model.collectives import RankLink, TensorParallelWaits, gather_for_products, sum_rows
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear, deferrable_linear
from multimodal.model.grouped_linear import build_engine_linear, grouped_linear, has_grouped_kernel
from multimodal.model.swiglu import swiglu
from multimodal.model.transformer_config import BuildOptions
from multimodal.values.units.transformer import Experts


class Routing(NamedTuple):
    """The experts of some rows."""

    experts: Tensor
    """[num_rows, topk], int64."""
    weights: Tensor
    """[num_rows, topk]: factors of the experts' outputs, in at least float32."""
    shares: Tensor
    """[num_rows, num_experts]: the softmax over all experts."""


class Router(Module):
    """Scores all experts in at least float32, and takes the best; the weight's gradient is summed over shares of rows."""

    def __init__(self, config: TransformerConfig, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        shape = experts.num_experts, config.hidden_size
        self.weight = Parameter(torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, rows: Tensor) -> Routing:
        """rows: [num_rows, hidden_size]."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        scores = torch.nn.functional.linear(rows.to(wide), self.weight.to(wide))
        best, chosen = scores.topk(self.experts.router_topk, dim=-1)
        shares = scores.softmax(-1)
        weights = shares.gather(-1, chosen) if self.experts.router_pre_softmax else best.softmax(-1)
        return Routing(chosen, weights, shares)


class RowSequences(NamedTuple):
    """The sequences that rows belong to."""

    numbers: Tensor
    """[num_rows]: the sequence of each row; -1 for padding rows."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, on all ranks that share it."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    """Groups of ranks that have other rows of the same sequences."""


def sequence_balance_loss(routing: Routing, sequences: RowSequences, *, experts: Experts) -> Tensor:
    """Return the sum over this rank's tokens of the terms that DeepSeek-V3's sequence-wise loss (2.1.2, without alpha) averages.

    For a sequence of T tokens the loss is the sum over experts e of f_e P_e: f_e = num_experts / (topk T) x the number of tokens
    that chose e, and P_e the mean of the tokens' shares. So every token adds sum f_e s_e, and a rank only needs to know how many
    of the other ranks' tokens chose each expert. Summed over all sequences this is their length-weighted mean times the number of
    tokens: the same under any plan.
    """
    num_experts, topk = experts.num_experts, experts.router_topk
    is_token = sequences.numbers >= 0
    numbers, chosen = sequences.numbers[is_token], routing.experts[is_token]
    num_cells = len(sequences.lengths) * num_experts
    cells = (numbers.unsqueeze(1) * num_experts + chosen).flatten()
    counts = torch.zeros(num_cells, dtype=torch.int64, device=cells.device).index_add_(0, cells, torch.ones_like(cells))
    for group in sequences.groups:
        dist.all_reduce(counts, group=group)
    lengths = torch.tensor(sequences.lengths, dtype=routing.shares.dtype, device=counts.device).clamp(min=1)
    fractions = counts.view(-1, num_experts) * (num_experts / topk) / lengths.unsqueeze(1)
    return (fractions[numbers] * routing.shares[is_token]).sum()


def attach_loss(values: Tensor, loss: Tensor, *, weight: float, note: Callable[[Tensor], None]) -> Tensor:
    """Return `values`; their backward (a forward may run twice) gives `loss` a gradient of `weight`, and notes its value."""
    return _AttachLoss.apply(values, loss, weight, note)  # type: ignore[no-untyped-call]


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor, weight: float, note: Callable[[Tensor], None]) -> Tensor:
        ctx.loss, ctx.weight, ctx.note = loss.detach(), weight, note
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        ctx.note(ctx.loss)
        return gradient, torch.full_like(ctx.loss, ctx.weight), None, None


class _Order(NamedTuple):
    """A permutation of rows, and its inverse."""

    forward: Tensor
    backward: Tensor

    @classmethod
    def sorting(cls, keys: Tensor) -> "_Order":
        """Return the stable permutation that sorts by keys."""
        order = keys.argsort(stable=True)
        return cls(order, torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device)))

    @property
    def mirrored(self) -> "_Order":
        """Return the inverse."""
        return _Order(self.backward, self.forward)


def compute_by_experts(
    rows: Tensor, chosen: Tensor, weights: Tensor, *, num_experts: int, group: dist.ProcessGroup, compute: "ComputeExperts"
) -> Tensor:
    """Return for every row the weighted sum of its experts' outputs.

    rows: [num_rows, hidden_size]; chosen, weights: [num_rows, topk]; num_experts: of all ranks of `group`, which hold equally
    many; compute: a function of the rows sorted by this rank's experts, and of their numbers.
    """
    topk = chosen.shape[1]
    order = _Order.sorting(chosen.flatten())
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    copies = _permuted(rows, _Order(order.forward // topk, order.backward), num_copies=topk)
    if group.size() == 1:
        made = compute(copies, counts)
    else:
        made = _compute_on_owners(copies, counts.view(group.size(), -1), group=group, compute=compute)
    parts = _permuted(made, order.mirrored).view(-1, topk, rows.shape[1])
    return (parts * weights.unsqueeze(-1).to(parts.dtype)).sum(1)


ComputeExperts = Callable[[Tensor, Tensor], Tensor]


def _compute_on_owners(copies: Tensor, counts: Tensor, *, group: dist.ProcessGroup, compute: ComputeExperts) -> Tensor:
    """counts: [num_ranks, experts per rank], of this rank's rows."""
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
    numbers = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
    order = _Order.sorting(numbers.repeat_interleave(arriving.flatten()))
    there = exchange_rows(copies, sent, received, group)
    made = compute(_permuted(there, order), arriving.sum(0))
    return exchange_rows(_permuted(made, order.mirrored), received, sent, group)


def _permuted(rows: Tensor, order: _Order, *, num_copies: int = 1) -> Tensor:
    return _Permute.apply(rows, order, num_copies)  # type: ignore[no-untyped-call]


class _Permute(torch.autograd.Function):
    """Selects rows, each `num_copies` times; a row's gradients are summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: _Order, num_copies: int) -> Tensor:
        ctx.save_for_backward(order.backward)
        ctx.num_copies = num_copies
        return rows.index_select(0, order.forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (backward,) = ctx.saved_tensors
        rows = gradient.index_select(0, backward)
        return rows.view(-1, ctx.num_copies, rows.shape[1]).sum(1) if ctx.num_copies > 1 else rows, None, None


def is_of_expert(name: str) -> bool:
    """Return True if a parameter, by its name, belongs to experts that ranks may share."""
    return ".mlp.experts." in name


class Expert(Module):
    """One MLP without biases, whose inner width tensor parallel ranks share; makes no collective calls."""

    def __init__(self, config: TransformerConfig, inner_size: int, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.activation, self.is_gated = config.activation_func, config.gated_linear_unit
        whole = dataclasses.replace(config, sequence_parallel=False)
        given: dict[str, Any] = {"config": whole, "init_method": config.init_method, "tp_group": groups.tp}
        given |= {"bias": False, "skip_bias_add": False}
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
        if self.activation is torch.nn.functional.silu:
            return swiglu(inner)
        gate, value = inner.chunk(2, dim=-1)
        return self.activation(gate) * value


class ExpertMLP(Module):
    """Replaces the MLP of a transformer layer; expert parallel ranks hold equally many experts, in order.

    Names of parameters have the number among all experts, so the plan determines which ranks hold them, as with layers.
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

    def use_engine(self, options: BuildOptions, *, accumulates: bool) -> None:
        """Let Transformer Engine multiply, rows of each expert by `row_multiple`; accumulates: see `build_engine_linear`."""
        self.row_multiple = options.row_multiple
        how = {"accumulates": accumulates, "delays": options.delays_weight_gradients}
        self.engine = ModuleList(build_engine_linear(weights, **how) for weights in self._weights)

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
        chosen, weights = silent.start_gathering(routing.experts).wait(), gather_for_products(weights, silent)
        num_experts = self.experts_shape.num_experts
        made = compute_by_experts(rows, chosen, weights, num_experts=num_experts, group=self.groups.ep, compute=self._compute)
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
