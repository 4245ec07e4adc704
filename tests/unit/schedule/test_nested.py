"""Encoders and generators in pauses of the LLM's pipeline: what a step takes, and how many microbatches are alive."""

import numpy as np
import pytest

from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.execute_lanes import execute_unit
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph, Role, Unit
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from tests.unit.schedule.schedule_cases import SHAPE, build_case, build_graph, build_unit_plan, deal
from tests.unit.schedule.uniform_costs import GivenCosts, RandomCosts


def copies(num_stages: int, num_microbatches: int, **layout: int) -> StepShape:
    """An encoder in every stage of the LLM; each computes its part of the microbatches."""
    sizes = {"vision": (num_stages, 1, 1), "llm": (1, num_stages, 1)}
    groupings = {"vision": deal(num_microbatches, num_stages), "llm": deal(num_microbatches, 1)}
    return build_case(build_graph("vision"), sizes, groupings, colocated=True, layouts={"llm": layout})


def costs_of(**forward_seconds: float) -> GivenCosts:
    """Seconds of each unit's forwards; backwards take 2.5 times as long."""

    def seconds(action: Action) -> float:
        return forward_seconds[action.unit] * (1.0 if action.kind is ActionKind.FORWARD else 2.5)

    return GivenCosts(seconds=seconds)


def nested(step: StepShape, costs: GivenCosts | RandomCosts) -> Schedule:
    return build_schedule(BUILDERS["nested"].with_costs(costs), step)


def most_alive(schedule: Schedule, unit: str) -> int:
    """The most microbatches of a unit that any of its stages has between forward and backward."""
    most = 0
    alive: dict[tuple[int, int], int] = {}
    for lane in schedule.lanes:
        for action in (action for action in lane.actions if action.unit == unit):
            change = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}.get(action.kind, 0)
            alive[action.replica, action.stage] = alive.get((action.replica, action.stage), 0) + change
            most = max(most, *alive.values())
    return most


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("rounds", [3, 9])
@pytest.mark.parametrize("encoder_seconds", [0.25, 1.0, 3.0])
def test_a_step_takes_the_llms_time_and_the_encoders_and_keeps_two_of_their_microbatches(
    num_stages: int, rounds: int, encoder_seconds: float
) -> None:
    step, costs = copies(num_stages, rounds * num_stages), costs_of(llm=1.0, vision=encoder_seconds)
    schedule = nested(step, costs)
    pipeline = 3.5 * (rounds * num_stages + num_stages - 1)
    found = simulate_schedule(schedule, costs).iteration_seconds
    assert found == pytest.approx(pipeline + 3.5 * encoder_seconds * rounds, abs=1e-6)
    assert most_alive(schedule, "vision") == 2
    dip = build_schedule(BUILDERS["dip"], step)
    assert found == pytest.approx(simulate_schedule(dip, costs).iteration_seconds, abs=1e-6)
    assert most_alive(dip, "vision") == rounds
    assert most_alive(schedule, "llm") == num_stages


@pytest.mark.parametrize("rounds", [3, 9])
def test_an_interleaved_llm_keeps_its_order(rounds: int) -> None:
    step, costs = copies(2, 2 * rounds, chunks=2), costs_of(llm=0.5, vision=1.0)
    alone = build_case(build_graph(), {"llm": (1, 2, 1)}, {"llm": deal(2 * rounds, 1)}, layouts={"llm": {"chunks": 2}})
    pipeline = simulate_schedule(build_schedule(BUILDERS["interleaved-1f1b"], alone), costs).iteration_seconds
    schedule = nested(step, costs)
    assert simulate_schedule(schedule, costs).iteration_seconds == pytest.approx(pipeline + 3.5 * rounds, abs=1e-6)
    assert most_alive(schedule, "vision") <= 3


@pytest.mark.parametrize("rounds", [3, 9])
def test_stages_of_an_encoder_have_a_pause_between_them(rounds: int) -> None:
    """An encoder over both lanes: the last stage keeps as many as the LLM has in flight, and one; the first, two more."""
    sizes = {"vision": (1, 2, 1), "llm": (1, 2, 1)}
    groupings = {unit: deal(2 * rounds, 1) for unit in sizes}
    step, costs = build_case(build_graph("vision"), sizes, groupings, colocated=True), costs_of(llm=1.0, vision=0.5)
    schedule = nested(step, costs)
    assert most_alive(schedule, "vision") == 5
    work = 3.5 * (2 * rounds + 1) + 3.5 * 0.5 * 2 * rounds
    found = simulate_schedule(schedule, costs).iteration_seconds
    assert found == pytest.approx(work, abs=1e-6)


def with_generator(num_microbatches: int) -> StepShape:
    """An encoder and a generator in both stages of the LLM."""
    generator = Unit("image", Role.GENERATOR, SHAPE)
    vision, llm = build_graph("vision").units
    graph = ModelGraph((vision, llm, generator), (("vision", "llm"), ("llm", "image")))
    sizes = {"vision": (2, 1), "llm": (1, 2), "image": (2, 1)}
    plan = Plan({name: build_unit_plan(graph, name, dp=dp, pp=pp) for name, (dp, pp) in sizes.items()})
    placed = {
        name: tuple(
            tuple((Atom(sample, 0 if name == "vision" else -1),) for (sample,) in replica)
            for replica in deal(num_microbatches, dp)
        )
        for name, (dp, _) in sizes.items()
    }
    return Assignment(placed).shape(graph, plan)


@pytest.mark.parametrize("num_microbatches", [6, 18])
def test_a_generator_makes_and_forgets_in_one_pause(num_microbatches: int) -> None:
    step, costs = with_generator(num_microbatches), costs_of(llm=1.0, vision=0.5, image=0.75)
    schedule = nested(step, costs)
    assert most_alive(schedule, "image") == 1 and most_alive(schedule, "vision") <= 3
    busy = 3.5 * (num_microbatches + 1.25 * num_microbatches / 2)
    assert simulate_schedule(schedule, costs).iteration_seconds == pytest.approx(busy + 3.5, abs=1e-6)


def test_a_unit_runs_as_if_the_others_took_no_time() -> None:
    step = copies(2, 4)
    schedule = BUILDERS["1f1b"](step)
    start, end = execute_unit(schedule, "llm", seconds=np.ones(schedule.work.num_computed))
    llm = schedule.work.pieces.units["llm"]
    assert start[llm.forward].tolist() == [[0.0, 1.0, 4.0, 6.0], [1.0, 3.0, 5.0, 7.0]]
    assert end[llm.backward].tolist() == [[4.0, 6.0, 8.0, 10.0], [3.0, 5.0, 7.0, 9.0]]
    assert not start[schedule.work.pieces.units["vision"].backward].any()
