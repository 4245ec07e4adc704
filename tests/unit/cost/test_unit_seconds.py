"""Costs of all pieces at once against those of one after the other, and of segments against those of the whole."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.cluster import cost_between_nodes, cost_inside_node, exchange_cost
from multimodal.cost.layers.layer import ActivationCase, Exchange
from multimodal.cost.layers.registry import LAYER_KINDS, count_segments, describe_layer
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.pieces.tensor_parallel_waits import computation_waits
from multimodal.cost.run_options import RunOptions
from multimodal.cost.seconds.layer_costs import Sharing
from multimodal.cost.unit_load import UnitLoad, add_loads, item_load, sample_load
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.action import Action, ActionKind, Place, Resource, SegmentRange
from multimodal.values.assignment import Atom, MicrobatchPlace
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import Role
from multimodal.values.parts.cuts import Cuts, SegmentCut
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.work.step_work import RESOURCE_NUMBERS, StepWork, step_work
from tests.unit.cost.test_model_costs import COSTS, GRAPH
from tests.unit.golden_answers import Kinds, golden_test
from tests.unit.plan.planners.planning_cases import CLUSTER, THREE, TWO, frozen, random_lengths

KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)


class Singly:
    def __init__(self, costs: ModelCosts) -> None:
        self.costs, self.shape, self.assignment, self.options = costs, costs.shape, costs.assignment, costs.options
        self.samples = {sample.sample_id: sample for sample in costs.lengths}

    def load(self, unit: str, atoms: tuple[Atom, ...]) -> UnitLoad:
        return add_loads(self._of_atom(unit, self.samples[atom.sample_id], atom) for atom in atoms)

    def _of_atom(self, unit: str, sample: SampleLengths, atom: Atom) -> UnitLoad:
        if atom.item_index < 0:
            return sample_load(self.shape.graph.unit(unit), sample)
        return item_load(*sample.items[atom.item_index][1:3])

    def atoms(self, action: Action) -> tuple[Atom, ...]:
        place = action.microbatch_place
        return (
            self.assignment.atoms(place) if action.subset < 0 else self.assignment.subsets(self.shape.graph, place)[action.subset]
        )

    def compute(self, action: Action) -> tuple[float, float]:
        load, sizes = self.load(action.unit, self.atoms(action)), self.shape.plan.units[action.unit]
        found = np.zeros(2)
        for layer, need in self.costs.stages.in_order(action[1:4]):
            own, ranks = (
                (sizes.tensor_parallel_size, sizes.context_parallel_size),
                self.shape.plan.virtual_stage(*action[1:4]).ranks,
            )
            sharing = Sharing(*own, self.options.recompute, ranks)
            one = self.costs.layer_costs.seconds(action.unit, layer, load, sharing)
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
        cost = cost_inside_node if self.costs.cluster.is_one_node((*ranks, *others)) else cost_between_nodes
        return tuple(cost(size, source_ranks=ranks, cluster=self.costs.cluster))

    def images(self, generator: str, atoms: tuple[Atom, ...]) -> int:
        return sum(item.unit == generator for atom in atoms for item in self.samples[atom.sample_id].items)

    def kept_bytes(self, action: Action) -> float:
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


@pytest.mark.deep(when=lambda graph, num_parts: num_parts == 4 and graph != THREE)
@pytest.mark.parametrize("graph", [TWO, THREE, frozen(TWO, "vision")], ids=["two", "three", "frozen"])
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


LOCAL = RunOptions(transformer_impl="local")
OPTIONS = [
    replace(LOCAL, recompute=recompute, sequence_parallel=sp) for recompute in (None, "selective", "full") for sp in (False, True)
]
FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
FULL, PASSING = BackwardNeed.FULL, BackwardNeed.INPUT_GRADIENT


@pytest.mark.parametrize("options", [*OPTIONS, replace(LOCAL, zero_stage=3), replace(LOCAL, num_overlapped_parts=4)])
@pytest.mark.parametrize("place", [("vision", 0, 0, 1), ("llm", 0, 0, 0), ("llm", 0, 1, 1)])
def test_the_ranges_of_a_computation_cost_the_whole(options: RunOptions, place: tuple[str, int, int, int]) -> None:
    costs = replace(COSTS, options=options)
    num_segments = costs.stages.num_segments(place[:3])
    assert num_segments == count_segments(GRAPH.unit(place[0]), costs.shape.plan.virtual_stage(*place[:3]).layers)
    cut = Cuts(segments={Place(*place): SegmentCut(num_segments, (3, 5, num_segments - 1), (3, 4))})
    cut_shape = costs.shape.with_cuts(cut)
    for kind, ranges in ((FORWARD, cut.forwards(Place(*place))), (BACKWARD, cut.backwards(Place(*place)))):
        whole = costs.compute(Action(kind, *place))
        parts = [costs.compute(Action(kind, *place, covers=covers)) for covers in ranges]
        assert all(part.seconds > 0 for part in parts)
        assert sum(part.seconds for part in parts) == pytest.approx(whole.seconds, rel=1e-12)
        assert sum(part.tensor_parallel_seconds for part in parts) == pytest.approx(whole.tensor_parallel_seconds, abs=1e-15)
        work = step_work(cut_shape)
        pieces = [work.computed_numbers[Action(kind, *place, covers=covers)] for covers in ranges]
        found = costs.of_pieces(work, np.array(pieces))
        assert found.seconds.tolist() == pytest.approx([part.seconds for part in parts], rel=1e-9)
        assert found.tensor_parallel_seconds.tolist() == pytest.approx(
            [part.tensor_parallel_seconds for part in parts], abs=1e-15
        )


def test_a_segment_costs_what_it_multiplies_and_waits_for_its_own_collective() -> None:
    costs = replace(COSTS, options=LOCAL)
    one = [
        costs.compute(Action(FORWARD, "llm", 0, 0, 0, covers=SegmentRange(first, end))) for first, end in pairwise(range(1, 9))
    ]
    waits = [cost.tensor_parallel_seconds for cost in one]
    assert waits == pytest.approx([waits[0], 0.0, 0.0, waits[0], waits[0], 0.0, waits[0]]) and waits[0] > 0
    norm, qkv, _, projection, _, up, down = (cost.seconds - cost.tensor_parallel_seconds for cost in one)
    ratios = (norm, qkv / projection, up / projection, down / projection)
    assert ratios == pytest.approx((0.0, 3.0, 4.0, 4.0), rel=1e-9, abs=1e-15), "no elementwise work is counted"


@pytest.mark.parametrize("kind", ["patch_embedding", "token_embedding", "transformer", "projector", "head"])
def test_segments_have_the_weights_and_the_traffic_of_their_layer(kind: str) -> None:
    unit = GRAPH.unit("vision" if kind in ("patch_embedding", "projector") else "llm")
    layer = describe_layer(GRAPH, unit, kind, vocab_size=512)
    work = layer.segment_work(2)
    assert len(work) == len(layer.segments) and sum(each.attends for each in work) == 1
    assert sum(each.num_weights for each in work) == layer.num_weights
    assert tuple(map(sum, zip(*(each.traffic for each in work), strict=True))) == layer.traffic(2)


TRANSFORMER = {"layers": ["transformer"], "kind": "F", "need": "FULL", "options": {}, "covers": None}
RANGE = {**TRANSFORMER, "layers": ["token_embedding", "transformer", "transformer"], "covers": [1, 5]}


def waits_of(document):
    """Say the segments and exchanges that a computation waits for: gathering, gathering again, summing; ! at its end."""
    layers = [(layer, BackwardNeed[document["need"]]) for layer in document["layers"]]
    options, covers = replace(LOCAL, **document["options"]), document["covers"] and SegmentRange(*document["covers"])
    found = computation_waits(ActionKind(document["kind"]), layers, options=options, covers=covers)
    letters = {Exchange.GATHER: "g", Exchange.GATHER_AGAIN: "a", Exchange.SUM: "s"}
    return (
        " ".join(f"{wait.segment}{letters[wait.exchange]}{'!' * (covers is not None and wait.is_at_end)}" for wait in found)
        or "none"
    )


WAITS: Kinds = {"transformer layer": (TRANSFORMER, waits_of), "range of segments": (RANGE, waits_of)}
test_waits_are_numbered_as_computations_come_to_them = golden_test("waits.txt", WAITS)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [FORWARD, BACKWARD, ActionKind.INPUT_GRADIENT])
def test_the_waits_of_a_computation_are_all_that_it_waits(options: RunOptions, kind: ActionKind) -> None:
    costs = replace(COSTS, options=options)
    action = Action(kind, "llm", 0, 1, 1)
    cost, waits = costs.compute(action), computation_waits(kind, costs.stages.in_order(action[1:4]), options=options)
    assert len(cost.waits) == len(waits) and sum(cost.waits) == pytest.approx(cost.tensor_parallel_seconds)
    assert [seconds > 0 for seconds in cost.waits] == [wait.is_long and wait.layer == 0 for wait in waits], (
        "the head's are not counted"
    )
    work = step_work(costs.shape)
    if kind is not ActionKind.INPUT_GRADIENT:
        pieces = np.array([work.computed_numbers[each] for each in (action, Action(FORWARD, "vision", 0, 0, 0), action)])
        starts, seconds = costs.waits(work, pieces)
        assert np.diff(starts).tolist() == [len(waits), 0, len(waits)]
        assert seconds.tolist() == pytest.approx([*cost.waits, *cost.waits])


def test_what_tells_nobody_of_its_waits_has_none() -> None:
    cost = replace(COSTS, options=replace(LOCAL, num_overlapped_parts=4)).compute(Action(FORWARD, "llm", 0, 0, 0))
    assert cost.waits == () and cost.tensor_parallel_seconds > 0


@pytest.mark.parametrize("options", OPTIONS)
def test_a_stage_in_ranges_keeps_the_results_of_its_sums_and_rows_that_it_does_not_gather_again(options: RunOptions) -> None:
    costs, place = replace(COSTS, options=options), Place("llm", 0, 0, 0)
    cut_shape = costs.shape.with_cuts(Cuts(segments={place: SegmentCut(costs.stages.num_segments(place[:3]), (), (3,))}))
    kept = []
    for shape in (costs.shape, cut_shape):
        work = step_work(shape)
        forwards = [work.computed_numbers[Action(FORWARD, *each_place)] for each_place in (place, place._replace(microbatch=1))]
        kept.append(costs.kept_bytes(work, np.array(forwards)))
    num_layers = [kind for kind, _ in costs.stages.in_order(place[:3])].count("transformer")
    num_tokens = costs.loads.kept("llm").whole.num_tokens[0] + costs.loads.kept("llm").cut.num_tokens[0]
    rows = num_tokens * GRAPH.unit("llm").transformer.hidden_size * costs.cluster.bytes_per_element
    expected = 0 if options.recompute == "full" else 2 * num_layers * rows
    assert (kept[1] - kept[0]).tolist() == pytest.approx([expected, 0], abs=1)
