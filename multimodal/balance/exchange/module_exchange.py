"""Balances modules over the ranks of a process group: lengths of what each rank drew in, an exchange of rows out.

Every rank draws its share of a batch, as ever. `plan_exchange` deals each module's items anew (`post_balance`), `send_inputs`
brings their rows to the ranks that compute them, and `send_outputs` brings the outputs to whoever takes them: back to the rank
that drew the item, or straight to where the next module computes (OrchMLLM's composition of two rearrangements).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.length_cost import LINEAR_COST, LengthCost
from multimodal.balance.rearrange_nodes import rearrange_nodes
from multimodal.values.arrays.rows import Floats, Integers, group_rows, integers, order_by, row_starts, take_rows
from multimodal.values.errors import AssignmentError


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send consecutive rows to each rank of the group and return those received, by rank; collective, and so is its backward.

    rows: [sum(sent), ...]; sent, received: rows to and from each rank.
    """
    if torch.is_grad_enabled() and not rows.requires_grad and rows.is_floating_point():
        rows = rows.detach().requires_grad_()  # other ranks' rows may need a gradient, whose exchange all ranks must take part in
    return _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]


def start_exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start the same without gradients; returns what is complete when the work is."""
    arriving = rows.new_empty((sum(received), *rows.shape[1:]))
    work = dist.all_to_all_single(arriving, rows.contiguous(), received, sent, group=group, async_op=True)
    assert work is not None, "this rank is not in the group"
    return arriving, work


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        arrived, work = start_exchange(rows, sent, received, group)
        work.wait()
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        arrived, work = start_exchange(gradient, *ctx.back)
        work.wait()
        return arrived, None, None, None


@dataclass(frozen=True, kw_only=True)
class DrawnItems:
    """The items of one module (images of an encoder, samples of an LLM) that this rank drew for a step, in their order."""

    lengths: Sequence[int]
    """[num_items] tokens, by which an item weighs."""
    rows: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Name -> [num_items] rows of each item in tensors of that name; there always are `lengths`, and `items`, one row each."""
    consumer: str | None = None
    """The module that takes the outputs; None: whoever drew the items."""
    consumed_by: Sequence[int] = ()
    """[num_items] index of the consumer's item, among those that this rank drew, which takes the output."""
    cost: LengthCost = LINEAR_COST
    """The module's cost as a function of lengths, alike on all ranks."""


class _Layout(NamedTuple):
    """Where items are: rank r has ids[starts[r] : starts[r + 1]], in this order. Ids number what all ranks drew, rank by rank."""

    starts: Integers
    ids: Integers
    ranks: Integers
    """[num_items] by id."""

    @classmethod
    def of(cls, ranks: Integers, size: int, *, order: Integers | None = None) -> "_Layout":
        ids = np.arange(len(ranks)) if order is None else order
        return cls(*group_rows(ranks[ids], ids, size), ranks)

    def on(self, rank: int) -> Integers:
        return self.ids[self.starts[rank] : self.starts[rank + 1]]


class PendingRows:
    """Rows under way."""

    def __init__(self, arriving: Tensor, work: dist.Work, order: Tensor) -> None:
        self._arriving, self._work, self._order = arriving, work, order

    def wait(self) -> Tensor:
        """Return the rows of the items that this rank computes, in their order."""
        self._work.wait()
        return self._arriving.index_select(0, self._order)


class ModuleExchange:
    """The exchange of one module's rows in one step."""

    def __init__(
        self, name: str, rows: Mapping[str, Integers], cost: LengthCost, layouts: tuple[_Layout, ...], group: dist.ProcessGroup
    ) -> None:
        """rows: name -> [items of all ranks]; layouts: where items are drawn, computed and consumed."""
        self._name, self._rows, self._cost, self._layouts, self._group = name, rows, cost, layouts, group
        self._rank = group.rank()

    def rows_here(self, name: str = "lengths") -> list[int]:
        """Return the rows of each item that this rank computes, in the order in which they arrive."""
        return self._rows[name][self._layouts[1].on(self._rank)].tolist()

    @property
    def costs(self) -> tuple[Integers | Floats, Integers | Floats]:
        """[num_ranks] each: what every rank would compute of what it drew, and what it computes."""
        before, after = (self._cost.row_costs(at.starts, self._rows["lengths"][at.ids]) for at in self._layouts[:2])
        return before, after

    def send_inputs(self, rows: Tensor, name: str = "lengths") -> PendingRows:
        """Start sending rows of drawn items to where they are computed; collective. Best called a step ahead; has no gradient.

        rows: [num_rows, ...] of this rank's items as drawn, `rows[name]` of each. Raises AssignmentError.
        """
        with torch.no_grad():
            leaving, sizes, order = self._prepare(rows.detach(), name, 0)
            return PendingRows(*start_exchange(leaving, *sizes, self._group), order)

    def send_outputs(self, rows: Tensor, name: str = "lengths") -> Tensor:
        """Return the rows of outputs that this rank takes, by the consumer's item, then as drawn; collective, as is its backward.

        So the result has to lead to the loss on every rank, even where it has no rows. rows: [num_rows, ...] of the items that
        this rank computed, in the order of `rows_here`. Raises AssignmentError.
        """
        leaving, sizes, order = self._prepare(rows, name, 1)
        return exchange_rows(leaving, *sizes, self._group).index_select(0, order)

    def _prepare(self, rows: Tensor, name: str, start: int) -> tuple[Tensor, tuple[list[int], list[int]], Tensor]:
        """Return rows in the order of messages, rows to and from each rank, and the order of what arrives."""
        if name not in self._rows:
            raise AssignmentError(f"module '{self._name}' has no rows '{name}'; give DrawnItems(rows=...) them: {[*self._rows]}")
        counts, source, target = self._rows[name], *self._layouts[start : start + 2]
        position = np.empty_like(target.ids)
        position[target.ids] = np.arange(len(target.ids))
        mine, theirs = source.on(self._rank), target.on(self._rank)
        if len(rows) != (expected := counts[mine].sum()):
            raise AssignmentError(
                f"module '{self._name}': a tensor has {len(rows)} rows, but the '{name}' of its items on rank {self._rank} add "
                f"up to {expected}; give all rows of all items, in their order"
            )
        leaving = np.argsort(position[mine])  # which is by target rank
        arriving = np.argsort(source.ranks[theirs], kind="stable")
        sent, received = (
            np.bincount(layout.ranks[ids], counts[ids], self._group.size()).astype(np.int64).tolist()
            for layout, ids in ((target, mine), (source, theirs))
        )
        into_place = _row_order(counts[theirs[arriving]], np.argsort(arriving), rows.device)
        return rows.index_select(0, _row_order(counts[mine], leaving, rows.device)), (sent, received), into_place


def _row_order(counts: Integers, order: Integers, device: torch.device) -> Tensor:
    """Return the rows of items in an order of the items."""
    starts = row_starts(counts)
    return torch.from_numpy(take_rows(starts, np.arange(starts[-1]), order)[1]).to(device)


def plan_exchange(
    drawn: Mapping[str, DrawnItems],
    *,
    group: dist.ProcessGroup,
    ranks_per_node: int = 1,
    balanced: Collection[str] | None = None,
    keeps_counts: bool = False,
) -> dict[str, ModuleExchange]:
    """Deal the items of every module over the group's ranks; collective, of a few bytes per item.

    drawn: modules by name, the same on all ranks; those of a chain or graph name their consumers. group: the modules' data
    parallel ranks; tensor and context parallel ranks each exchange within their own. ranks_per_node: bins go to ranks such that
    little crosses nodes of this size (OrchMLLM, Alg. 3). balanced: modules that are dealt anew; items of others are computed
    where they were drawn. None: all. keeps_counts: every rank computes as many items of a module as any other, which must be as
    many as it drew. Raises AssignmentError on all ranks alike.
    """
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, {name: _as_told(items) for name, items in drawn.items()}, group=group)
    for rank, found in enumerate(told):
        if problem := _find_problem(found, told[0]):
            raise AssignmentError(f"rank {rank} of the group: {problem}")
        counts, first = ({name: len(each["rows"]["items"]) for name, each in of.items()} for of in (found, told[0]))
        if keeps_counts and counts != first:
            raise AssignmentError(f"keeps_counts=True, but rank {rank} of the group drew {counts} items, and rank 0 {first}")
    layouts = {
        name: _deal([each[name] for each in told], ranks_per_node, balanced is None or name in balanced, keeps_counts)
        for name in drawn
    }
    exchanges = {}
    for name, items in drawn.items():
        shares = [each[name] for each in told]
        rows = {key: integers([row for share in shares for row in share["rows"][key]]) for key in shares[0]["rows"]}
        at, computed = layouts[name]
        consumed = at
        if items.consumer is not None:
            of_consumer, computing = layouts[items.consumer]
            indices = [of_consumer.starts[rank] + np.asarray(share["consumed_by"]) for rank, share in enumerate(shares)]
            consumers = np.concatenate(indices).astype(np.int64)
            consumed = _Layout.of(computing.ranks[consumers], group.size(), order=order_by(consumers))
        exchanges[name] = ModuleExchange(name, rows, items.cost, (at, computed, consumed), group)
    return exchanges


def _as_told(items: DrawnItems) -> dict[str, Any]:
    lengths = list(map(int, items.lengths))
    rows = {name: list(map(int, each)) for name, each in items.rows.items()}
    rows |= {"lengths": lengths, "items": [1] * len(lengths)}
    return {"rows": rows, "consumer": items.consumer, "cost": items.cost, "consumed_by": list(map(int, items.consumed_by))}


def _find_problem(found: dict[str, Any], first: dict[str, Any]) -> str | None:
    """Return what is wrong with what a rank told, beside what the first rank did."""
    if found.keys() != first.keys():
        return (
            f"modules are {[*found]}, but {[*first]} on the first rank; name all modules on all ranks, also those without items"
        )
    for name, told in found.items():
        like = first[name]
        if (told["consumer"], told["cost"], {*told["rows"]}) != (like["consumer"], like["cost"], {*like["rows"]}):
            return f"module '{name}' has another consumer, cost or names of rows than on the first rank; give all ranks the same"
        sizes = {key: len(each) for key, each in told["rows"].items()}
        if len({*sizes.values()}) > 1:
            return f"module '{name}' has rows of unlike numbers of items, {sizes}; give every item one number of rows of each"
        if any(row < 0 for each in told["rows"].values() for row in each):
            return f"module '{name}' has an item with a negative number of rows"
        if (consumer := told["consumer"]) is None:
            continue
        if consumer not in found:
            return (
                f"the consumer '{consumer}' of module '{name}' is not listed; list it, or leave consumer out if it stays in place"
            )
        num_consumers = len(found[consumer]["rows"]["items"])
        if len(told["consumed_by"]) != sizes["items"] or not all(0 <= each < num_consumers for each in told["consumed_by"]):
            return (
                f"module '{name}' has {sizes['items']} items and consumed_by={told['consumed_by']}; "
                f"give each item the index of one of the {num_consumers} items of '{consumer}' on this rank"
            )
    return None


def _deal(shares: list[dict[str, Any]], ranks_per_node: int, is_balanced: bool, keeps_counts: bool) -> tuple[_Layout, _Layout]:
    """Return where one module's items are drawn, and where they are computed."""
    size = len(shares)
    at = _Layout.of(np.repeat(np.arange(size), [len(share["rows"]["items"]) for share in shares]), size)
    lengths = integers([length for share in shares for length in share["rows"]["lengths"]])
    if not is_balanced or not len(lengths):
        return at, at
    from scipy.sparse import csr_matrix  # loaded when first used

    most = len(lengths) // size if keeps_counts else None
    bins = post_balance(lengths, num_bins=size, cost=shares[0]["cost"], max_items_per_bin=most).astype(np.int64)
    held = csr_matrix((lengths, (at.ranks, bins)), shape=(size, size))
    return at, _Layout.of(np.argsort(rearrange_nodes(held, ranks_per_node=ranks_per_node).permutation)[bins], size)
