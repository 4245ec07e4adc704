"""What single balancers place, and how uneven it is."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions, MicrobatchCount
from multimodal.balance.batch_work import BatchWork, Imbalance, unit_imbalance
from multimodal.balance.disttrain import _light_outside
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.balance.placement import as_computed
from multimodal.balance.rearrange_nodes import rearrange_nodes
from multimodal.plan.planners.estimate.candidate import Candidate
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.planning_request import StageSize
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.assignment import Assignment, Atom, PlacedAtoms
from multimodal.values.errors import AssignmentError
from multimodal.values.validate import validate_assignment
from tests.unit.plan.planners.planning_cases import FED, THREE, TWO, random_lengths
from tools.balance import moved_volume

OPTIONS = BalanceOptions(micro_batch_size=3, vocab_size=4096)
LENGTHS = random_lengths(TWO, count=48)
LAYOUTS = {unit.name: even_layout(unit, StageSize(1), 4, 1) for unit in TWO.units}
PLAN = Candidate(LAYOUTS, groups=(TWO.unit_names,)).build_plan(TWO)


def replica_flops(assignment: Assignment) -> list[float]:
    work = BatchWork(TWO, LENGTHS, OPTIONS)
    flops = [0.0] * 4
    for unit, placed in assignment.placed.items():
        replicas = placed.replica_of_microbatch.tolist()
        for replica, of_microbatch in zip(replicas, work.microbatch_work(unit, placed).tolist(), strict=True):
            flops[replica] += of_microbatch
    return flops


def assigned(name: str) -> Assignment:
    return BALANCERS[name](LENGTHS, graph=TWO, plan=PLAN, options=OPTIONS)


def test_replicas_get_equal_work_of_all_units() -> None:
    found = assigned("whole-sample")
    validate_assignment(found, LENGTHS, graph=TWO, plan=PLAN)
    work = replica_flops(found)
    assert max(work) / min(work) < 1.02
    assert max(work) < max(replica_flops(assigned("llm-only"))) < max(replica_flops(assigned("none")))


def test_items_stay_with_their_samples() -> None:
    found = assigned("whole-sample")
    routes = [route for group in found.routes(TWO).from_source.values() for route in group]
    assert routes and all(route.source.replica == route.target.replica for route in routes)


SKEWED = [900, 40, 40, 40, 40, 40, 40, 40]
"""One sample holds most of the encoder's work: K_eff is 1."""


def count_microbatches(graph, build_plan, build_sample, **options):
    lengths = [build_sample(index, 50, ("vision", 4 * each)) for index, each in enumerate(SKEWED)]
    plan = build_plan(vision=1, audio=1, llm=1)
    given = BalanceOptions(num_microbatches=4, unit_costs=dict.fromkeys(graph.unit_names, LengthCost()), **options)
    return BALANCERS["entrain"](lengths, graph=graph, plan=plan, options=given)


class CountingPredictor:
    def __init__(self, favourite):
        self.favourite, self.seen = favourite, []

    def predict_each(self, assignments, lengths):
        counts = [len(assignment.units["llm"][0]) for assignment in assignments]
        self.seen += counts
        return [SimpleNamespace(seconds=abs(count - self.favourite), least_seconds=0.0) for count in counts]


def test_the_number_of_microbatches_is_the_predicted_best(graph, build_plan, build_sample):
    def found(**options):
        return len(count_microbatches(graph, build_plan, build_sample, **options).units["llm"][0])

    for favourite in (1, 2, 4):
        predictor = CountingPredictor(favourite)
        assert found(microbatch_count=MicrobatchCount.PREDICTED, predictor=predictor) == favourite
        assert predictor.seen == [4, 2, 1]
    unasked = CountingPredictor(1)
    assert (found(predictor=unasked), unasked.seen) == (4, [])


@pytest.mark.parametrize("name", ["disttrain", "entrain"])
def test_refined_encoders_are_even_where_the_paper_deals_in_turn(graph, build_plan, build_sample, name) -> None:
    """Three encoder replicas beside an LLM of two, and pictures of many sizes."""
    lengths = [build_sample(index, 50, ("vision", 100 + 50 * (index * index % 17))) for index in range(36)]
    plan = build_plan(vision=3, audio=1, llm=2)

    def placed(**given) -> tuple[PlacedAtoms, float]:
        options = BalanceOptions(num_microbatches=4, unit_costs={"vision": LengthCost()}, **given)
        found = BALANCERS[name](lengths, graph=graph, plan=plan, options=options)
        validate_assignment(found, lengths, graph=graph, plan=plan)
        return found.placed["llm"], unit_imbalance(found, BatchWork(graph, lengths, options), unit="vision").replica

    (llm, dealt), (same_llm, refined) = placed(), placed(refines_encoders=True)
    assert llm == same_llm
    assert dealt > 1.03 and refined < 1.01


def balanced(graph, lengths) -> Assignment:
    sizes = {unit: UnitSizes(data_parallel_size=2, pipeline_parallel_size=2) for unit in graph.unit_names}
    plan = plan_disaggregated(graph, sizes=sizes, world_size=4 * len(graph.units))
    return BALANCERS["disttrain"](lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=2, vocab_size=512))


def test_a_generator_without_work_is_no_stage_of_the_pipeline() -> None:
    for seed in range(6):
        lengths = random_lengths(TWO, count=24, seed=seed)
        assert balanced(THREE, lengths).placed["llm"] == balanced(TWO, lengths).placed["llm"]


class Favouring:
    """Predicts that the assignment with a number is the shortest."""

    def __init__(self, favourite):
        self.favourite, self.seen = favourite, []

    def predict_each(self, assignments, lengths):
        self.seen = list(assignments)
        return [SimpleNamespace(seconds=float(number != self.favourite), least_seconds=0.0) for number in range(len(assignments))]


@pytest.mark.parametrize("num_ranges", [1, 2])
def test_the_order_is_chosen_by_the_predicted_step(num_ranges) -> None:
    """All candidates hold the same microbatches; one more where the LLM has virtual stages; the given order is the last."""
    lengths = random_lengths(TWO, count=40, seed=3)
    sizes = {unit: UnitSizes(data_parallel_size=2, pipeline_parallel_size=2) for unit in TWO.unit_names}
    sizes["llm"] = replace(sizes["llm"], virtual_pipeline_size=num_ranges)
    plan = plan_disaggregated(TWO, sizes=sizes, world_size=8)
    seen = {}
    for favourite in range(4):
        predictor = Favouring(favourite)
        options = BalanceOptions(micro_batch_size=2, vocab_size=512, predictor=predictor)
        found = BALANCERS["disttrain"](lengths, graph=TWO, plan=plan, options=options)
        assert found == predictor.seen[favourite]
        seen = predictor.seen
    assert len(seen) == 3 + num_ranges
    held = [[sorted(replica) for replica in assignment.units["llm"]] for assignment in seen]
    assert all(each == held[0] for each in held)
    firsts = [[microbatch[0].sample_id for microbatch in replica] for replica in seen[-1].units["llm"]]
    assert all(each == sorted(each) for each in firsts)


def test_heavy_microbatches_stand_in_the_middle() -> None:
    sizes = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 9.0])
    assert sizes[np.asarray(_light_outside(sizes, slice(0, 5)))].tolist() == [1.0, 3.0, 5.0, 4.0, 2.0]
    assert np.asarray(_light_outside(sizes, slice(4, 6))).tolist() == [0, 1]


UNIT_TOKENS = {"llm": LengthCost(), "vision": LengthCost(CostForm.PADDED)}


def llm(*replicas):
    return tuple(tuple(tuple(Atom(sample) for sample in microbatch) for microbatch in replica) for replica in replicas)


def imbalance(graph, build_sample, *replicas, unit="llm"):
    """Of four samples of 10, 20, 30 and 60 tokens, of which the first has three images, the longest four times the shortest."""
    images = [("vision", 4), ("vision", 16), ("vision", 16)]
    given = zip((1, 20, 30, 60), (images, (), (), ()), strict=True)  # nine outputs of images are tokens, too
    lengths = [build_sample(index, tokens, *items) for index, (tokens, items) in enumerate(given)]
    work = BatchWork(graph, lengths, BalanceOptions(unit_costs=UNIT_TOKENS))
    return unit_imbalance(Assignment({unit: replicas}), work, unit=unit)


def test_the_costliest_is_held_against_the_mean_and_so_is_the_longest_which_no_balancer_can_mend(graph, build_sample):
    even = imbalance(graph, build_sample, *llm([[0, 1], [2]], [[3]]))
    assert even == Imbalance(1.0, 1.5, pytest.approx(200**0.5 / 40), 1.0, 1.5)
    spread = imbalance(graph, build_sample, *llm([[0, 3]], [[1]], [[2]], []))
    assert spread[:2] == (pytest.approx(70 / 30), 1.75) and spread[3:] == (2.0, 1.5)
    first, *others = (Atom(0, index) for index in range(3))
    assert imbalance(graph, build_sample, ((first, others[0]),), ((others[1],),), unit="vision").replica == pytest.approx(32 / 24)
    assert imbalance(graph, build_sample, (), (), unit="vision") == Imbalance(1.0, 1.0, 0.0)


@pytest.mark.parametrize("graph", [TWO, FED], ids=["two", "fed"])
def test_an_encoder_runs_first_what_is_needed_first(graph) -> None:
    plan = Candidate({unit.name: even_layout(unit, StageSize(1), 1, 1) for unit in graph.units}).build_plan(graph)
    lengths = random_lengths(graph, count=3, seed=5)
    samples = {name: [(Atom(each, -1 if name == "llm" else 0),) for each in range(3)] for name in graph.unit_names}
    orders = {"vision": (1, 2, 0), "joint": (2, 0, 1), "llm": (2, 1, 0)}
    given = {name: (tuple(microbatches[index] for index in orders[name]),) for name, microbatches in samples.items()}
    found = as_computed(Assignment(given), lengths, graph=graph, plan=plan)
    assert {tuple(each[0].sample_id for each in found.units[name][0]) for name in graph.unit_names} == {(2, 1, 0)}
    assert as_computed(found, lengths, graph=graph, plan=plan) is found


def test_the_longest_is_a_sample_where_samples_stay_whole_and_else_an_item(graph, build_sample):
    lengths = [build_sample(0, 1, ("audio", 40), ("audio", 50)), build_sample(1, 1, ("audio", 30)), build_sample(2, 1)]
    work = BatchWork(graph, lengths, BalanceOptions(unit_costs={"audio": LengthCost()}))
    first, second, third = Atom(0, 0), Atom(0, 1), Atom(1, 0)
    whole = unit_imbalance(Assignment({"audio": (((first, second),), ((third,),))}), work, unit="audio")
    assert whole.replica == whole.replica_of_longest == 1.5
    spread = unit_imbalance(Assignment({"audio": (((first,), (third,)), ((second,),))}), work, unit="audio")
    assert (spread.replica, spread.replica_of_longest) == (pytest.approx(70 / 60), 1.0)
    assert spread.microbatch == spread.microbatch_of_longest == 1.25


def test_traffic_counts_what_other_nodes_loaded(graph, build_sample):
    lengths = [build_sample(index, 10) for index in range(4)]
    work = BatchWork(graph, lengths, BalanceOptions(unit_costs=UNIT_TOKENS))
    loaded = Assignment({"llm": llm([[0]], [[1]], [[2]], [[3]])})
    swapped = Assignment({"llm": llm([[2]], [[3]], [[0]], [[1]])})
    volume = moved_volume(loaded, swapped, work, unit="llm", bytes_per_token=4)
    assert volume.toarray().tolist() == [[0, 0, 40, 0], [0, 0, 0, 40], [40, 0, 0, 0], [0, 40, 0, 0]]
    traffic = rearrange_nodes(volume, ranks_per_node=2)
    assert (traffic.bytes_before.max(), traffic.bytes_after.max()) == (40, 0)


@pytest.mark.parametrize(
    ("form", "cost"),
    [
        (CostForm.LINEAR, 3 + 5 + 1),
        (CostForm.LINEAR_QUADRATIC, 9 + 0.5 * (9 + 25 + 1)),
        (CostForm.PADDED, 3 * 5),
        (CostForm.PADDED_ATTENTION, 9 + 0.5 * 3 * 25),
    ],
)
def test_each_form_costs_what_the_paper_says(form, cost):
    assert LengthCost(form, 0.5).row_costs(np.array([0, 3, 3, 4]), np.array([3, 5, 1, 0])).tolist() == [cost, 0, 0]


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(AssignmentError, match=f"quadratic weight {weight}; give a finite number that is not negative"):
        LengthCost(CostForm.LINEAR_QUADRATIC, weight)
