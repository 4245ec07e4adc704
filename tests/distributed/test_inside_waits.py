"""Encoders inside the LLM's waits for tensor parallel collectives: loss and gradients of one process, wherever they run."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, assume, given, settings

from megatron.runtime.execution.lane_run import LaneRun
from multimodal.cost.layers.layer import Exchange
from multimodal.cost.pieces.tensor_parallel_waits import LayerNeed, computation_waits
from multimodal.cost.run_options import RunOptions
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import ActionKind, Resource
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.plan import Plan, UnitPlan
from multimodal.values.schedule import Schedule, SlotMode
from multimodal.values.timeline import TimelineEvent
from tests.distributed.dealt_case import UNITS, dealt_case, unit_plan
from tests.distributed.gradient_case import GradientCase, build_session, plan_case, run_on_rank
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.schedule_rewrites import Rewritten, RunInsideWaits
from tests.distributed.segment_ranges import RangeCase, collectives_waited_for
from tests.distributed.strategies.cases import inside_cases

SHAPE = {"num_attention_heads": 4, "ffn_hidden_size": 16}


def rewritten_once(case: GradientCase) -> GradientCase:
    """The same with what its passes make of its schedule."""
    schedule = BUILDERS[case.builder](case.assignment.shape(case.graph, case.plan))
    for rewrite in case.passes:
        schedule = rewrite(schedule)
    return replace(case, passes=(Rewritten(tuple(schedule.lanes)),))


def schedule_of(case: GradientCase) -> Schedule:
    """The schedule in the compute dialect."""
    return ScheduleCache(case.graph, case.plan, BUILDERS[case.builder], case.passes, False).schedule(case.assignment)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(case=inside_cases())
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, case: GradientCase) -> None:
    case = rewritten_once(case)
    assume(schedule_of(case).has_inside)
    assert_matches(case, ranks)


def build_case(
    tensor_parallel_size: int, vision: UnitPlan, *, seed: int = 3, described: Mapping[str, Any] | None = None, **options: Any
) -> GradientCase:
    """Six images of other sizes before an LLM over four ranks; whatever may run inside does; described: more of the LLM."""
    units = {
        "vision": {**UNITS["vision"], **SHAPE, "add_bias_linear": True},
        "llm": {**UNITS["llm"], **SHAPE, **(described or {})},
    }
    plan = Plan({"vision": vision, "llm": unit_plan(0, tp=tensor_parallel_size, pp=4 // tensor_parallel_size)})
    shapes = [SampleShape((("vision", size, 2),), 3 + size, 2) for size in (1, 2, 3, 1, 2, 1)]
    run_options = RunOptions(
        transformer_impl=options.get("transformer_impl", "local"),
        sequence_parallel=options.get("sequence_parallel", False),
        recompute=options.get("recompute"),
    )
    inside = RunInsideWaits(seed, run_options)
    return rewritten_once(dealt_case(units, plan, shapes=shapes, groups=None, passes=(inside,), **options))


PAIRS = unit_plan(0, dp=2, tp=2)
"""An encoder pipeline on each stage's ranks of the LLM, tensor parallel over both.

test_planted_errors.py holds its case against one process.
"""
QUARTET = unit_plan(0, tp=4)


@pytest.fixture(scope="module")
def case() -> GradientCase:
    found = build_case(2, PAIRS)
    modes = schedule_of(found).modes
    assert (modes == SlotMode.INSIDE).sum() > 20, "the case has too little inside to show anything"
    return found


def events_of(case: GradientCase) -> tuple[TimelineEvent, ...]:
    session, step = build_session(case), plan_case(case)
    return session.executor.execute(step).events


def test_work_inside_has_events_within_those_of_its_carrier(ranks: RankPool, case: GradientCase) -> None:
    schedule = schedule_of(case)
    for rank, events in enumerate(ranks.run(events_of, case, world_size=4)):
        spans = {event.action: event for event in events}
        carried: list[TimelineEvent] = []
        for slot in schedule.lane(schedule.shape.plan.lane_of_rank[rank]).slots:
            if slot.mode is SlotMode.INSIDE:
                carried.append(spans[slot.action])
            elif slot.action.kind.resource is Resource.COMPUTE:
                carrier = spans[slot.action]
                assert all(carrier.start_seconds <= each.start_seconds for each in carried)
                assert all(each.end_seconds <= carrier.end_seconds for each in carried)
                carried.clear()


def count_held_back(case: GradientCase) -> int:
    """The collectives of work in waits that started when these were over."""
    counts: list[int] = []
    end_wait = LaneRun.end_wait

    def ended(run: LaneRun) -> None:
        counts.append(len(run.held_back))
        end_wait(run)

    with patch.object(LaneRun, "end_wait", ended):
        run_on_rank(case)
    return sum(counts)


def test_collectives_of_work_in_a_wait_start_when_it_is_over(ranks: RankPool, case: GradientCase) -> None:
    schedule = schedule_of(case)
    for rank, count in enumerate(ranks.run(count_held_back, case, world_size=4)):
        lane = schedule.lane(schedule.shape.plan.lane_of_rank[rank])
        assert 0 < count == sum(slot.mode is SlotMode.INSIDE for slot in lane.slots)


def run_forgetful(case: GradientCase) -> str:
    """The message of a carrier whose waits are not filled."""
    with patch.object(LaneRun, "fill_wait", lambda run, number: None):
        try:
            run_on_rank(case)
        except Exception as problem:
            return str(problem)
    return ""


def test_work_that_did_not_run_inside_ends_the_step_on_every_rank(ranks: RankPool) -> None:
    messages = ranks.run(run_forgetful, build_case(4, QUARTET), world_size=4)
    assert all("was to run in wait" in message for message in messages)


GATED = {"activation": "swiglu", "normalization": "RMSNorm", "num_query_groups": 2}
NAMES = {Exchange.GATHER: "gathering", Exchange.GATHER_AGAIN: "gathering", Exchange.SUM: "summing"}
WAITS = [
    RangeCase(unit, sequence_parallel=sequence_parallel, recompute=recompute, num_frozen=num_frozen, transformer=GATED)
    for unit, sequence_parallel, recompute, num_frozen in product(
        ("vision", "llm", "painter"), (False, True), (None, "full"), (0, 3)
    )
]


def waits_of_all() -> list[Any]:
    return [collectives_waited_for(case) for case in WAITS]


def layers_of(case: RangeCase) -> list[LayerNeed]:
    kinds = ("patch_embedding", "transformer", "transformer", "projector")
    if case.unit == "llm":
        kinds = ("token_embedding", "transformer", "transformer", "head")
    if case.unit == "painter":
        kinds = ("generator_projector", "modulated_transformer", "modulated_transformer", "generator_head")
    idle = BackwardNeed.NONE if case.unit == "vision" else BackwardNeed.INPUT_GRADIENT
    return [(kind, idle if index < case.num_frozen else BackwardNeed.FULL) for index, kind in enumerate(kinds)]


def test_layers_come_to_the_waits_that_costs_count(ranks: RankPool) -> None:
    for case, (forward, backward) in zip(WAITS, ranks.run(waits_of_all, world_size=2)[0], strict=True):
        options = RunOptions(transformer_impl="local", sequence_parallel=case.sequence_parallel, recompute=case.recompute)
        for kind, found in ((ActionKind.FORWARD, forward), (ActionKind.BACKWARD, backward)):
            counted = [NAMES[wait.exchange] for wait in computation_waits(kind, layers_of(case), options=options)]
            assert found == [f"{number} {name}" for number, name in enumerate(counted)], (case, kind)
