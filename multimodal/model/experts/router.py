"""The choice of experts for every token, and the loss that balances them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, Parameter

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
    """Scores all experts for a token by one product, in at least float32, and takes the best.

    Under sequence parallelism a rank routes its share of the rows, so the gradient of the weight is summed over them.
    """

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
    """Return `values`; their backward gives `loss` a gradient of `weight`, and records its value.

    A forward may run twice under recomputation; a backward does not.
    """
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
