"""The context parallel rank of each token of a step, and the tokens that ranks send and receive, as follows from lengths."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.runtime.communication.broker import Rows, RowShares
from megatron.runtime.step.decision import OutputPiece, StepDecision
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.packed_lengths import ItemSpan, build_packed_mask
from multimodal.attention.share_tokens import TokenDistribution, share_tokens
from multimodal.balance.batch_work import list_items
from multimodal.cost.memoize import memoized
from multimodal.cost.token_shares import ItemDealer, RankShare, TokenShares
from multimodal.cost.unit_load import item_loads
from multimodal.data.sample_source import SampleSource
from multimodal.model.layers.transformer import mask_rule_of
from multimodal.values.assignment import Atom, Microbatch, MicrobatchPlace, Route
from multimodal.values.errors import DataError
from multimodal.values.model_graph import Role
from multimodal.values.sample_lengths import ItemLengths, condition_tokens, first_joined_token, list_conditions


@dataclass(frozen=True, slots=True)
class ContextSharing:
    """The rule that deals tokens, the same on every rank, so that each can compute the tokens of any other."""

    method: TokenDistribution = TokenDistribution.BY_ITEM
    block_size: int = 128
    """Tokens of a block, which stay together; a multiple of the patches that an encoder merges into one token."""
    mask_mode: MaskMode = MaskMode.CAUSAL
    """The role of items in the LLM's attention, which determines the work of a block."""


DEFAULT_SHARING = ContextSharing()
RouteKey = tuple[MicrobatchPlace, MicrobatchPlace]
"""Source and target of a route."""


class RouteRows(NamedTuple):
    """Rows of one route, as one rank needs them."""

    num_rows: int
    """Rows of all ranks."""
    part: int
    """The index of the source's sample subset that they are taken from; 0 if it is not cut."""
    output: Tensor | None
    """[num_rows]: positions of the rows that it sends in its output of that sample subset; None: it sends none."""
    shares: RowShares | None
    """None if neither end spreads tokens."""


WHOLE = -1
"""The whole microbatch, in place of a sample subset's index."""


class TokenPlacement:
    """The places of one step's tokens. Each result is computed once, on first use; pickling keeps the computed ones."""

    def __init__(self, step: StepDecision, *, sharing: ContextSharing) -> None:
        self._step, self._sharing = step, sharing
        self._sizes = {name: unit.context_parallel_size for name, unit in step.plan.units.items()}
        self._row_shares: dict[tuple[MicrobatchPlace, MicrobatchPlace], RowShares] = {}

    def belongs_to(self, step: StepDecision) -> None:
        """Read lengths from this step from now on: the same lengths, in another form."""
        self._step = step

    def own_share(self, place: MicrobatchPlace, *, part: int, rank: int) -> RankShare | None:
        """Return a context parallel rank's share of a sample subset (or WHOLE); None if its unit does not spread tokens."""
        return None if self._sizes[place.unit] == 1 else RankShare(self._shares_of(place, part), rank)

    def num_tokens(self, place: MicrobatchPlace, *, rank: int) -> tuple[int, ...]:
        """Return the number of tokens of each sample subset of a microbatch that a context parallel rank holds."""
        whole = self._step.num_tokens_of_subsets(place)
        parts = range(len(whole)) if place in self._step.cuts.num_subsets else (WHOLE,)
        shares = [self.own_share(place, part=part, rank=rank) for part in parts]
        return tuple(count if share is None else share.num_tokens for count, share in zip(whole, shares, strict=True))

    def row_shares(self, route: Route) -> RowShares | None:
        """Return the rows of a route that each rank sends and receives; None if neither end spreads tokens."""
        if self._sizes[route.source.unit] == self._sizes[route.target.unit] == 1:
            return None
        key = route.source, route.target
        if key not in self._row_shares:
            self._row_shares[key] = RowShares(given=self._given(route), taken=self._taken(route))
        return self._row_shares[key]

    def output_rows(self, route: Route, *, rank: int) -> Tensor:
        """[num_rows]: positions of the rows sent by context parallel rank `rank` in its output of the route's sample subset."""
        rows, shares = self._step.source_rows(route), self.row_shares(route)
        if shares is None or self._sizes[route.source.unit] == 1:
            return rows
        is_held = self._owner_of_output(route.source, self._part_of(route)) == rank
        own = np.cumsum(is_held) - 1
        return torch.from_numpy(own[rows.numpy()[shares.given[rank]]])

    def rows_of_routes(self, *, rank: int) -> "dict[RouteKey, RouteRows]":
        """Return the rows sent and received on all routes of this rank, ahead of the step that needs them."""
        found: dict[RouteKey, RouteRows] = {}
        for route in (route for routes in self._step.routes.from_source.values() for route in routes):
            giver, taker = (self._context_rank(end, rank) for end in (route.source, route.target))
            if giver is None and taker is None:
                continue
            shares = self.row_shares(route)
            if shares is not None:
                shares.prepare(giver=giver, taker=taker)
            output = None if giver is None else self.output_rows(route, rank=giver)
            num_rows, part = self._step.num_rows_of_route(route), self._step.part_of(route)
            found[route.source, route.target] = RouteRows(num_rows, part, output, shares)
        return found

    def forget_routes(self) -> None:
        """Drop the rows of routes, since they travel in another form."""
        self._row_shares.clear()

    def check_starts(self, place: MicrobatchPlace, *, source: SampleSource) -> None:
        """Raise DataError if tokens are spread and the samples' lengths do not say where their items begin."""
        if all(size == 1 for size in self._sizes.values()):
            return
        for sample_id, _ in self._subset(place, WHOLE):
            expected = self._step.lengths[sample_id].starts
            found = tuple(start for _, start, _ in source.text(sample_id).item_starts)
            if found != expected:
                raise DataError(
                    f"sample {sample_id}: its lengths have its items begin at tokens {list(expected)}, its text at {list(found)};"
                    " with context parallelism a data set must give `item_starts` in its lengths"
                )

    def _context_rank(self, end: MicrobatchPlace, rank: int) -> int | None:
        unit = self._step.plan.units[end.unit]
        return unit.context_parallel_rank(rank) if rank in unit.replicas[end.replica].ranks else None

    def _part_of(self, route: Route) -> int:
        return self._step.part_of(route) if route.source in self._step.cuts.num_subsets else WHOLE

    def _subset(self, place: MicrobatchPlace, part: int) -> Microbatch:
        return self._step.assignment.atoms(place) if part == WHOLE else self._step.subsets(place)[part]

    def _given(self, route: Route) -> tuple[Rows, ...]:
        rows = self._step.source_rows(route).numpy()
        if self._sizes[route.source.unit] == 1:
            return (np.arange(len(rows)),)
        owners = self._owner_of_output(route.source, self._part_of(route))[rows]
        return tuple(np.flatnonzero(owners == rank) for rank in range(self._sizes[route.source.unit]))

    def _taken(self, route: Route) -> tuple[Rows, ...]:
        size = self._sizes[route.target.unit]
        if size == 1:
            return (np.arange(self._step.num_rows_of_route(route)),)
        rows, tokens = self._uses_of(route)
        owners = self._shares_of(route.target, WHOLE).owner_of_token[tokens]
        return tuple(np.unique(rows[owners == rank]) for rank in range(size))

    def _uses_of(self, route: Route) -> tuple[Rows, Rows]:
        """Return rows of a route, and the target's token that is made of each; a generator makes several tokens of one row."""
        unit, first_token = route.target.unit, self._first_tokens(route.target, WHOLE)
        uses, start = [np.empty((2, 0), dtype=np.int64)], 0
        for piece in self._step.pieces_of(route):
            if self._step.graph.unit(unit).role is Role.GENERATOR:
                found = self._made_of(piece, unit, first_token)
            else:
                first = first_token[piece.item]
                if not self._is_backbone(route.target):
                    item = self._in_document(piece.item)
                    first += first_joined_token(self._step.graph, unit, item, source=route.source.unit)
                found = iter([(np.arange(piece.num_rows), first + np.arange(piece.num_rows))])
            uses += [np.stack((start + rows, tokens)) for rows, tokens in found]
            start += piece.num_rows
        rows, tokens = np.concatenate(uses, axis=1)
        return rows, tokens

    def _made_of(self, piece: OutputPiece, unit: str, first_token: Mapping[Atom, int]) -> Iterator[tuple[Rows, Rows]]:
        """Yield rows of a piece and a generator's tokens made of them: one per row, and all patches for the LLM's last row.

        Where that is embedded with the item's time, all tokens of the item are made of it, too.
        """
        sample_id, given = piece.item
        items = self._step.lengths[sample_id].items
        for made, item in enumerate(items):
            if item.unit != unit or Atom(sample_id, made) not in first_token:
                continue
            first = start = first_token[Atom(sample_id, made)]
            for index, count in list_conditions(self._step.graph, unit, items[:made]):
                if index == given:
                    yield np.arange(count), start + np.arange(count)
                start += count
            num_before = self._step.graph.unit(unit).num_conditions - 1
            if made == given:
                rows = np.minimum(np.arange(num_before + item.num_tokens), num_before)
                yield rows, start + np.arange(len(rows))
                if self._step.graph.num_carried(unit, 0):
                    tokens = np.arange(first, start + num_before)
                    yield np.full_like(tokens, num_before), tokens

    def _is_backbone(self, place: MicrobatchPlace) -> bool:
        return self._step.graph.unit(place.unit).role is Role.BACKBONE

    def _item(self, unit: str, atom: Atom) -> ItemLengths:
        return self._in_document(atom).inside(unit)

    def _in_document(self, atom: Atom) -> ItemLengths:
        return self._step.lengths[atom.sample_id].items[atom.item_index]

    def _owner_of_output(self, place: MicrobatchPlace, part: int) -> Rows:
        """Return the context parallel rank of every output row of a sample subset."""
        shares, atoms = self._shares_of(place, part), self._subset(place, part)
        first_token = self._first_tokens(place, part)
        if self._is_backbone(place):
            tokens: list[Any] = []
            for item, num_rows in (piece for atom in atoms for piece in self._step.output_of(place.unit, atom)):
                start = self._step.lengths[item.sample_id].starts[item.item_index]  # of the token that opens it, the last one
                conditions = np.array(condition_tokens(start, num_rows), dtype=np.int64)
                tokens.append(conditions + (first_token[item] - start))
        else:
            firsts = ((first_token[atom], self._item(place.unit, atom)) for atom in atoms)
            rows = ((first, item.num_tokens, item.num_output_tokens) for first, item in firsts)
            # The first of those that were merged.
            tokens = [first + np.arange(made) * count // max(1, made) for first, count, made in rows]
        return shares.owner_of_token[np.concatenate(tokens)] if tokens else np.empty(0, dtype=np.int64)

    @memoized
    def _shares_of(self, place: MicrobatchPlace, part: int) -> TokenShares:
        is_by_item = self._sharing.method is TokenDistribution.BY_ITEM or self._step.graph.unit(place.unit).keeps_items_whole
        if not is_by_item or self._is_backbone(place):
            lengths, items = self._layout(place, part)
            unit = self._step.graph.unit(place.unit)
            rule = mask_rule_of(unit, graph=self._step.graph, mode=self._sharing.mask_mode, window=unit.window_everywhere)
            mask = build_packed_mask(lengths, items=items, rule=rule)
            size, sharing = self._sizes[place.unit], self._sharing
            return share_tokens(mask, num_ranks=size, method=sharing.method, block_size=sharing.block_size)
        held = (self._item(place.unit, atom) for atom in self._atoms(place, part))
        return self._dealer(place.unit).deal(item_loads(self._step.graph.unit(place.unit), held))

    @memoized
    def _dealer(self, unit: str) -> ItemDealer:
        return ItemDealer(self._step.graph, unit, self._sizes[unit], self._sharing.block_size)

    def _layout(self, place: MicrobatchPlace, part: int) -> tuple[tuple[int, ...], tuple[ItemSpan, ...]]:
        """Return the lengths of a sample subset's sequences, and the positions of encoders' items among its tokens."""
        atoms = self._atoms(place, part)
        if not self._is_backbone(place):
            return tuple(self._item(place.unit, atom).num_tokens for atom in atoms), ()
        first_token = self._first_tokens(place, part)
        encoders = {unit.name for unit in self._step.graph.encoders}
        found = ((first, self._in_document(atom)) for atom, first in first_token.items())
        items = tuple(ItemSpan(first, item.num_output_tokens, item.units[-1]) for first, item in found if item.unit in encoders)
        return tuple(self._step.lengths[atom.sample_id].num_tokens for atom in atoms), items

    def _atoms(self, place: MicrobatchPlace, part: int) -> Microbatch:
        """Return the atoms of the sequences: items of an encoder or a generator, samples of the LLM."""
        atoms = self._subset(place, part)
        if self._step.graph.unit(place.unit).role is Role.GENERATOR:
            return list_items(atoms, unit=place.unit, lengths_by_sample=self._step.lengths)
        return atoms

    def _first_tokens(self, place: MicrobatchPlace, part: int) -> dict[Atom, int]:
        """Return the first token of every item within a sample subset; in the LLM also of items for generators."""
        atoms = self._atoms(place, part)
        if not self._is_backbone(place):
            return dict(zip(atoms, _starts([self._item(place.unit, atom).num_tokens for atom in atoms]), strict=True))
        samples = [self._step.lengths[atom.sample_id] for atom in atoms]
        return {
            Atom(sample.sample_id, index): first + start
            for sample, first in zip(samples, _starts([sample.num_tokens for sample in samples]), strict=True)
            for index, start in enumerate(sample.starts)
        }


def _starts(lengths: Sequence[int]) -> list[int]:
    return (np.cumsum(lengths) - np.asarray(lengths)).tolist() if len(lengths) else []
