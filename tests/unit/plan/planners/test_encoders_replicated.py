"""The step that the baseline is predicted by: LLM stages that all run the encoders."""

import pytest

from multimodal.plan.planners.encoders_replicated import RepeatedStep
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Action, ActionKind
from multimodal.values.schedule import Schedule
from tests.unit.schedule.schedule_cases import build_graph, deal, placed_case
from tests.unit.schedule.uniform_costs import GivenCosts

NUM_SAMPLES = 6


def repeated_step(num_stages: int, *, dp: int = 1, encoders: tuple[str, ...] = ("vision",), **graph: list[str]) -> RepeatedStep:
    """Encoders beside every stage of `dp` LLM replicas; their microbatches are dealt over all copies."""
    groupings = dict.fromkeys(encoders, deal(NUM_SAMPLES, dp * num_stages)) | {"llm": deal(NUM_SAMPLES, dp)}
    sizes = dict.fromkeys(encoders, (dp * num_stages, 1, 1)) | {"llm": (dp, num_stages, 1)}
    return RepeatedStep(*placed_case(build_graph(*encoders, **graph), sizes, groupings, colocated=True))


def built(step: RepeatedStep) -> Schedule:
    return build_schedule(step.build, step.assignment.shape(step.original.graph, step.original.plan))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2])
def test_every_stage_computes_every_encoder_microbatch_that_its_replica_takes(num_stages: int, dp: int) -> None:
    step = repeated_step(num_stages, dp=dp)
    placed = step.assignment
    taken = [{atom.sample_id for microbatch in replica for atom in microbatch} for replica in placed.units["llm"]]
    for lane, actions in enumerate(lane.actions for lane in built(step).lanes):
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            places = [action.place for action in actions if action.unit == "vision" and action.kind is kind]
            samples = [placed.units["vision"][place.replica][place.microbatch][0].sample_id for place in places]
            assert len(set(samples)) == len(samples)
            assert set(samples) >= taken[lane // num_stages]


def test_it_takes_the_time_of_a_pipeline_whose_stages_hold_all_encoders() -> None:
    """On the way in and out the LLM alone counts, as copies start at once and end beside.

    The last stage takes longest, so that the first one, to which others send what they encode, is not late.
    """
    num_stages, encoders = 3, ("vision", "audio")

    def seconds(action: Action) -> float:
        length = 0.5 if action.unit in encoders else 4.0 if action.stage == num_stages - 1 else 1.0
        return {ActionKind.FORWARD: length, ActionKind.BACKWARD: 2 * length}.get(action.kind, 0.0)

    found = simulate_schedule(built(repeated_step(num_stages, encoders=encoders)), GivenCosts(seconds=seconds))
    of_encoders = len(encoders) * 1.5
    assert found.busy_seconds == pytest.approx([NUM_SAMPLES * (of_encoders + own) for own in (3.0, 3.0, 12.0)])
    longest = NUM_SAMPLES * (of_encoders + 12.0)
    assert longest < found.iteration_seconds <= longest + 2 * (num_stages - 1) * (of_encoders + 3.0)
