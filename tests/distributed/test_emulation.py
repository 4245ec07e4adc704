"""Emulated runs: the real executor with timed waits gives a whole timeline of the schedule it was given."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from megatron.runtime.emulation.emulated_run import EmulatedRun, emulate_on_rank
from multimodal.cost.cost_table import CostTable, TableCosts, build_table_step
from multimodal.cost.run_options import RunOptions
from multimodal.cost.step_costs import ComputeCost
from multimodal.plan.plans_of_sizes import UnitSizes
from multimodal.plan.plans_of_sizes import build_unit_plan as grid_of
from multimodal.schedule.align_replicas import EXCHANGES
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.inside_slots import InsideSlots
from multimodal.schedule.passes import passes_named
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.simulate import simulate_schedule
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import Action, ActionKind, Resource
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph, Role, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.timeline import Timeline
from tests.unit.schedule.built_schedules import UniformCosts
from tests.unit.schedule.schedule_cases import SHAPE, build_unit_plan
from tests.unit.schedule.schedule_text import schedule_from_text

TABLE = {
    "num_microbatches": 4,
    "units": {
        "vision": {"upstream": [], "stages": [{"forward": 0.002, "backward": 0.004}] * 2},
        "llm": {"upstream": ["vision"], "stages": [{"forward": 0.003, "input_gradient": 0.002, "weight_gradient": 0.003}] * 2},
    },
}
GENERATOR = {"upstream": ["llm"], "stages": [{"forward": 0.001, "input_gradient": 0.001, "weight_gradient": 0.002}] * 2}


def build_run(schedule: str, passes: str, *, with_generator: bool = False) -> EmulatedRun:
    units = {**TABLE["units"], **({"painter": GENERATOR} if with_generator else {})}
    table = CostTable.from_dict({**TABLE, "units": units})
    shape, assignment = build_table_step(table)
    lowered = build_schedule(BUILDERS[schedule], shape, passes=passes_named(passes))
    return EmulatedRun(lowered, assignment, TableCosts(table), num_iterations=1)


@pytest.mark.parametrize("with_generator", [False, True])
@pytest.mark.parametrize(("schedule", "passes"), [("1f1b", ""), ("1f1b", "fill"), ("zb-h1", "fill")])
def test_every_computation_takes_its_seconds_on_its_lane(ranks, schedule, passes, with_generator):
    run = build_run(schedule, passes, with_generator=with_generator)
    found = ranks.run(_emulate, run, world_size=run.schedule.shape.plan.num_ranks)
    (timeline,) = found[0]
    assert isinstance(timeline, Timeline)
    computed = [event for event in timeline.events if event.action.kind.resource is Resource.COMPUTE]
    expected = Counter(
        (index, action) for index, lane in enumerate(run.schedule.lanes) for action in lane.actions if _is_computation(action)
    )
    assert Counter((event.lane, event.action) for event in computed) == expected
    for event in computed:
        assert event.end_seconds - event.start_seconds >= run.costs.compute(event.action).seconds


def test_context_parallel_ranks_are_emulated_together(ranks):
    """Encoder stages of two ranks before LLM stages of three: rows are cut as in a real run, and computations take their time."""
    table = CostTable.from_dict({**TABLE, "units": {**TABLE["units"], "painter": GENERATOR}})
    shape, assignment = build_table_step(table)
    spread = Plan({name: _spread(unit, size) for (name, unit), size in zip(shape.plan.units.items(), (2, 3, 2), strict=True)})
    lowered = build_schedule(BUILDERS["1f1b"], assignment.shape(shape.graph, spread))
    run = EmulatedRun(lowered, assignment, TableCosts(table), num_iterations=1, num_tokens=300)
    ((timeline,), *_) = ranks.run(_emulate, run, world_size=spread.num_ranks)
    expected = {action for lane in lowered.lanes for action in lane.actions if _is_computation(action)}
    assert {event.action for event in timeline.events if _is_computation(event.action)} == expected


class LateCosts(UniformCosts):
    """The second replica computes its weight gradients late."""

    def compute(self, action: Action) -> ComputeCost:
        return ComputeCost(0.02 if action.kind is ActionKind.WEIGHT_GRADIENT and action.replica == 1 else 0.001)


def test_replicas_that_share_experts_begin_together(ranks):
    experts = {"num_experts": 2, "router_topk": 1, "ffn_hidden_size": 8}
    shape = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16}
    graph = ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **shape, "experts": experts}}})
    sizes = UnitSizes(data_parallel_size=2, pipeline_parallel_size=2, expert_parallel_size=2)
    plan = Plan({"llm": grid_of(graph.unit("llm"), sizes=sizes, first_rank=0)})
    placed = Assignment({"llm": tuple(tuple((Atom(2 * replica + each),) for each in range(2)) for replica in range(2))})
    schedule = build_schedule(BUILDERS["zb-h1"], placed.shape(graph, plan))
    ((timeline,), *_) = ranks.run(_emulate, EmulatedRun(schedule, placed, LateCosts(), num_iterations=1), world_size=4)
    together = defaultdict(list)
    for event in timeline.events:
        if _is_computation(event.action) and event.action.kind in EXCHANGES:
            together[event.action._replace(replica=0)].append(event)
    assert len(together) == 8 and all(len(events) == 2 for events in together.values())
    for events in together.values():
        assert max(event.start_seconds for event in events) <= min(event.end_seconds for event in events)


INSIDE = """\
lane 0: F vision/0/0/0; {F vision/0/0/1{0:3} @0; F vision/0/0/1{3:9} @2} F llm/0/0/0; F vision/0/0/1{9:16}; F llm/0/0/1; \
B llm/0/0/0; {B vision/0/0/0{5:16} @1; B vision/0/0/0{0:5} @1} B llm/0/0/1; B vision/0/0/1; RG llm/0/0; RG vision/0/0
lane 1: F vision/1/0/0; {F vision/1/0/1 @1} F llm/0/0/0; F llm/0/0/1; \
B llm/0/0/0; {B vision/1/0/0 @0} B llm/0/0/1; B vision/1/0/1; RG llm/0/0; RG vision/1/0
"""
"""Encoder replicas of one rank each beside an LLM over both; the two images of each of two samples."""


class InsideCosts(UniformCosts):
    def compute(self, action: Action) -> ComputeCost:
        if action.unit == "llm":
            return ComputeCost(0.02, 0.006, (0.002, 0.002, 0.002))
        return ComputeCost(0.004 if action.covers is None else 0.002)


def test_work_inside_a_computation_runs_in_its_waits(ranks):
    shape = replace(SHAPE, num_layers=2)
    graph = ModelGraph((Unit("vision", Role.ENCODER, shape), Unit("llm", Role.BACKBONE, shape)), (("vision", "llm"),))
    plans = {"vision": build_unit_plan(graph, "vision", dp=2, pp=1), "llm": build_unit_plan(graph, "llm", dp=1, pp=1, tp=2)}
    encoded = tuple(tuple((Atom(sample, replica),) for sample in range(2)) for replica in range(2))
    assignment = Assignment({"vision": encoded, "llm": (((Atom(0),), (Atom(1),)),)})
    schedule = insert_communication(schedule_from_text(INSIDE, assignment.shape(graph, Plan(plans))))
    validate_schedule(schedule, options=RunOptions(transformer_impl="local", sequence_parallel=False))
    run = EmulatedRun(schedule, assignment, InsideCosts(), num_iterations=1)
    ((timeline,), *_) = ranks.run(_emulate, run, world_size=2)
    events = {(event.lane, event.action): event for event in timeline.events}
    expected = {(event.lane, event.action) for event in simulate_schedule(schedule, run.costs).timeline.events}
    assert {key for key in events if _is_computation(key[1])} == {key for key in expected if _is_computation(key[1])}
    inside = InsideSlots.of(schedule)
    for piece, carrier, lane in zip(inside.pieces.tolist(), inside.carriers.tolist(), inside.lanes.tolist(), strict=True):
        own, whole = (events[lane, schedule.work.action(each)] for each in (piece, carrier))
        assert whole.start_seconds < own.start_seconds < own.end_seconds < whole.end_seconds
        assert own.end_seconds - own.start_seconds >= run.costs.compute(own.action).seconds


def _spread(unit: UnitPlan, size: int) -> UnitPlan:
    """All units on the same ranks, `size` to a stage."""
    stages = [stage.layer_ranges for stage in unit.replicas[0].stages]
    moved = (Stage(tuple(range(size * index, size * (index + 1))), ranges) for index, ranges in enumerate(stages))
    return UnitPlan((Replica(tuple(moved)),), context_parallel_size=size)


def _is_computation(action: Action) -> bool:
    return action.kind.resource is Resource.COMPUTE


def _emulate(run: EmulatedRun) -> tuple[Timeline, ...]:
    import torch.distributed as dist

    return emulate_on_rank(run, rank=dist.get_rank())
