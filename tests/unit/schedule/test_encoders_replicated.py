from dataclasses import replace
from pathlib import Path

import pytest

from multimodal.cost.cost_table import CostTable
from multimodal.cost.table_costs import TableCosts
from multimodal.cost.table_model import replicate_encoders
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders.encoders_replicated import build_encoders_replicated, replicate_microbatches
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b
from multimodal.schedule.simulate import Simulation, simulate_schedule
from multimodal.schedule.text import schedule_from_text, schedule_to_text
from multimodal.schedule.validate import validate_schedule
from multimodal.values.action import ActionKind, action_to_text
from multimodal.values.errors import ScheduleError
from multimodal.values.schedule import Schedule
from tests.unit.schedule.schedule_cases import PlacedCase, build_graph, deal, placed_case, placed_golden_cases, shape_for
from tests.unit.schedule.uniform_costs import UniformCosts

NAME = "encoders-replicated"
EXAMPLES = Path(__file__).parents[3] / "examples"


def copies_case(num_stages: int, *, num_samples: int = 6, dp: int = 1, **graph: list[str]) -> PlacedCase:
    """One vision encoder beside every stage of `dp` LLM replicas; its microbatches are dealt over all copies."""
    groupings = {"vision": deal(num_samples, dp * num_stages), "llm": deal(num_samples, dp)}
    sizes = {"vision": (dp * num_stages, 1, 1), "llm": (dp, num_stages, 1)}
    return PlacedCase(*replicate_microbatches(*placed_case(build_graph("vision", **graph), sizes, groupings, colocated=True)))


def simulate(table: dict[str, object]) -> Simulation:
    fused, model = replicate_encoders(CostTable.from_dict(table))
    schedule = build_schedule(build_encoders_replicated, shape_for(NAME, PlacedCase(*model)))
    return simulate_schedule(schedule, TableCosts(fused))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2])
def test_every_stage_computes_every_encoder_microbatch_that_its_replica_takes(num_stages: int, dp: int) -> None:
    case = copies_case(num_stages, num_samples=8, dp=dp)
    taken = [{atom.sample_id for microbatch in replica for atom in microbatch} for replica in case.assignment.units["llm"]]
    for lane, actions in enumerate(lane.actions for lane in build_encoders_replicated(case.shape).lanes):
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            places = [action.place for action in actions if action.unit == "vision" and action.kind is kind]
            samples = [case.assignment.units["vision"][place.replica][place.microbatch][0].sample_id for place in places]
            assert len(set(samples)) == len(samples)
            assert set(samples) >= taken[lane // num_stages]


def test_a_copy_works_right_beside_its_stage() -> None:
    """Replica 1 has two microbatches of its own; 2 and 3 are those of replica 0."""
    (lane,) = build_encoders_replicated(copies_case(2, num_samples=4).shape).lanes[1:]
    shown = [action_to_text(action) for action in lane.actions]
    for microbatch, copy in ((0, "vision/1/0/2"), (2, "vision/1/0/3")):
        assert shown.index(f"F {copy}") + 1 == shown.index(f"F llm/0/1/{microbatch}")
        assert shown.index(f"B llm/0/1/{microbatch}") + 1 == shown.index(f"B {copy}")
    assert shown.index("RG vision/1/0") > max(map(shown.index, (f"B vision/1/0/{number}" for number in range(4))))


@pytest.mark.parametrize(
    ("graph", "has_backward"),
    [
        ({"frozen": ["vision"], "frozen_projectors": ["vision"]}, False),
        ({"frozen": ["vision", "llm"]}, True),
        ({"frozen": ["llm"]}, True),
    ],
)
def test_what_is_frozen_is_not_repeated_backward(graph: dict[str, list[str]], has_backward: bool) -> None:
    built = build_encoders_replicated(copies_case(2, **graph).shape)
    assert num_encoded(built, ActionKind.FORWARD) == 2 * 6
    assert num_encoded(built, ActionKind.BACKWARD) == (2 * 6 if has_backward else 0)


def num_encoded(schedule: Schedule, kind: ActionKind) -> int:
    return sum(action.kind is kind and action.unit == "vision" for lane in schedule.lanes for action in lane.actions)


def test_evaluation_repeats_forwards_alone() -> None:
    case = copies_case(2)
    schedule = build_encoders_replicated(replace(case.shape, forward_only=True))
    validate_schedule(schedule)
    assert {action.kind for lane in schedule.lanes for action in lane.actions} == {ActionKind.FORWARD}
    assert num_encoded(schedule, ActionKind.FORWARD) == 2 * 6


def test_the_validator_misses_repeated_work() -> None:
    step = shape_for(NAME, placed_golden_cases()["encoder_copies"])
    text = schedule_to_text(build_encoders_replicated(step))
    broken = text.replace("F vision/1/0/2; ", "")
    assert broken != text
    with pytest.raises(ScheduleError, match="^F vision/1/0/2: missing"):
        validate_schedule(schedule_from_text(broken, step))


@pytest.mark.parametrize(
    ("sizes", "colocated"),
    [
        ({"vision": (2, 1, 1), "llm": (1, 2, 1)}, False),
        ({"vision": (1, 2, 1), "llm": (1, 2, 1)}, True),
        ({"vision": (1, 1, 1), "llm": (1, 2, 1)}, True),
        ({"vision": (2, 1, 1), "llm": (1, 1, 2)}, True),
    ],
)
def test_other_layouts_are_refused(sizes: dict[str, tuple[int, int, int]], colocated: bool) -> None:
    groupings = {"vision": deal(4, sizes["vision"][0]), "llm": deal(4, 1)}
    with pytest.raises(ScheduleError, match="^encoders-replicated needs a whole copy of 'vision' beside every stage of 'llm'"):
        shape_for(NAME, placed_case(build_graph("vision"), sizes, groupings, colocated=colocated))


def test_without_encoders_it_is_1f1b() -> None:
    case = placed_case(build_graph(), {"llm": (1, 2, 1)}, {"llm": deal(4, 1)})
    assert build_encoders_replicated(shape_for(NAME, case)) == build_one_f_one_b(case.shape)
    table = CostTable.from_dict({"num_microbatches": 1, "units": {"llm": {"stages": [{"forward": 1.0}]}}})
    assert replicate_encoders(table)[0] == table


def test_a_table_takes_the_time_of_a_pipeline_whose_stages_hold_all_encoders() -> None:
    """1F1B of everything in every lane; on the way in and out the LLM alone counts, as copies start at once and end beside."""
    stages, num_microbatches, num_stages = [{"forward": 0.3, "backward": 0.6}] * 2, 6, 3
    llm = [{"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 1.0}] * num_stages
    units = {
        "vision": {"upstream": [], "stages": stages},
        "audio": {"upstream": [], "stages": stages[:1]},
        "llm": {"upstream": ["vision", "audio"], "stages": llm},
    }
    found = simulate({"num_microbatches": num_microbatches, "units": units})
    forward, backward = 3 * 0.3 + 1.0, 3 * 0.6 + 2.0
    assert found.num_lanes == num_stages
    assert found.busy_seconds == pytest.approx([num_microbatches * (forward + backward)] * num_stages)
    fill_and_drain = (num_stages - 1) * (1.0 + 2.0)
    assert found.iteration_seconds == pytest.approx(num_microbatches * (forward + backward) + fill_and_drain)
    encoded = {(name, copy, 0, k) for name in ("vision", "audio") for copy in range(3) for k in range(6)}
    assert found.stage_seconds.keys() == encoded | {("llm", 0, stage, k) for stage in range(3) for k in range(6)}


def test_a_copy_in_a_table_takes_what_all_stages_of_its_encoder_take() -> None:
    fused, model = replicate_encoders(CostTable.from_file(EXAMPLES / "costs" / "cornstarch-vlm-m.yaml"))
    assert [unit.data_parallel_size for unit in model[0].plan.units.values()] == [4, 1]
    (stage,) = fused.units["vision"].stages
    assert (stage.forward[0], stage.input_gradient[0] + stage.weight_gradient[0]) == pytest.approx((2 * 0.07504, 0.00027))


def test_copies_keep_activations_until_their_backward() -> None:
    schedule = build_schedule(build_encoders_replicated, copies_case(2, num_samples=4).shape)
    found = simulate_schedule(schedule, UniformCosts())
    # Lane 0 has two microbatches of the LLM and of the encoder in flight; lane 1 one of each, and two encoded ahead for lane 0.
    assert found.peak_activation_bytes == (4 * 10, 4 * 10)


def test_llm_replicas_that_share_encoder_microbatches_repeat_each_others() -> None:
    """Two LLM replicas that take the same encoder microbatches repeat them each."""
    groupings = {"vision": [[[0, 1]], [[2, 3]]], "llm": [[[0], [2]], [[1], [3]]]}
    case = placed_case(build_graph("vision"), {"vision": (2, 1, 1), "llm": (2, 1, 1)}, groupings, colocated=True)
    shape, placed = replicate_microbatches(*case)
    lanes = build_encoders_replicated(shape).lanes
    first, second = case.assignment.units["vision"][0][0], case.assignment.units["vision"][1][0]
    assert placed.units["vision"] == ((first, second), (second, first))
    assert placed.num_own_microbatches("vision", 0) == 1
    repeated = [[each for each in lane.actions if (each.unit, each.microbatch) == ("vision", 1)] for lane in lanes]
    assert [list(map(action_to_text, actions)) for actions in repeated] == [
        ["F vision/0/0/1", "B vision/0/0/1"],
        ["F vision/1/0/1", "B vision/1/0/1"],
    ]
