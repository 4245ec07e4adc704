import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.kernels import kernels
from multimodal.schedule.builders import BUILDERS
from multimodal.values.action import Resource
from multimodal.values.arrays.placed_atoms import PlacedAtoms
from multimodal.values.arrays.rows import group_rows_reference
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.parts.cuts import Cuts, StageSplit
from multimodal.values.schedule import Schedule, read_cuts
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import RESOURCE_NUMBERS, step_work
from tests.unit.schedule.built_schedules import cut_schedules, rewritten_schedules
from tests.unit.schedule.schedule_cases import PlacedCase, golden_cases, placed_cases, placed_golden_cases, reduced_together
from tests.unit.values.work.dependencies import dependencies


def rows(starts: np.ndarray, values: np.ndarray) -> list[list[int]]:
    return [values[first:last].tolist() for first, last in pairwise(starts)]


@settings(max_examples=120)
@given(built=rewritten_schedules())
def test_the_numbers_say_what_dependencies_say_for_every_builder_and_pass(built: tuple[StepShape, Schedule]) -> None:
    check_numbers(built[1])


@settings(max_examples=120)
@given(built=cut_schedules())
def test_the_numbers_say_what_dependencies_say_of_ranges_of_segments(built: tuple[StepShape, Schedule]) -> None:
    check_numbers(built[1])


def check_numbers(schedule: Schedule) -> None:
    step, work = schedule.shape, schedule.work
    assert step.cuts == read_cuts((action for lane in schedule.lanes for action in lane.actions), schedule.shape)
    for lowered in (False, True):
        actions = work.actions if lowered else work.computed
        assert [[work.actions[need] for need in row] for row in rows(*work.needs_in(lowered=lowered))] == [
            list(dependencies(action, step, lowered=lowered)) for action in actions
        ]
        assert [work.numbers(lowered=lowered)[action] for action in actions] == list(range(len(actions)))
    entries = [entry for lane in range(schedule.num_lanes) for entry in schedule.entries(lane)]
    for action, taken in ((entry.action, entry.takes) for entry in entries if entry.action.kind.resource is Resource.COMPUTE):
        needs = [need.place for need in dependencies(action, step, lowered=False) if need[1:4] != action[1:4]]
        assert [key.source for key in taken] == needs and {key.target for key in taken} <= {action.place}
    assert {key for entry in entries for key in entry.takes} == {key for entry in entries for key in entry.gives}
    assert [work.stages[stage] for stage in work.stage_numbers] == [action[1:4] for action in work.actions]
    lanes = rows(*work.lanes_of(np.arange(len(work.actions))))
    assert lanes == [list(step.plan.lanes_of_stage(*action[1:4])) for action in work.actions]
    assert work.resources.tolist() == [RESOURCE_NUMBERS[action.kind.resource] for action in work.actions]
    collective_of, *members = work.collective_rows
    for number, (action, collective) in enumerate(zip(work.actions, collective_of.tolist(), strict=True)):
        is_collective = action.kind.resource is Resource.COLLECTIVE
        assert is_collective == (collective >= 0)
        if is_collective:
            together = [work.actions[member] for member in rows(*members)[collective]]
            assert action in together and number in rows(*members)[collective]
            assert sorted(together) == sorted(reduced_together(action, step))


def test_work_is_numbered_once_for_equal_shapes() -> None:
    shape, same = (golden_cases()["crossed_groupings"] for _ in range(2))
    assert shape is not same and shape == same and hash(shape) == hash(same)
    schedule = BUILDERS["zb-h1"](shape)
    assert schedule.work is not step_work(shape)
    assert step_work(same.with_cuts(schedule.shape.cuts)) is schedule.work


def test_shapes_differ_by_counts_routes_cuts_and_direction_and_not_by_samples() -> None:
    shape, assignment = placed_golden_cases()["crossed_groupings"]
    graph, plan = shape.graph, shape.plan
    renamed = Assignment(
        {
            unit: tuple(
                tuple(tuple(atom._replace(sample_id=atom.sample_id + 9) for atom in group) for group in replica)
                for replica in replicas
            )
            for unit, replicas in assignment.units.items()
        }
    )
    assert renamed.shape(graph, plan) == shape
    swapped = {**assignment.units, "llm": tuple(replica[::-1] for replica in assignment.units["llm"])}
    split = Cuts(split=StageSplit({("llm", 0, 0): 4}))
    others = [
        shape.with_cuts(split),
        assignment.shape(graph, plan, forward_only=True),
        Assignment(swapped).shape(graph, plan),
        golden_cases()["encoder_dp2_llm_pp2"],
    ]
    assert shape not in others and shape.with_cuts(Cuts()) is shape
    assert shape.with_cuts(split) == shape.with_cuts(Cuts(split=frozenset(split.split)))


def unequal() -> StepShape:
    """One encoder with items of samples 0 1 | 2 3 | 4 before two LLM replicas with samples 0 | 1 | 2 and 3 4."""
    return golden_cases()["encoder_dp1_llm_dp2_unequal"]


@given(step=placed_cases())
def test_an_assignment_of_arrays_is_the_one_of_objects(step: PlacedCase) -> None:
    given_objects = step.assignment
    arrays = Assignment({unit: PlacedAtoms.of_replicas(each) for unit, each in given_objects.units.items()})
    for other in (arrays, pickle.loads(pickle.dumps(arrays)), Assignment(dict(arrays.units))):
        assert other == given_objects and dict(other.units) == dict(given_objects.units)
        for place in step.shape.microbatches:
            assert other.atoms(place) == given_objects.units[place.unit][place.replica][place.microbatch]
            assert other.num_microbatches(*place[:2]) == len(given_objects.units[place.unit][place.replica])


def test_samples_are_kept_where_they_are() -> None:
    placed = placed_golden_cases()["crossed_groupings"].assignment.placed["llm"]
    kept = placed.with_samples(placed.sample_ids[:1])
    atoms = [atom for replica in kept.replicas for microbatch in replica for atom in microbatch]
    assert atoms == [Atom(int(placed.sample_ids[0]))] and kept.num_replicas == placed.num_replicas
    assert kept != placed and placed.with_samples(np.unique(placed.sample_ids)) == placed


OWNERS = st.lists(st.integers(0, 5), max_size=20)


@given(owners=OWNERS)
@pytest.mark.skipif(kernels is None, reason="the kernels are not built")
def test_grouping_in_cpp_equals_its_reference(owners: list[int]) -> None:
    column, values = np.array(owners, np.int64), np.arange(len(owners))[::-1].copy()
    found, wanted = (group(column, values, 6) for group in (kernels.group_rows, group_rows_reference))
    assert [each.tolist() for each in found] == [each.tolist() for each in wanted]


@pytest.mark.skipif(kernels is None, reason="the kernels are not built")
def test_an_owner_that_is_no_row_is_refused() -> None:
    with pytest.raises(IndexError, match="no row"):
        kernels.group_rows(np.array([3]), np.array([0]), 3)
