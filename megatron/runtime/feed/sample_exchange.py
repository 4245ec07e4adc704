"""An all-to-all of raw samples, for data whose lengths are only known after decoding (OrchMLLM's batch communicator).

Each rank decodes its share of the global batch, all exchange lengths and compute the same assignment, and each piece is sent only
to the ranks that need it. Has its own gloo group, so that it can work in a thread beside training.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.runtime.communication.create_groups import create_groups
from megatron.runtime.communication.gather_objects import gather_objects
from megatron.runtime.feed.step_inputs import needed_pieces
from multimodal.data.index.item_reader import expect_items
from multimodal.data.sample_source import ItemPixels, SampleSource, SampleText
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.errors import BraidError, DataError
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.shape import StepShape
from multimodal.values.units.items import Grid


class Described(NamedTuple):
    """Facts about a sample that all ranks know: its lengths, and the grids of its items."""

    lengths: SampleLengths
    grids: tuple[Grid, ...]


@dataclass(frozen=True, eq=False)
class HeldSamples:
    """The part of a global batch that this rank has decoded, or received, as a `SampleSource` addressed by sample id."""

    described: Mapping[int, Described]
    """Sample id -> description, for the whole batch in its order."""
    pieces: Mapping[Atom, SampleText | ItemPixels]
    """Texts (of whole samples) and items."""
    bytes_between_nodes: int = 0
    """Bytes that all ranks sent to other nodes in the exchange."""

    def __len__(self) -> int:
        """Count the samples of the global batch."""
        return len(self.described)

    def lengths(self, index: int) -> SampleLengths:
        """Lengths of one sample."""
        return self.described[index].lengths

    def text(self, index: int) -> SampleText:
        """Tokens of a sample that this rank holds."""
        text = self.pieces[Atom(index)]
        assert isinstance(text, SampleText)
        return text

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Pixels of an item that this rank holds."""
        pixels = self.pieces[Atom(index, item_index)]
        assert isinstance(pixels, ItemPixels)
        return pixels

    def item_grid(self, index: int, item_index: int) -> Grid:
        """Return the grid of any item."""
        return self.described[index].grids[item_index]


class SampleExchange:
    """Collective over all ranks; they must call its methods in the same order, from one thread each."""

    def __init__(self, *, rank: int, world_size: int, timeout: timedelta, ranks_per_node: int | None = None) -> None:
        """Create the group; collective. ranks_per_node: for counting bytes between nodes; None: all ranks are on one node."""
        self._rank, self._world_size, self._ranks_per_node = rank, world_size, ranks_per_node or world_size
        self._group = create_groups([range(world_size)], backend="gloo", timeout=timeout)[0]

    def decode(self, source: SampleSource, sample_ids: Sequence[int]) -> HeldSamples:
        """Decode every world_size-th sample of the batch here, and send all ranks its lengths; raises DataError on every rank."""
        pieces, own, failure = dict[Atom, SampleText | ItemPixels](), dict[int, Described](), None
        try:
            share = sample_ids[self._rank :: self._world_size]
            expect_items(source, [(each, item) for each in share for item in range(len(source.lengths(each).items))])
            for sample_id in share:
                lengths = source.lengths(sample_id)
                pieces[Atom(sample_id)] = source.text(sample_id)
                items = [source.item(sample_id, item_index) for item_index in range(len(lengths.items))]
                pieces |= {Atom(sample_id, item_index): item for item_index, item in enumerate(items)}
                own[sample_id] = Described(lengths, tuple(item.grid for item in items))
        except BraidError as problem:
            failure = str(problem)
        gathered = gather_objects((own, failure), group=self._group)
        if failures := [message for _, message in gathered if message is not None]:
            raise DataError(failures[0])
        described = {sample_id: found for samples, _ in gathered for sample_id, found in samples.items()}
        return HeldSamples({sample_id: described[sample_id] for sample_id in sample_ids}, pieces)

    def exchange(self, share: HeldSamples, shape: StepShape, assignment: Assignment) -> HeldSamples:
        """Send the decoded pieces to the ranks that the assignment gives them to, and return the received ones."""
        lengths = {sample_id: described.lengths for sample_id, described in share.described.items()}
        wanted = needed_pieces(shape, assignment, lengths, ranks=range(self._world_size)).values()
        outgoing = [pickle.dumps({each: share.pieces[each] for each in pieces if each in share.pieces}) for pieces in wanted]
        incoming = self._all_to_all(outgoing)
        received = {piece: content for message in incoming for piece, content in pickle.loads(message).items()}
        node, size = self._rank // self._ranks_per_node, self._ranks_per_node
        leaving = torch.tensor(sum(len(message) for rank, message in enumerate(outgoing) if rank // size != node))
        dist.all_reduce(leaving, group=self._group)
        return HeldSamples(share.described, received, bytes_between_nodes=int(leaving))

    def _all_to_all(self, outgoing: Sequence[bytes]) -> list[bytearray]:
        sizes = torch.tensor([len(message) for message in outgoing])
        received_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(received_sizes, sizes, group=self._group)
        counts = received_sizes.tolist()
        received = torch.empty(sum(counts), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(b"".join(outgoing)), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, counts, sizes.tolist(), group=self._group)
        return [bytearray(chunk.numpy()) for chunk in received.split(counts)]
