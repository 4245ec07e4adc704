"""Where lanes join the computations of replicas whose weights they share."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.schedule.align_replicas import Join, Joins, align_replicas
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import ACTION_TABLE, Action, ActionKind, Resource
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import StepWork
from tests.distributed.schedule_rewrites import CutMicrobatches
from tests.unit.schedule.schedule_cases import all_alike, build_case, build_graph, cases, deal

LLM = build_graph()


def llm_case(*groupings: list[list[int]], pp: int = 1) -> StepShape:
    """Replicas with these microbatches."""
    return build_case(LLM, {"llm": (len(groupings), pp, 1)}, {"llm": list(groupings)})


def lowered(case: StepShape, *, builder: str = "1f1b", passes=(), forward_only: bool = False) -> Schedule:
    return build_schedule(BUILDERS[builder], replace(case, forward_only=forward_only), passes=passes)


def kinds_of(joins: Joins, lane: int) -> list[str]:
    return [join.kind.value for position in sorted(joins[lane]) for join in joins[lane][position]]


def test_replicas_with_as_many_microbatches_join_nothing():
    case = llm_case([[0], [1], [2]], [[3], [4], [5]], pp=2)
    assert align_replicas(lowered(case)) == ({}, {}, {}, {})


def test_a_replica_without_microbatches_joins_everything():
    case = llm_case([[0], [1]], [])
    joins = align_replicas(lowered(case))
    assert joins[0] == {}
    assert kinds_of(joins, 1) == ["F", "B", "F", "B"]
    assert list(joins[1]) == [1], "behind the reduction, which does not wait for anyone"
    assert joins[1][1][0] == Join(ActionKind.FORWARD, "llm", 0, 1)


def test_a_replica_with_fewer_microbatches_joins_the_others_on_the_way():
    """Stage by stage, in the order of the replica with more of them."""
    case = llm_case([[0], [1], [2]], [[3]], pp=2)
    schedule = lowered(case)
    joins = align_replicas(schedule)
    assert [kinds_of(joins, lane) for lane in (0, 1)] == [[], []]
    assert [Counter(kinds_of(joins, lane)) for lane in (2, 3)] == [Counter(F=2, B=2)] * 2
    last = [position == len(schedule.lanes[2].actions) for position in joins[2]]
    assert not all(last), "the first stage joins a forward before its own backward"


def test_forward_only_schedules_join_forwards():
    case = llm_case([[0], [1]], [[2]])
    assert kinds_of(align_replicas(lowered(case, forward_only=True)), 1) == ["F"]


def test_both_halves_of_a_backward_are_joined():
    case = llm_case([[0]], [], pp=2)
    joins = align_replicas(lowered(case, builder="zb-h1"))
    assert [kinds_of(joins, lane) for lane in (2, 3)] == [["F", "I", "W"]] * 2


def test_encoders_without_an_item_on_one_replica():
    case = build_case(
        build_graph("vision"), {"vision": (2, 1, 1), "llm": (1, 1, 1)}, {"vision": [[[0]], []], "llm": [[[0], [1]]]}
    )
    joins = align_replicas(lowered(case))
    assert [kinds_of(joins, lane) for lane in range(3)] == [[], ["F", "B"], []]


@settings(max_examples=60)
@given(
    case=cases().filter(all_alike),
    builder=st.sampled_from(["1f1b", "gpipe", "zb-h1", "eager-1f1b"]),
)
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
                if each.unit != unit or (not is_join and ACTION_TABLE[each.kind].resource is not Resource.COMPUTE):
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


def test_a_lane_that_waits_is_woken_once(monkeypatch: pytest.MonkeyPatch):
    """Not once for each rank of its tensor parallel group, and so more often at every wait."""
    sizes = {"vision": (32, 1, 1), "llm": (2, 4, 4)}
    case = build_case(build_graph("vision"), sizes, {"vision": deal(96, 32), "llm": deal(96, 2)}, colocated=True)
    schedule = lowered(case)
    looked = Counter[Action]()
    needs_of = StepWork.needs_of

    def counted(work: StepWork, action: Action, *, lowered: bool) -> tuple[Action, ...]:
        looked[action] += 1
        return needs_of(work, action, lowered=lowered)

    monkeypatch.setattr(StepWork, "needs_of", counted)
    align_replicas(schedule)
    assert max(looked.values()) <= 20  # 340 if each rank wakes all others
