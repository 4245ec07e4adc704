"""The parameter ranges that a rank steps where replicas share copies of the optimizer state (hybrid ZeRO-1).

A copy's replicas (`values/parts/state_copies.py`) share every parameter: each rank steps a range of it, and gathers the other
ranges when the weights are needed. Gradients are summed over all replicas before, so all copies are stepped alike, to the bit.
A rank that shares with nobody steps all that it holds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.runtime.communication.units import GroupBook, Membership
from megatron.runtime.gradients.sharded_layer import WeightPiece
from multimodal.model.unit_stage import UnitStage
from multimodal.values.parts.state_copies import replicas_of_copies, state_sharers
from multimodal.values.plan import UnitPlan


class LayerShare:
    """One layer's trained parameters; this rank steps a range of each. `gather` is collective over the sharers."""

    def __init__(self, parameters: Sequence[Parameter], *, ranks: tuple[int, ...], rank: int, is_copy: bool) -> None:
        """ranks: all sharers; is_copy: the first replica has another copy of the state."""
        self.parameters, self.is_copy = parameters, is_copy
        self._ranks, self._index = ranks, ranks.index(rank)

    @property
    def is_shared(self) -> bool:
        """True if other ranks step a part."""
        return len(self._ranks) > 1

    @property
    def pieces(self) -> Iterator[WeightPiece]:
        """This rank's ranges, without parameters that have no range here."""
        for parameter in self.parameters:
            if elements := self._elements(parameter, self._index):
                inside = slice(elements.start, elements.stop)
                gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
                weight = parameter.detach().view(-1)[inside]
                yield WeightPiece(parameter, elements, weight, gradient.view(-1)[inside], self.is_copy)

    @torch.no_grad()
    def start_gathering(self, book: GroupBook) -> Callable[[], None]:
        """Start gathering all ranges; returns a function that waits for it."""
        sizes = [
            sum(len(self._elements(each, index)) * each.element_size() for each in self.parameters)
            for index in range(len(self._ranks))
        ]
        own = torch.cat([part.view(torch.uint8) for part in self._parts(self._index)])
        padded = own.new_zeros(max(sizes))
        padded[: len(own)] = own
        gathered = [torch.empty_like(padded) for _ in sizes]
        work = dist.all_gather(gathered, padded, group=book[self._ranks], async_op=True)

        @torch.no_grad()
        def finish() -> None:
            work.wait()
            for index, content in enumerate(gathered):
                start = 0
                for part in self._parts(index) if index != self._index else ():
                    size = part.numel() * part.element_size()
                    part.copy_(content[start : start + size].clone().view(part.dtype))  # a copy is aligned for any dtype
                    start += size

        return finish

    def _parts(self, index: int) -> Iterator[Tensor]:
        """Yield, for each parameter, the range that one of the sharers steps."""
        for parameter in self.parameters:
            elements = self._elements(parameter, index)
            yield parameter.detach().view(-1)[elements.start : elements.stop]

    def _elements(self, parameter: Tensor, index: int) -> range:
        count, size = len(self._ranks), parameter.numel()
        return range(size * index // count, size * (index + 1) // count)


class StateShares:
    """The shares of this rank in all trained layers of its stages of one unit."""

    def __init__(
        self, stages: Mapping[int, UnitStage], *, membership: Membership, unit: UnitPlan, book: GroupBook, num_copies: int
    ) -> None:
        """stages: virtual stage -> module; book: has the groups of `sharing_groups`."""
        self._member, self._unit, self._book = membership, unit, book
        self._replicas = next(each for each in replicas_of_copies(unit, num_copies) if membership.replica_index in each)
        self._first_ranks = set(unit.replicas[0].ranks)
        self._layers = {index: list(self._layers_of(index, stage)) for index, stage in stages.items()}
        shares = [layer for layers in self._layers.values() for layer in layers]
        self._share_of: dict[Tensor, LayerShare] = {each: layer for layer in shares for each in layer.parameters}

    @property
    def shared_stages(self) -> set[int]:
        """Stages of which other ranks step a part."""
        return {index for index, layers in self._layers.items() if any(layer.is_shared for layer in layers)}

    def pieces(self, stages: Iterable[int] | None = None) -> list[WeightPiece]:
        """Return the pieces that this rank steps; stages: only of these."""
        chosen = self._layers if stages is None else stages
        return [piece for index in chosen for layer in self._layers[index] for piece in layer.pieces]

    def parameters(self, stage: int) -> Iterator[Parameter]:
        """Yield the parameters of a stage of which other ranks step a part."""
        for layer in self._layers[stage]:
            yield from layer.parameters if layer.is_shared else ()

    def is_copy(self, parameter: Tensor) -> bool:
        """Return True if the first replica has another copy of the state of a trained parameter."""
        return self._share_of[parameter].is_copy

    def start_gathering(self, stage: int) -> Callable[[], None]:
        """Start gathering a stage's parameters; returns a function that waits for it. All ranks take layers in one order."""
        waits = [layer.start_gathering(self._book) for layer in self._layers[stage] if layer.is_shared]

        def finish() -> None:
            for wait in waits:
                wait()

        return finish

    def _layers_of(self, index: int, stage: UnitStage) -> Iterator[LayerShare]:
        member, rank, seen = self._member, dist.get_rank(), set[Parameter]()
        virtual = self._unit.replicas[member.replica_index].virtual_stages[index]
        for name in sorted(stage.layers, key=int):
            is_tied_copy = int(name) not in virtual.layers
            layer = virtual.layers[-1] if is_tied_copy else int(name)
            trained = [each for each in stage.layers[name].parameters() if each.requires_grad and each not in seen]
            seen.update(trained)
            if not trained:
                continue
            size = member.groups.tp.size()
            sharers = state_sharers(self._unit, layer, replicas=self._replicas, tensor_size=size, is_tied_copy=is_tied_copy)
            ranks = sharers[member.groups.tp.rank()]
            yield LayerShare(trained, ranks=ranks, rank=rank, is_copy=self._first_ranks.isdisjoint(ranks))
