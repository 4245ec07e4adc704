"""Node-wise rearrangement: permutes new batches over ranks so that few bytes cross nodes (OrchMLLM, Alg. 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from multimodal.balance.batch_work import BatchWork, sum_by
from multimodal.kernels import kernels
from multimodal.values.arrays.rows import Integers, take_rows
from multimodal.values.assignment import Assignment, PlacedAtoms
from multimodal.values.backward_need import has_trainable_output
from multimodal.values.model_graph import Role
from multimodal.values.plan import Plan, UnitPlan

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

FIRST_SWAPS, MAX_CHAIN_LENGTH, MAX_EVALUATIONS = 64, 8, 200_000
"""Limits of the search: chains tried from one state, swaps in a chain, and swaps evaluated in all, about 20 million a second.

Counts instead of seconds, so that every rank ends with the same result.
"""


@dataclass(frozen=True, slots=True, eq=False)
class NodeVolumes:
    """A volume matrix in compressed rows: batches ascend in each, volumes are positive. Rank i is on node i // ranks_per_node."""

    row_starts: Integers
    """[num_ranks + 1]: rank i has the entries row_starts[i] .. row_starts[i + 1] - 1."""
    batches: Integers
    """[num_entries]: index of the new batch."""
    volumes: Integers
    """[num_entries]: bytes of the batch that the rank holds."""
    ranks_per_node: int
    """The last node may have fewer."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks, which is also that of new batches."""
        return len(self.row_starts) - 1

    @property
    def num_nodes(self) -> int:
        """Number of nodes, including an incomplete last one."""
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def room(self) -> Integers:
        """[num_nodes]: ranks of each node, which is the number of batches it gets."""
        return np.bincount(np.arange(self.num_ranks) // self.ranks_per_node).astype(np.int64)

    @property
    def ranks(self) -> Integers:
        """[num_entries]: rank that holds each entry."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.row_starts))

    def bytes_sent(self, node_of_batch: Integers) -> Integers:
        """Return [num_ranks]: bytes that each rank sends to other nodes if batches go to these nodes."""
        ranks = self.ranks
        leaves = node_of_batch[self.batches] != ranks // self.ranks_per_node
        return sum_by(ranks[leaves], self.volumes[leaves], self.num_ranks)


def read_volumes(volume: "ArrayLike | csr_matrix", *, ranks_per_node: int) -> NodeVolumes:
    """Bring a matrix [num_ranks, num_ranks] of bytes, dense or scipy sparse, into one form; duplicate entries are added."""
    from scipy.sparse import csr_matrix  # loaded when first used

    exact = csr_matrix(volume).astype(np.int64)  # A copy, so that the caller's array does not change.
    exact.sum_duplicates()
    exact.eliminate_zeros()
    return NodeVolumes(exact.indptr.astype(np.int64), exact.indices.astype(np.int64), exact.data, ranks_per_node)


@dataclass(frozen=True, slots=True, eq=False)
class NodeRearrangement:
    """A permutation of new batches over ranks."""

    permutation: Integers
    """[num_ranks]: rank r gets new batch permutation[r]. A batch whose own rank is on its node stays on that rank."""
    bytes_before: Integers
    """[num_ranks]: bytes that each rank sends to other nodes if rank r gets new batch r."""
    bytes_after: Integers
    """[num_ranks]: the same under the permutation; its maximum has been minimised."""


def rearrange_nodes(volume: "ArrayLike | csr_matrix", *, ranks_per_node: int) -> NodeRearrangement:
    """Permute balanced batches over ranks such that the most bytes that any rank sends to other nodes are minimal.

    The objective is OrchMLLM's (5): the maximum over ranks i of the sum of volume[i, j] over the batches j whose new rank is on
    another node than i (called the intra-node volume in its text). The search takes the better of the identity and a greedy start
    (the rank with most left to send gets the free batch of which it holds most), then follows chains of swaps of two batches:
    each swap helps the rank that is then worst and may make others worse; a chain is kept as soon as the worst rank, or the
    number of ranks as bad as it, has improved. Without the C++ kernels, batches are placed greedily. The result is never worse
    than the identity, and depends only on the arguments.

    volume: as in `read_volumes`; entry [i, j] is the number of bytes that rank i holds of new batch j. O(entries log entries) for
    the start, then at most `MAX_EVALUATIONS` swaps of O(ranks_per_node).
    """
    volumes = read_volumes(volume, ranks_per_node=ranks_per_node)
    return build_rearrangement(volumes, search_nodes(volumes))


def search_nodes(volumes: NodeVolumes) -> Integers:
    """Return the node of every batch, [num_ranks]."""
    if kernels is None:
        return _place_greedily(volumes)
    return kernels.rearrange_nodes(
        volumes.row_starts,
        volumes.batches,
        volumes.volumes,
        ranks_per_node=volumes.ranks_per_node,
        num_first_swaps=FIRST_SWAPS,
        max_chain_length=MAX_CHAIN_LENGTH,
        max_evaluations=MAX_EVALUATIONS,
    )


def _place_greedily(volumes: NodeVolumes) -> Integers:
    """Give each batch to the node with room that holds most of it; those of which a node holds most choose first."""
    node_of_rank, room = np.arange(volumes.num_ranks) // volumes.ranks_per_node, volumes.room
    held = np.zeros((volumes.num_nodes, volumes.num_ranks))
    np.add.at(held, (node_of_rank[volumes.ranks], volumes.batches), volumes.volumes)
    found = np.zeros_like(node_of_rank)
    for batch in np.argsort(-held.max(axis=0, initial=0), kind="stable"):
        found[batch] = np.where(room > 0, held[:, batch], -1).argmax()
        room[found[batch]] -= 1
    is_better = volumes.bytes_sent(found).max(initial=0) < volumes.bytes_sent(node_of_rank).max(initial=0)
    return found if is_better else node_of_rank


def build_rearrangement(volumes: NodeVolumes, node_of_batch: Integers) -> NodeRearrangement:
    """Give the batches of every node to its ranks; a batch whose own rank is there stays on it."""
    node_of_rank = np.arange(volumes.num_ranks) // volumes.ranks_per_node
    stays = node_of_batch == node_of_rank
    permutation = np.where(stays, np.arange(volumes.num_ranks), -1)
    # Both sides in the order of nodes: a node receives as many batches as it has ranks whose own batch leaves.
    arriving = np.flatnonzero(~stays)
    permutation[~stays] = arriving[np.argsort(node_of_batch[arriving], kind="stable")]
    return NodeRearrangement(permutation, volumes.bytes_sent(node_of_rank), volumes.bytes_sent(node_of_batch))


class NodeBytes(NamedTuple):
    """Bytes between nodes in one step: of what units send each other, and of raw items where these are exchanged."""

    before: int
    after: int
    """The same bytes after node-wise rearrangement."""


@dataclass(frozen=True)
class NodeArrangement:
    """Places the batches of encoders and generators on nodes, and the facts that determine the traffic between nodes."""

    ranks_per_node: int
    """Rank r is on node r // ranks_per_node."""
    bytes_per_element: int = 2
    num_decoding_ranks: int = 0
    """Ranks that decode the batch's samples in turn and send them on; 0: every rank loads what it needs."""

    def arrange(
        self, assignment: Assignment, work: BatchWork, *, plan: Plan, sample_ids: Sequence[int]
    ) -> tuple[Assignment, NodeBytes]:
        """Permute every encoder's and generator's batches over its replicas so that the most bytes from any node are minimal.

        Batches, their microbatches and atoms stay as the balancer made them; only their replicas change. The bytes from a node
        are those that its ranks decoded of a batch, and those that its LLM replicas take of an encoder's batch or give to a
        generator's (and their gradients). Units stay as they are if their replicas are not alike, are not dealt to nodes in turn,
        or form one interleaved chain with the LLM; a permutation that does not send fewer bytes in total is not taken.

        sample_ids: the global batch in its order. O(atoms + replicas x nodes), and the search's.
        """
        placed, before, after = dict(assignment.placed), 0, 0
        graph, llm = work.graph, work.graph.backbone.name
        encoders = [each for each in graph.encoders if graph.downstream(each.name) == (llm,)]
        for unit in (*encoders, *(each for each in graph.generators if graph.upstream(each.name) == (llm,))):
            volumes = self._volumes(assignment, work, unit=unit.name, plan=plan, sample_ids=sample_ids)
            nodes = self._nodes(plan.units[unit.name], stage=-1 if unit in encoders else 0)
            stays = _crossing(volumes, nodes)
            permutation = self._permutation(volumes, nodes) if _can_permute(plan, unit.name) else None
            moves = stays if permutation is None else _crossing(volumes[permutation], nodes)
            if permutation is not None and moves < stays:
                old = placed[unit.name]
                starts, chosen = take_rows(old.microbatch_starts, np.arange(old.num_microbatches), permutation)
                placed[unit.name] = old.rearranged(chosen, starts)
            before, after = before + stays, after + min(stays, moves)
        return (assignment if after == before else Assignment(placed)), NodeBytes(before, after)

    def _nodes(self, unit: UnitPlan, *, stage: int) -> Integers:
        """Return the node of each replica's stage: the last one sends the outputs, the first one takes them."""
        return np.array([replica.virtual_stages[stage].ranks[0] // self.ranks_per_node for replica in unit.replicas])

    def _volumes(self, assignment: Assignment, work: BatchWork, *, unit: str, plan: Plan, sample_ids: Sequence[int]) -> Integers:
        """[num_replicas, num_nodes]: bytes between each replica's batch and the ranks of each node."""
        graph, arrays, placed = work.graph, work.arrays, assignment.placed[unit]
        llm, items = graph.backbone.name, arrays.items_of(unit)
        of_atoms = placed.replica_of_microbatch[placed.microbatch_of_atom]
        takes = graph.unit(unit).role is Role.GENERATOR  # whole samples, whose conditions the LLM's last stage sends
        if takes:
            batches = _of_samples(work, placed, of_atoms)[arrays.sample_of_item[items]]
            num_tokens = np.full(len(items), graph.unit(unit).num_conditions)
        else:
            items = items[work.numbers(unit, placed)]
            batches, num_tokens = of_atoms, arrays.num_output_tokens[items]
        samples = arrays.sample_of_item[items]
        num_nodes = -(-plan.num_ranks // self.ranks_per_node)
        found = np.zeros((placed.num_replicas, num_nodes), np.int64)
        of_llm, nodes = assignment.placed[llm], self._nodes(plan.units[llm], stage=-1 if takes else 0)
        node_of_sample = _of_samples(work, of_llm, nodes[of_llm.replica_of_microbatch[of_llm.microbatch_of_atom]])
        num_passes = 2 if has_trainable_output(graph, llm if takes else unit) else 1
        per_token = num_passes * self.bytes_per_element * graph.backbone.transformer.hidden_size
        np.add.at(found, (batches, node_of_sample[samples]), per_token * num_tokens)
        held = plan.units[unit]
        if self.num_decoding_ranks and np.array_equal(self._nodes(held, stage=-1), self._nodes(held, stage=0)):
            turn = np.empty(len(arrays), np.int64)
            turn[np.searchsorted(arrays.sample_ids, np.asarray(sample_ids))] = np.arange(len(sample_ids))
            decoded_on = turn[samples] % self.num_decoding_ranks // self.ranks_per_node
            item_input = graph.unit(unit).item_input
            per_patch = item_input.num_patch_values if item_input is not None else 1
            np.add.at(found, (batches, decoded_on), per_patch * arrays.num_item_tokens[items])
        return found

    def _permutation(self, volumes: Integers, nodes: Integers) -> Integers | None:
        """Return the batch of each replica; None if the replicas are not dealt to nodes in turn."""
        first, per_node = int(nodes[0]), int(np.count_nonzero(nodes == nodes[0]))
        if not np.array_equal(nodes, first + np.arange(len(nodes)) // per_node) or nodes[-1] == first:
            return None
        # The first replica of each node represents it, and holds all that the node has of every batch.
        held = np.zeros((len(nodes), len(nodes)), np.int64)
        of_nodes = volumes[:, first : int(nodes[-1]) + 1].T
        held[np.arange(len(of_nodes)) * per_node] = of_nodes
        return rearrange_nodes(held, ranks_per_node=per_node).permutation


def _of_samples(work: BatchWork, placed: PlacedAtoms, values: Integers) -> Integers:
    """[num_samples]: the values of a unit's atoms that are whole samples; 0 for samples without one."""
    found = np.zeros(len(work.arrays), np.int64)
    found[np.searchsorted(work.arrays.sample_ids, placed.sample_ids)] = values
    return found


def _can_permute(plan: Plan, unit: str) -> bool:
    """Return True if the replicas are alike, and are not stages of one chain with the LLM's."""
    held = plan.units[unit]
    shapes = {tuple((len(stage.ranks), stage.layer_ranges) for stage in replica.stages) for replica in held.replicas}
    others = {rank for name, other in plan.units.items() if name != unit for rank in other.ranks}
    is_chain = held.num_virtual_stages > 1 and not others.isdisjoint(held.ranks)
    return len(held.replicas) > 1 and len(shapes) == 1 and not held.microbatch_shares and not is_chain


def _crossing(volumes: Integers, nodes: Integers) -> int:
    """Return the bytes that cross nodes if replica r has batch r."""
    return int(volumes.sum() - volumes[np.arange(len(nodes)), nodes].sum())
