"""Transfers weights and optimizer state from the ranks that hold them to those that need them, by plan-independent names.

Every rank announces which rectangles of whole tensors it holds and needs. It copies those that it holds itself, and receives the
rest from one holder each; nothing is gathered as a whole, and nothing is sent to a rank that has it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.runtime import platform
from megatron.runtime.state.held_tensors import (
    Box,
    HeldTensor,
    Piece,
    TrainedState,
    adopt_group_steps,
    make_room,
    model_tensors,
    optimizer_tensors,
)
from multimodal.values.errors import CheckpointError

_Boxes = Mapping[str, tuple[Box, ...]]
"""Tensor's name -> rectangles of it."""


class _Part(NamedTuple):
    """Values that one holder sends to a rank."""

    key: str
    box: Box
    """The rectangle of the whole tensor."""
    holder: int


def hold_state(state: TrainedState) -> list[HeldTensor]:
    """Return all state that this rank holds, in host memory, so that the device is free for the new owner."""
    return [
        replace(tensor, pieces=tuple(piece._replace(values=piece.values.cpu()) for piece in tensor.pieces))
        for tensor in (*model_tensors(state), *optimizer_tensors(state))
    ]


def take_over(held: Sequence[HeldTensor], state: TrainedState) -> None:
    """Fill `state` on every rank from what all ranks hold; collective.

    held: the result of `hold_state` for an earlier state of the same model; empty on a rank that had none. Optimizers that never
    stepped remain so. Raises CheckpointError on every rank if no rank holds some part of the needed state.
    """
    originals, copies = (_boxes_by_key(tensor for tensor in held if tensor.is_copy is is_copy) for is_copy in (False, True))
    told: list[tuple[_Boxes, _Boxes]] = gather_objects((originals, copies))
    holders = _join_holders([own for own, _ in told], [own for _, own in told])
    _fill(model_tensors(state), held, holders=holders)
    make_room(state, saved=holders.keys())
    wanted = [tensor for tensor in optimizer_tensors(state) if tensor.key in holders]
    _fill(wanted, held, holders=holders)
    adopt_group_steps(state, wanted)


_Holders = Mapping[str, Mapping[Box, list[int]]]
"""Tensor's name -> rectangles that fill it without overlap, and the ranks that hold each."""


def _join_holders(originals: Sequence[_Boxes], copies: Sequence[_Boxes]) -> _Holders:
    """Join the rectangles that ranks hold, originals before copies, into rectangles that do not overlap.

    Ranks may hold differently cut rectangles of the same tensor, for example if replicas differ or share copies of the state: a
    rank then counts as a holder of all rectangles inside its own, and the parts that nobody else holds become new ones.
    """
    found: dict[str, dict[Box, list[int]]] = {}
    for rank, boxes_by_key in (*enumerate(originals), *enumerate(copies)):
        for key, boxes in boxes_by_key.items():
            of_key = found.setdefault(key, {})
            for box in boxes:
                inside = [box] if box in of_key else [other for other in of_key if _intersection(box, other) == other]
                rest = [] if box in of_key else [box]
                for other in of_key if rest else ():
                    rest = [part for each in rest for part in _outside(each, other)]
                for held in (*inside, *rest):
                    ranks = of_key.setdefault(held, [])
                    ranks += [rank] * (rank not in ranks)
    return found


def _outside(box: Box, other: Box) -> Iterator[Box]:
    """Yield the parts of a rectangle that another one does not cover, dimension by dimension."""
    common = _intersection(box, other)
    if common is None:
        yield box
        return
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dimension, (start, size) in enumerate(zip(*common, strict=True)):
        end = offsets[dimension] + sizes[dimension]
        for first, stop in ((offsets[dimension], start), (start + size, end)):
            if first < stop:
                yield Box(
                    (*offsets[:dimension], first, *offsets[dimension + 1 :]),
                    (*sizes[:dimension], stop - first, *sizes[dimension + 1 :]),
                )
        offsets[dimension], sizes[dimension] = start, size


def _fill(wanted: Sequence[HeldTensor], held: Sequence[HeldTensor], *, holders: _Holders) -> None:
    """Fill the pieces of `wanted`, kind by kind so that little memory is in transit at once; collective."""
    rank = dist.get_rank()
    told: list[_Boxes] = gather_objects(_boxes_by_key(wanted))
    _check_held(told[rank], holders)
    sources: dict[str, list[Piece]] = {}
    for tensor in held:
        sources.setdefault(tensor.key, []).extend(tensor.pieces)
    targets: dict[str, list[Piece]] = {}
    for tensor in wanted:
        targets.setdefault(tensor.key, []).extend(tensor.pieces)
    for kind in sorted({_kind(key) for boxes in told for key in boxes}):
        outgoing: list[list[Tensor]] = [[] for _ in told]
        for receiver, boxes in enumerate(told):
            for part in _parts(boxes, holders, kind=kind, receiver=receiver):
                if part.holder == rank:
                    source = next(each for each in sources[part.key] if _intersection(each.box, part.box) == part.box)
                    outgoing[receiver].append(_view(source.values, source.box, part.box))
        incoming = list(_parts(told[rank], holders, kind=kind, receiver=rank))
        for part, values in _exchange(outgoing, incoming, dtypes={tensor.key: tensor.dtype for tensor in wanted}):
            for target in targets[part.key]:
                if _intersection(target.box, part.box) == part.box:
                    _view(target.values, target.box, part.box).copy_(values)


def _check_held(wanted: _Boxes, holders: _Holders) -> None:
    """Agree that every needed part has a holder; collective."""
    missing = next(
        (
            f"{key}, elements {list(box.sizes)} at {list(box.offsets)}"
            for key, boxes in wanted.items()
            for box in boxes
            if sum(math.prod(common.sizes) for other in holders.get(key, ()) if (common := _intersection(box, other)))
            != math.prod(box.sizes)
        ),
        None,
    )
    for rank, found in enumerate(gather_objects(missing)):
        if found is not None:
            raise CheckpointError(
                f"rank {rank} needs {found}, which the ranks that are left do not hold; resume from the last checkpoint (--load)"
            )


def _parts(boxes: _Boxes, holders: _Holders, *, kind: str, receiver: int) -> Iterator[_Part]:
    """Yield the parts that one rank receives, in an order that it and the holders share."""
    for key, wanted in boxes.items():
        if _kind(key) != kind:
            continue
        for box in wanted:
            for source, ranks in holders[key].items():
                if common := _intersection(box, source):
                    yield _Part(key, common, receiver if receiver in ranks else ranks[receiver % len(ranks)])


def _exchange(
    outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[_Part], *, dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[_Part, Tensor]]:
    """Send every rank its parts, as bytes, and yield the parts that this rank receives; collective."""
    device = platform.device()
    nothing = torch.empty(0, dtype=torch.uint8)
    sent = [torch.cat([nothing, *(each.contiguous().view(-1).view(torch.uint8) for each in values)]) for values in outgoing]
    sizes = [math.prod(part.box.sizes) * dtypes[part.key].itemsize for part in incoming]
    per_holder = [
        sum(size for part, size in zip(incoming, sizes, strict=True) if part.holder == rank) for rank in range(len(sent))
    ]
    received = torch.empty(sum(per_holder), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, torch.cat(sent).to(device), per_holder, [len(content) for content in sent])
    starts = [sum(per_holder[:rank]) for rank in range(len(sent))]
    for part, size in zip(incoming, sizes, strict=True):
        content = received[starts[part.holder] : starts[part.holder] + size]
        starts[part.holder] += size
        yield part, content.clone().view(dtypes[part.key]).view(part.box.sizes)  # a copy is aligned for any dtype


def _boxes_by_key(tensors: Iterable[HeldTensor]) -> _Boxes:
    """Return all rectangles, each once: a rank may hold a tensor and a copy of it."""
    found: dict[str, dict[Box, None]] = {}
    for tensor in tensors:
        found.setdefault(tensor.key, {}).update((piece.box, None) for piece in tensor.pieces)
    return {key: tuple(boxes) for key, boxes in found.items()}


def _kind(key: str) -> str:
    return key.partition(".")[0]


def _intersection(first: Box, second: Box) -> Box | None:
    """Return the rectangle that two rectangles of a tensor have in common."""
    offsets = tuple(map(max, first.offsets, second.offsets))
    sizes = tuple(
        min(start + size, other_start + other_size) - offset
        for start, size, other_start, other_size, offset in zip(*first, *second, offsets, strict=True)
    )
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def _view(values: Tensor, box: Box, inner: Box) -> Tensor:
    """Return the part of a rectangle's values that an inner rectangle covers."""
    for dimension, (start, inner_start, size) in enumerate(zip(box.offsets, inner.offsets, inner.sizes, strict=True)):
        values = values.narrow(dimension, inner_start - start, size)
    return values


def gather_objects(mine: Any) -> list[Any]:
    """Return the objects of all ranks; collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered
