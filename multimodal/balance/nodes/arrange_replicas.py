"""Node-wise rearrangement of an assignment: encoders' batches move to replicas near the data and the LLM (OrchMLLM, Alg. 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multimodal.balance.batch_work import BatchWork
from multimodal.balance.nodes.rearrange_nodes import rearrange_nodes
from multimodal.values.arrays.rows import Integers, take_rows
from multimodal.values.assignment import Assignment, PlacedAtoms
from multimodal.values.backward_need import unit_is_trainable
from multimodal.values.plan import Plan, UnitPlan


class NodeBytes(NamedTuple):
    """Bytes between nodes in one step: of encoders' outputs and their gradients, and of raw items where these are exchanged."""

    before: int
    after: int
    """The same bytes after node-wise rearrangement."""


@dataclass(frozen=True)
class NodeArrangement:
    """Places encoder batches on nodes, and the facts that determine the traffic between nodes."""

    ranks_per_node: int
    """Rank r is on node r // ranks_per_node."""
    bytes_per_element: int = 2
    """Size of a number in an encoder's output."""
    num_decoding_ranks: int = 0
    """Ranks that decode the batch's samples in turn and send them on; 0: every rank loads what it needs."""

    def arrange(
        self, assignment: Assignment, work: BatchWork, *, plan: Plan, sample_ids: Sequence[int]
    ) -> tuple[Assignment, NodeBytes]:
        """Permute each encoder's batches over its replicas such that the most bytes that leave any node are minimal.

        Batches, their microbatches and atoms stay as the balancer made them; only their replicas change. The bytes from a node
        are those that its ranks decoded of a batch, and those of the batch's outputs that its LLM replicas take (and return as
        gradients). Encoders stay as they are if their replicas are not alike, are not dealt to nodes in turn, or form one
        interleaved chain with the LLM; a permutation that does not send fewer bytes in total is not taken.

        sample_ids: the global batch in its order. O(atoms + replicas x nodes), and the search's.
        """
        placed, before, after = dict(assignment.placed), 0, 0
        llm = work.graph.backbone.name
        for unit in (each for each in work.graph.encoders if work.graph.downstream(each.name) == (llm,)):
            volumes = self._volumes(assignment, work, unit=unit.name, plan=plan, sample_ids=sample_ids)
            nodes = self._nodes(plan.units[unit.name])
            stays = _crossing(volumes, nodes)
            permutation = self._permutation(volumes, nodes) if _can_permute(plan, unit.name) else None
            moves = stays if permutation is None else _crossing(volumes[permutation], nodes)
            if permutation is not None and moves < stays:
                placed[unit.name] = _permuted(placed[unit.name], permutation)
            before, after = before + stays, after + min(stays, moves)
        return (assignment if after == before else Assignment.of_arrays(placed)), NodeBytes(before, after)

    def _nodes(self, unit: UnitPlan, stage: int = -1) -> Integers:
        """Return the node of each replica: that of its last stage, which sends the outputs, or of another stage."""
        return np.array([replica.virtual_stages[stage].ranks[0] // self.ranks_per_node for replica in unit.replicas])

    def _volumes(self, assignment: Assignment, work: BatchWork, *, unit: str, plan: Plan, sample_ids: Sequence[int]) -> Integers:
        """[num_replicas, num_nodes]: bytes between each replica's batch and the ranks of each node."""
        graph, arrays, placed = work.graph, work.arrays, assignment.placed[unit]
        numbers = work.numbers(unit, placed)
        items = arrays.items_of(unit)[numbers]
        batches, samples = placed.replica_of_microbatch[placed.microbatch_of_atom], arrays.sample_of_item[items]
        num_nodes = -(-plan.num_ranks // self.ranks_per_node)
        found = np.zeros((placed.num_replicas, num_nodes), np.int64)
        llm = assignment.placed[graph.backbone.name]
        node_of_sample = np.zeros(len(arrays), np.int64)
        of_llm = self._nodes(plan.units[graph.backbone.name], stage=0)
        node_of_sample[np.searchsorted(arrays.sample_ids, llm.sample_ids)] = of_llm[
            llm.replica_of_microbatch[llm.microbatch_of_atom]
        ]
        num_passes = 2 if unit_is_trainable(graph, unit) else 1
        per_output = num_passes * self.bytes_per_element * graph.backbone.transformer.hidden_size
        np.add.at(found, (batches, node_of_sample[samples]), per_output * arrays.num_output_tokens[items])
        held = plan.units[unit]
        if self.num_decoding_ranks and np.array_equal(self._nodes(held), self._nodes(held, stage=0)):
            turn = np.empty(len(arrays), np.int64)
            turn[np.searchsorted(arrays.sample_ids, np.asarray(sample_ids))] = np.arange(len(sample_ids))
            decoded_on = turn[samples] % self.num_decoding_ranks // self.ranks_per_node
            item_input = graph.unit(unit).item_input
            per_token = item_input.num_patch_values if item_input is not None else 1
            np.add.at(found, (batches, decoded_on), per_token * arrays.num_item_tokens[items])
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


def _permuted(placed: PlacedAtoms, permutation: Integers) -> PlacedAtoms:
    """Give replica r the microbatches of replica permutation[r]."""
    microbatch_starts, microbatches = take_rows(placed.microbatch_starts, np.arange(placed.num_microbatches), permutation)
    atom_starts, atoms = take_rows(placed.atom_starts, np.arange(len(placed.sample_ids)), microbatches)
    return PlacedAtoms(placed.sample_ids[atoms], placed.item_indices[atoms], atom_starts, microbatch_starts)
