"""Replicas that share weights join each other's computations; those that share experts compute in one order, or are refused."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.balance.placement import even_out_replicas
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.plan.plans_of_sizes import UnitSizes, build_unit_plan
from multimodal.schedule.align_replicas import Join, Joins, align_replicas, check_expert_groups
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.execute_lanes import UnitCosts, execute_lanes
from multimodal.schedule.simulate import Simulation, simulate_schedule
from multimodal.values.action import Action, ActionKind, LayerRange, Resource
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.parts.lane import lane_of
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from tests.distributed.schedule_rewrites import CutMicrobatches
from tests.unit.cost.cost_cases import cluster_of
from tests.unit.schedule.built_schedules import UniformCosts
from tests.unit.schedule.schedule_cases import PlacedCase, all_alike, build_case, build_graph, cases, placed_case, written_case

LLM = build_graph()


def lowered(case: StepShape, *, builder: str = "1f1b", passes=()) -> Schedule:
    return build_schedule(BUILDERS[builder], case, passes=passes)


@settings(max_examples=60)
@given(case=cases().filter(all_alike), builder=st.sampled_from(["1f1b", "gpipe", "zb-h1", "eager-1f1b"]))
def test_replicas_make_one_sequence_of_computations(case: StepShape, builder: str):
    schedule = lowered(case, builder=builder)
    joins = align_replicas(schedule)
    for unit, sizes in case.plan.units.items():
        for stage in range(sizes.num_virtual_stages):
            sequences = [sequences_of(case, schedule, joins, unit, replica, stage) for replica in range(sizes.data_parallel_size)]
            assert all(sequence == sequences[0] for sequence in sequences)


def sequences_of(
    case: StepShape, schedule: Schedule, joins: Joins, unit: str, replica: int, stage: int
) -> list[tuple[str, str, int]]:
    """What every lane of a stage computes or joins there, in order; alike in all of them."""
    physical = case.plan.virtual_stage(unit, replica, stage).stage_index
    found = []
    for lane in case.plan.lanes_of_stage(unit, replica, stage):
        actions, sequence = schedule.lanes[lane].actions, []
        for position in range(len(actions) + 1):
            here: list[Action | Join] = [*joins[lane].get(position, ()), *actions[position : position + 1]]
            for each in here:
                is_join = isinstance(each, Join)
                if each.unit != unit or (not is_join and each.kind.resource is not Resource.COMPUTE):
                    continue
                if case.plan.virtual_stage(unit, replica, each.stage).stage_index == physical:
                    sequence.append((each.kind.value, each.unit, each.stage))
        found.append(sequence)
    assert all(sequence == found[0] for sequence in found)
    return found[0]


@pytest.mark.parametrize("builder", ["1f1b", "gpipe"])
def test_joined_passes_of_a_forward_are_as_many_as_its_sample_subsets(builder: str):
    case = build_case(
        build_graph("vision"), {"vision": (2, 1, 1), "llm": (1, 1, 1)}, {"vision": [[[0, 1]], []], "llm": [[[0], [1]]]}
    )
    joins = align_replicas(lowered(case, builder=builder, passes=(CutMicrobatches(0),)))
    found = [join for position in sorted(joins[1]) for join in joins[1][position]]
    num_forward_passes = sum(join.num_passes for join in found if join.kind is ActionKind.FORWARD)
    assert num_forward_passes == sum(join.kind is ActionKind.BACKWARD for join in found)


def expert_case(*groupings: list[list[int]], pp: int = 1) -> PlacedCase:
    shape, assignment = placed_case(LLM, {"llm": (len(groupings), pp, 1)}, {"llm": list(groupings)})
    unit = replace(shape.plan.units["llm"], expert_parallel_size=len(groupings))
    return PlacedCase(replace(shape, plan=Plan({**shape.plan.units, "llm": unit})), assignment)


@pytest.mark.parametrize("builder", ["1f1b", "gpipe", "zb-h1"])
def test_replicas_with_as_many_microbatches_compute_together(builder: str) -> None:
    case = expert_case([[0], [1], [2]], [[3], [4], [5]], pp=2)
    check_expert_groups(build_schedule(BUILDERS[builder], case.shape))


def shared_by(plan: Plan, size: int) -> Plan:
    return Plan({**plan.units, "llm": replace(plan.units["llm"], expert_parallel_size=size)})


def test_replicas_with_fewer_microbatches_are_refused_until_they_get_empty_ones() -> None:
    case = expert_case([[0], [1], [2]], [[3]], pp=2)
    with pytest.raises(ScheduleError, match="stage 0 of replicas 0 and 1 computes in different orders"):
        check_expert_groups(build_schedule(BUILDERS["1f1b"], case.shape))
    evened = even_out_replicas(case.assignment, plan=case.shape.plan)
    assert [evened.num_microbatches("llm", replica) for replica in (0, 1)] == [3, 3]
    assert [list(each) for each in evened.units["llm"][1]] == [[Atom(3)], [], []]
    check_expert_groups(build_schedule(BUILDERS["1f1b"], evened.shape(LLM, case.shape.plan)))


def test_nothing_moves_where_no_experts_are_shared() -> None:
    case = expert_case([[0], [1], [2]], [[3]])
    assert even_out_replicas(case.assignment, plan=shared_by(case.shape.plan, 1)) is case.assignment


def test_replicas_that_wait_for_each_other_in_a_circle_are_refused() -> None:
    """The first replica has only text, and behind it, on the same rank, the encoder of the other replica's image."""
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8}
    llm = {"role": "backbone", **shape, "experts": {"num_experts": 2}}
    graph = ModelGraph.from_dict({"units": {"vision": {"role": "encoder", **shape}, "llm": llm}})
    first, second = (Replica((Stage((rank,), ((0, 3),)),)) for rank in (0, 1))
    plan = Plan({"vision": UnitPlan((first,)), "llm": UnitPlan((first, second), expert_parallel_size=2)})
    assignment = Assignment({"vision": (((Atom(1, 0),),),), "llm": (((Atom(0),),), ((Atom(1),),))})
    schedule = build_schedule(BUILDERS["1f1b"], assignment.shape(graph, plan))
    assert [action.unit for action in schedule.lanes[0].actions][:3] == ["llm", "llm", "vision"]
    with pytest.raises(ScheduleError, match="other units keep its replicas from computing together"):
        check_expert_groups(schedule)


LINK = {"bandwidth_gbytes_per_second": 100.0, "latency_us": 0.0}
CLUSTER = cluster_of(gpus_per_node=8, peak_tflops=1.0, intra_node=LINK, inter_node={**LINK, "nics_per_node": 1})
LENGTHS = [[400, 100], [200, 300]]
"""Of two replicas' microbatches, one sample each."""


def simulated(
    graph: ModelGraph, *, experts: int, pp: int = 1, builder: str = "gpipe", lengths: list[list[int]] = LENGTHS
) -> Simulation:
    """A step of two replicas; what the layers at both ends take is too little to be seen."""
    numbers = iter(range(sum(map(len, lengths))))
    samples = [[next(numbers) for _ in replica] for replica in lengths]
    sizes = UnitSizes(data_parallel_size=2, pipeline_parallel_size=pp, expert_parallel_size=experts)
    plan = Plan({"llm": build_unit_plan(graph.unit("llm"), sizes=sizes, first_rank=0)})
    placed = Assignment({"llm": tuple(tuple((Atom(sample),) for sample in replica) for replica in samples)})
    assignment = even_out_replicas(placed, plan=plan)
    shape = assignment.shape(graph, plan)
    batch = [SampleLengths(number, (), tokens, 1) for number, tokens in enumerate(chain.from_iterable(lengths))]
    costs = ModelCosts(shape, assignment, batch, CLUSTER, vocab_size=8, options=RunOptions(transformer_impl="local"))
    return simulate_schedule(build_schedule(BUILDERS[builder], shape), costs)


def expert_model(num_layers: int, *, ffn: int = 0, first_dense: bool = False) -> ModelGraph:
    """An LLM whose work is attention, but for experts with inner size `ffn`."""
    shape = {"num_layers": num_layers, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 1}
    layers = ["token_embedding", *["moe_transformer"] * num_layers, "head"]
    layers[1] = "transformer" if first_dense else layers[1]
    experts = {"num_experts": 2, "router_topk": 1, "ffn_hidden_size": ffn or 1}
    return ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **shape, "layers": layers, "experts": experts}}})


def test_replicas_that_share_experts_wait_for_the_slowest_in_every_microbatch() -> None:
    """Work of tokens, and their squares: alone, a replica takes the sum of its own; together, the sum of each round's most."""
    model = expert_model(2)
    alone, together = simulated(model, experts=1), simulated(model, experts=2)
    of_one = [simulated(model, experts=1, lengths=[[tokens], [tokens]]).iteration_seconds for tokens in (400, 300)]
    reduction = simulated(model, experts=1, lengths=[[0], [0]]).iteration_seconds
    assert together.iteration_seconds == pytest.approx(sum(of_one) - reduction, rel=0.02)
    assert together.iteration_seconds > 1.2 * alone.iteration_seconds
    assert together.bubble["tp"] > 0.1 > alone.bubble["tp"], "the faster replica waits inside its layers"
    starts = {}
    for event in together.timeline.events:
        if event.action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            starts.setdefault(event.action._replace(replica=0), set()).add((event.start_seconds, event.end_seconds))
    assert len(starts) == 4 and all(len(each) == 1 for each in starts.values())


def test_replicas_compute_as_many_tokens_of_all_that_share_experts() -> None:
    """Where experts are nearly all the work, replicas with unequal lengths take what their mean takes."""
    model = expert_model(1, ffn=100_000)
    uneven, even = (simulated(model, experts=2, lengths=each) for each in ([[400], [200]], [[300], [300]]))
    assert uneven.iteration_seconds == pytest.approx(even.iteration_seconds, rel=5e-3)
    assert simulated(model, experts=2, lengths=[[400], []]).iteration_seconds < 1.01 * even.iteration_seconds


def test_stages_without_experts_wait_for_nobody() -> None:
    """Two stages, the first without experts: its replicas go on by themselves, and meet in the second."""
    found = simulated(expert_model(2, first_dense=True), experts=2, pp=2, builder="1f1b")
    ends = {event.action: event.end_seconds for event in found.timeline.events}
    first, second = ([ends[Action(ActionKind.FORWARD, "llm", replica, stage, 0)] for replica in (0, 1)] for stage in (0, 1))
    assert first[0] > first[1] and second[0] == second[1]
    schedule = found.compiled.schedule
    times = execute_lanes(schedule, seconds=np.arange(1.0, 1 + schedule.work.num_computed))  # by which messages are placed
    ends = {event.action: event.end_seconds for event in times.events}
    first, second = ([ends[Action(ActionKind.FORWARD, "llm", replica, stage, 0)] for replica in (0, 1)] for stage in (0, 1))
    assert first[0] != first[1] and second[0] == second[1]


def test_orders_that_never_meet_are_named_when_they_are_simulated() -> None:
    """Two microbatches on one replica, swapped beside those of the other."""
    schedule = simulated(expert_model(1), experts=2).compiled.schedule
    lanes = [list(lane.actions) for lane in schedule.lanes]
    forwards = [position for position, action in enumerate(lanes[1]) if action.kind is ActionKind.FORWARD]
    first, second = forwards
    lanes[1][first], lanes[1][second] = lanes[1][second], lanes[1][first]
    swapped = schedule.with_lanes(lane_of(lane.ranks, actions) for lane, actions in zip(schedule.lanes, lanes, strict=True))
    with pytest.raises(ScheduleError, match="computes in different orders"):
        simulate_schedule(swapped, UnitCosts(schedule.shape))


def test_a_range_is_reduced_when_all_who_hold_it_have_come_to_it():
    """The second replica's only microbatch is done long before the first one's three."""
    case = written_case({"llm": "0|1 (0-4|4-10) / 2,3|4,5 (0-7|7-10)"}, {"llm": "0|1|2 / 3"})
    schedule = BUILDERS["1f1b"](case.shape)
    assert not execute_lanes(schedule).stuck
    costs = UniformCosts(collective=lambda action: float(action.covers.end - action.covers.first))
    events = simulate_schedule(schedule, costs).timeline.events
    last = max(event.end_seconds for event in events if event.action[:4] == (ActionKind.BACKWARD, "llm", 0, 1))
    reduced = {
        event.action[2:4]: event.end_seconds
        for event in events
        if event.action.kind is ActionKind.REDUCE_GRADIENTS and event.action.covers in (LayerRange(0, 3), LayerRange(3, 6))
    }
    # Layers 7 to 9 take 3 seconds after the first replica's last backward; then layers 4 to 6 take as many.
    assert reduced[1, 1] == pytest.approx(last + 3) and reduced[0, 1] == pytest.approx(last + 6)
