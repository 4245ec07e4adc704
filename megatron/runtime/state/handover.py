"""Transfers weights and optimizer state, by names that no plan changes, from one holder of each piece to those that need it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.runtime import platform
from megatron.runtime.communication.gather_objects import gather_objects
from megatron.runtime.state import held_tensors
from megatron.runtime.state.held_tensors import Box, HeldTensor, TrainedState, model_tensors, pieces_by_key
from multimodal.values.errors import CheckpointError

_Boxes = Mapping[str, tuple[Box, ...]]
"""Tensor's name -> rectangles of it."""
_Holders = Mapping[str, Mapping[Box, list[int]]]
"""Tensor's name -> rectangles of it, which may overlap, and the ranks that hold each."""


NOBODY = -1


class _Part(NamedTuple):
    """Values that one holder sends to a rank."""

    key: str
    box: Box
    """The rectangle of the whole tensor."""
    holder: int
    """NOBODY if no rank holds them."""


def hold_state(state: TrainedState) -> list[HeldTensor]:
    """Return all state that this rank holds, in host memory, so that the device is free for the new owner."""
    held = (*model_tensors(state), *held_tensors.optimizer_tensors(state))
    return [replace(each, pieces=tuple(piece._replace(values=piece.values.cpu()) for piece in each.pieces)) for each in held]


def take_over(held: Sequence[HeldTensor], state: TrainedState) -> None:
    """Fill `state` from what all ranks hold (`hold_state`); collective. Raises CheckpointError on all ranks if a part is lost."""
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, boxes_by_key in enumerate(gather_objects(_boxes_by_key(held))):
        for key, box in ((key, box) for key, boxes in boxes_by_key.items() for box in boxes):
            holders.setdefault(key, {}).setdefault(box, []).append(rank)
    _fill(model_tensors(state), held, holders=holders)
    held_tensors.fill_optimizers(state, saved=holders.keys(), fill=lambda wanted: _fill(wanted, held, holders=holders))


def _fill(wanted: Sequence[HeldTensor], held: Sequence[HeldTensor], *, holders: _Holders) -> None:
    """Fill the pieces of `wanted`, kind by kind so that little memory is in transit at once; collective."""
    rank = dist.get_rank()
    told: list[_Boxes] = gather_objects(_boxes_by_key(wanted))
    lacking = next((part for part in _find_parts(told[rank], holders, receiver=rank) if part.holder == NOBODY), None)
    for needing, part in enumerate(gather_objects(lacking)):
        if part is not None:
            raise CheckpointError(
                f"rank {needing} needs {part.key}, elements {list(part.box.sizes)} at {list(part.box.offsets)}, which the ranks "
                "that are left do not hold; resume from the last checkpoint (--load)"
            )
    sources, targets = pieces_by_key(held), pieces_by_key(wanted)
    for kind in sorted({_kind(key) for boxes in told for key in boxes}):
        outgoing: list[list[Tensor]] = [[] for _ in told]
        for receiver, boxes in enumerate(told):
            for part in _find_parts(boxes, holders, receiver=receiver, kind=kind):
                if part.holder == rank:
                    source = next(each for each in sources[part.key] if each.box.common(part.box) == part.box)
                    outgoing[receiver].append(source.box.part_of(source.values, part.box))
        incoming = list(_find_parts(told[rank], holders, receiver=rank, kind=kind))
        for part, values in _exchange(outgoing, incoming, dtypes={tensor.key: tensor.dtype for tensor in wanted}):
            for target in targets[part.key]:
                if target.box.common(part.box) == part.box:
                    target.box.part_of(target.values, part.box).copy_(values)


def _find_parts(boxes: _Boxes, holders: _Holders, *, receiver: int, kind: str | None = None) -> Iterator[_Part]:
    """Yield the parts that a rank receives, in an order that it and the holders share; what it holds comes from itself."""
    for key, wanted in boxes.items():
        if kind not in (None, _kind(key)):
            continue
        sources = sorted(holders.get(key, {}).items(), key=lambda source: receiver not in source[1])
        for box in wanted:
            missing = [box]
            for source, ranks in sources:
                holder = receiver if receiver in ranks else ranks[receiver % len(ranks)]
                found = [common for each in missing if (common := each.common(source))]
                yield from (_Part(key, common, holder) for common in found)
                if found:
                    missing = [part for each in missing for part in each.outside(source)]
            yield from (_Part(key, part, NOBODY) for part in missing)


def _exchange(
    outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[_Part], *, dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[_Part, Tensor]]:
    """Send every rank its parts, as bytes, and yield the parts that this rank receives; collective."""
    device = platform.device()
    nothing = torch.empty(0, dtype=torch.uint8)
    sent = [torch.cat([nothing, *(each.contiguous().view(-1).view(torch.uint8) for each in values)]) for values in outgoing]
    sizes = [part.box.num_elements * dtypes[part.key].itemsize for part in incoming]
    bytes_of = [sum(size for part, size in zip(incoming, sizes, strict=True) if part.holder == rank) for rank in range(len(sent))]
    received = torch.empty(sum(bytes_of), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, torch.cat(sent).to(device), bytes_of, [len(content) for content in sent])
    starts = [sum(bytes_of[:rank]) for rank in range(len(sent))]
    for part, size in zip(incoming, sizes, strict=True):
        content = received[starts[part.holder] : starts[part.holder] + size]
        starts[part.holder] += size
        yield part, content.clone().view(dtypes[part.key]).view(part.box.sizes)  # a copy is aligned for any dtype


def _boxes_by_key(tensors: Iterable[HeldTensor]) -> _Boxes:
    """Return all rectangles, each once: a rank may hold a tensor and a copy of it."""
    return {key: tuple(dict.fromkeys(piece.box for piece in pieces)) for key, pieces in pieces_by_key(tensors).items()}


def _kind(key: str) -> str:
    return key.partition(".")[0]
