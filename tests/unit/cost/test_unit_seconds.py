"""Costs of all pieces at once against those of one after the other, added up anew from their samples and layers."""

from dataclasses import replace

import numpy as np
import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.communication import exchange_cost, message_cost
from multimodal.cost.layers.layer import ActivationCase
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.unit_load import UnitLoad, add_loads, item_load, sample_load
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.action import Action, ActionKind, Resource
from multimodal.values.assignment import Atom, MicrobatchPlace
from multimodal.values.model_graph import Role
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.work.step_work import RESOURCE_NUMBERS, StepWork, step_work
from tests.unit.plan.planners.planning_cases import CLUSTER, THREE, TWO, frozen, random_lengths

KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)


class Singly:
    """The costs of single actions of a step."""

    def __init__(self, costs: ModelCosts) -> None:
        self.costs, self.shape, self.assignment, self.options = costs, costs.shape, costs.assignment, costs.options
        self.samples = {sample.sample_id: sample for sample in costs.lengths}

    def load(self, unit: str, atoms: tuple[Atom, ...]) -> UnitLoad:
        """The load of some atoms."""
        return add_loads(self._of_atom(unit, self.samples[atom.sample_id], atom) for atom in atoms)

    def _of_atom(self, unit: str, sample: SampleLengths, atom: Atom) -> UnitLoad:
        if atom.item_index < 0:
            return sample_load(self.shape.graph.unit(unit), sample)
        return item_load(*sample.items[atom.item_index][1:3])

    def atoms(self, action: Action) -> tuple[Atom, ...]:
        """What an action computes."""
        place = action.microbatch_place
        return (
            self.assignment.atoms(place) if action.subset < 0 else self.assignment.subsets(self.shape.graph, place)[action.subset]
        )

    def compute(self, action: Action) -> tuple[float, float]:
        """Seconds, and seconds of waiting, of a computation."""
        load, sizes = self.load(action.unit, self.atoms(action)), self.shape.plan.units[action.unit]
        found = np.zeros(2)
        for layer, need in self.costs.stages.in_order(action[1:4]):
            one = self.costs.layer_costs.seconds(
                action.unit,
                layer,
                load,
                tensor_parallel_size=sizes.tensor_parallel_size,
                context_parallel_size=sizes.context_parallel_size,
                recompute=self.options.recompute,
                ranks=self.shape.plan.virtual_stage(*action[1:4]).ranks,
            )
            waits = one.input_gradient_waiting * LAYER_KINDS[layer].passes_gradient(need)
            weight = one.weight_gradient * need.trains_weights
            found += {
                ActionKind.FORWARD: (one.forward, one.forward_waiting),
                ActionKind.BACKWARD: (one.backward(layer, need), waits),
                ActionKind.INPUT_GRADIENT: (one.backward(layer, need) - weight, waits),
                ActionKind.WEIGHT_GRADIENT: (weight, 0.0),
            }[action.kind]
        return tuple(found)

    def transfer(self, send: Action) -> tuple[float, float, int]:
        """Latency, occupied seconds and link of a message."""
        forward = send.kind is ActionKind.SEND_FORWARD
        source, target = (send.place, send.peer) if forward else (send.peer, send.place)
        if source.unit == target.unit:
            rows = self.load(source.unit, self.atoms(send._replace(kind=KINDS[0]) if forward else send)).num_tokens
            width = self.shape.graph.unit(source.unit).transformer.hidden_size
        else:
            giver = MicrobatchPlace(source.unit, source.replica, source.microbatch)
            routes = self.assignment.routes(self.shape.graph).from_source[giver]
            place = MicrobatchPlace(target.unit, target.replica, target.microbatch)
            atoms = next(route.atoms for route in routes if route.target == place)
            is_encoder = self.shape.graph.unit(source.unit).role is Role.ENCODER
            rows = self.load(source.unit, atoms).num_outputs if is_encoder else self.images(target.unit, atoms)
            width = self.shape.graph.unit(target.unit if is_encoder else source.unit).transformer.hidden_size
        ranks, others = (self.shape.plan.virtual_stage(*place[:3]).ranks for place in (send.place, send.peer))
        size = float(rows * width * self.costs.cluster.bytes_per_element)
        if ranks == others:
            return tuple(exchange_cost(size, ranks=ranks, cluster=self.costs.cluster))
        return tuple(message_cost(size, source_ranks=ranks, target_ranks=others, cluster=self.costs.cluster))

    def images(self, generator: str, atoms: tuple[Atom, ...]) -> int:
        """Images that a generator makes of samples."""
        return sum(item.unit == generator for atom in atoms for item in self.samples[atom.sample_id].items)

    def kept_bytes(self, action: Action) -> float:
        """Bytes that a forward keeps, of layers alone."""
        load, sizes = self.load(action.unit, self.atoms(action)), self.shape.plan.units[action.unit]
        total = 0.0
        for layer, need in self.costs.stages.in_order(action[1:4]):
            case = ActivationCase(need, recompute=self.options.recompute, is_spread=sizes.context_parallel_size > 1)
            kept = self.costs.stages.describe(action.unit, layer).activation_bytes(load, case)
            total += kept.all_ranks(tensor_parallel_size=sizes.tensor_parallel_size)
        return total / (sizes.tensor_parallel_size * sizes.context_parallel_size)


def costs_of(graph, size, *, balance: str = "orchmllm", **options) -> ModelCosts:
    sizes = {name: UnitSizes(data_parallel_size=2, **size) for name in graph.unit_names}
    sizes["llm"] = UnitSizes(data_parallel_size=3, pipeline_parallel_size=2, **size)
    plan = plan_disaggregated(graph, sizes=sizes, world_size=sum(each.num_ranks or 0 for each in sizes.values()))
    lengths = random_lengths(graph, count=17)
    assignment = BALANCERS[balance](lengths, graph=graph, plan=plan, options=BalanceOptions(vocab_size=512))
    return ModelCosts(assignment.shape(graph, plan), assignment, lengths, CLUSTER, 512, replace(RunOptions(), **options))


def of_resource(work: StepWork, resource: Resource) -> np.ndarray:
    return np.flatnonzero(work.resources == RESOURCE_NUMBERS[resource])


@pytest.mark.parametrize("graph", [TWO, THREE, frozen(TWO, "vision")])
@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("size", [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}, {}])
def test_pieces_cost_what_they_cost_one_by_one(graph, num_parts, is_cut, size) -> None:
    costs = costs_of(graph, size, num_overlapped_parts=num_parts, recompute="selective", item_block_size=None)
    schedule = BUILDERS["1f1b"](costs.shape)
    work, singly = (split_backward(schedule) if is_cut else schedule).work, Singly(costs)
    assert bool(work.cuts.num_subsets) == is_cut
    pieces = np.concatenate([of_resource(work, each) for each in (Resource.COMPUTE, Resource.SEND)])
    found = costs.of_pieces(work, pieces)
    columns = zip(*(column.tolist() for column in found), strict=True)
    for piece, (seconds, waiting, latency, link) in zip(pieces.tolist(), columns, strict=True):
        action = work.action(piece)
        if piece < work.num_computed:
            assert (seconds, waiting) == pytest.approx(singly.compute(action)[:2], rel=1e-9), action
            assert costs.compute(action)[:2] == (seconds, waiting)
        else:
            assert (latency, seconds, link) == pytest.approx(singly.transfer(action)), action


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("size", [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}, {}])
def test_replicas_take_what_their_computations_take(zero_stage, size) -> None:
    costs = costs_of(THREE, size, zero_stage=zero_stage)
    for unit in THREE.unit_names:
        placed = costs.assignment.placed[unit]
        of_both = costs.computations.of_both(unit)[0]
        found = np.stack([np.bincount(placed.replica_of_microbatch, row, placed.num_replicas) for row in of_both])
        for stage, replica in np.ndindex(found.shape):
            places = [(unit, replica, stage, index) for index in range(costs.assignment.num_microbatches(unit, replica))]
            expected = sum(costs.compute(Action(kind, *place)).seconds for place in places for kind in KINDS[:2])
            assert found[stage, replica] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}, {}])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_places_keep_what_they_keep_one_by_one(recompute, size) -> None:
    costs = costs_of(THREE, size, recompute=recompute, item_block_size=None)
    work, singly = step_work(costs.shape), Singly(costs)
    forwards = np.flatnonzero(work.kinds == KINDS.index(ActionKind.FORWARD))
    forwards = forwards[work.pieces.index_of_stage[work.computed_stages[forwards]] > 0]  # those of the first stage receive, too
    found = costs.kept_bytes(work, forwards)
    assert len(found) and found.tolist() == [round(singly.kept_bytes(work.action(piece))) for piece in forwards.tolist()]
