"""One unit's order of computations per rank, against torch.distributed.pipelining."""

from typing import Any

import pytest

from multimodal.schedule.builders import BUILDERS
from multimodal.values.schedule import Lane
from tests.unit.schedule.schedule_cases import build_case, build_graph, deal

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

SIZES = [(1, 2), (2, 1), (2, 4), (2, 5), (3, 3), (4, 2), (4, 4), (4, 12)]
LONG = [*SIZES, (8, 3), (8, 20)]
"""(stages, microbatches)."""


def build_lanes(builder: str, num_stages: int, num_microbatches: int, **layout: int) -> tuple[Lane, ...]:
    groupings = {"llm": deal(num_microbatches, 1)}
    return BUILDERS[builder](build_case(build_graph(), {"llm": (1, num_stages, 1)}, groupings, layouts={"llm": layout})).lanes


def ours(lane: Lane) -> list[tuple[str, int, int]]:
    return [(action.kind.value, action.stage, action.microbatch) for action in lane.actions if action.microbatch >= 0]


def theirs(actions: list[Any]) -> list[tuple[str, int, int]]:
    """torch uses the same letters; None is an idle slot of its table, and its reduction has no microbatch."""
    return [
        (action.computation_type.value, action.stage_index, action.microbatch_index)
        for action in actions
        if action and action.microbatch_index is not None
    ]


def without_init(kind: type, **state: int) -> Any:
    """A torch schedule with just what its table needs: no stages, no process group."""
    schedule = object.__new__(kind)
    vars(schedule).update(state)
    return schedule


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_gpipe(num_stages: int, num_microbatches: int) -> None:
    table = without_init(
        schedules.ScheduleGPipe, pp_group_size=num_stages, _num_stages=num_stages, _n_microbatches=num_microbatches
    )
    table = table._get_pipeline_order()
    for rank, lane in enumerate(build_lanes("gpipe", num_stages, num_microbatches)):
        assert ours(lane) == theirs(table[rank])


@pytest.mark.parametrize(("num_stages", "num_microbatches"), LONG)
def test_1f1b(num_stages: int, num_microbatches: int) -> None:
    """Against the function below torch 2.13's `Schedule1F1B`, whose own table is off by one on the last rank."""
    for rank, lane in enumerate(build_lanes("1f1b", num_stages, num_microbatches)):
        num_warmup = min(num_stages - rank - 1, num_microbatches)
        counts = num_warmup, num_microbatches - num_warmup, num_warmup
        table = schedules._get_1f1b_rank_ops(1, num_stages, *counts, rank, *[lambda _, stage=rank: stage] * 2)
        assert ours(lane) == theirs(table)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 2), (2, 1), (2, 3), (2, 6)])
def test_interleaved_1f1b(num_stages: int, num_microbatches: int, chunks: int) -> None:
    check_interleaved(num_stages, num_microbatches, chunks)


@pytest.mark.parametrize("num_microbatches", [2, 4, 5, 8, 10, 12])
def test_interleaved_1f1b_of_four_stages(num_microbatches: int) -> None:
    check_interleaved(4, num_microbatches, 2)


def check_interleaved(num_stages: int, num_microbatches: int, chunks: int) -> None:
    table = without_init(
        schedules.ScheduleInterleaved1F1B,
        pp_group_size=num_stages,
        n_local_stages=chunks,
        _n_microbatches=num_microbatches,
        microbatches_per_round=num_microbatches // max(1, num_microbatches // num_stages),
    )
    for rank, lane in enumerate(build_lanes("interleaved-1f1b", num_stages, num_microbatches, chunks=chunks)):
        assert ours(lane) == theirs(table._calculate_single_rank_operations(rank))


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_zb_v(num_stages: int, num_microbatches: int) -> None:
    table = without_init(
        schedules.ScheduleZBVZeroBubble, pp_group_size=num_stages, num_stages=2 * num_stages, _n_microbatches=num_microbatches
    )
    for rank, lane in enumerate(build_lanes("zb-v", num_stages, num_microbatches, v_shaped=True)):
        assert ours(lane) == theirs(table._calculate_single_rank_operations(rank))
