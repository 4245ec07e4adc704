"""Gradients reduced while the last backward runs: as exact as afterwards, and really begun before that backward ends."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from megatron.runtime.gradients.scheduled_collectives import ReductionByLayer
from multimodal.schedule.passes.reduce_by_layer import reduce_by_layer
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.schedule import Lane, Schedule, lane_of
from tests.distributed.gradient_case import GradientCase, build_session, plan_case, run_step
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool

SHAPE = {"num_attention_heads": 2, "ffn_hidden_size": 16, "init_method_std": 0.3}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {
                "role": "encoder",
                "image": {"patch_size": 2, "in_channels": 1, "merge_size": 1},
                "num_layers": 2,
                "hidden_size": 16,
                **SHAPE,
            },
            "llm": {"role": "backbone", "num_layers": 6, "hidden_size": 16, **SHAPE},
        }
    }
)
SAMPLES = (
    SampleShape((("vision", 1, 2),), 5, 3),
    SampleShape((("vision", 2, 2),), 4, 1),
    SampleShape((("vision", 1, 1), ("vision", 2, 1)), 6, 2),
    SampleShape((), 3, 2),
    SampleShape((("vision", 1, 2),), 4, 0),
    SampleShape((), 5, 2),
)
RANGES = {2: ([(0, 4)], [(4, 8)]), 4: ([(0, 2), (4, 6)], [(2, 4), (6, 8)])}
"""Virtual stages of the LLM -> the layer ranges of its physical ones."""


def build_case(builder: str, *, num_stages: int, **options: Any) -> GradientCase:
    """An encoder of one replica, an LLM of three: one has 3 microbatches, one 2, one none, though all reduce together."""
    ranges = RANGES[num_stages]
    replicas = [
        Replica(tuple(Stage((2 * replica + stage,), tuple(each)) for stage, each in enumerate(ranges))) for replica in range(3)
    ]
    plan = Plan({"vision": UnitPlan((Replica((Stage((6,), ((0, 4),)),)),)), "llm": UnitPlan(tuple(replicas))})
    source = RandomSource(GRAPH, SAMPLES, 12)
    items = [[[sample, item] for item in range(len(SAMPLES[sample].items))] for sample in range(len(SAMPLES))]
    assignment = {
        "vision": [[items[0] + items[1], items[2], items[4]]],
        "llm": [[[[0, -1], [1, -1]], [[3, -1]], [[4, -1]]], [[[2, -1]], [[5, -1]]], []],
    }
    case = GradientCase(GRAPH, plan, Assignment.from_dict(assignment), source, builder=builder, passes=(reduce_by_layer,))
    return replace(case, **options)


@pytest.mark.parametrize(("builder", "num_stages"), [("1f1b", 2), ("breadth-first", 4)])
def test_it_is_exact(ranks: RankPool, builder: str, num_stages: int) -> None:
    """The master test has it with all else."""
    assert_matches(build_case(builder, num_stages=num_stages), ranks)


def run_counting(case: GradientCase) -> list[tuple[int, int]]:
    """Per reduction of a step that is cut the buckets that were started before its last part, and all."""
    counts = []
    complete = ReductionByLayer.complete

    def counting(reduction: ReductionByLayer) -> Any:
        counts.append((reduction.num_started, reduction.num_buckets))
        return complete(reduction)

    with patch.object(ReductionByLayer, "complete", counting):
        run_step(build_session(case), plan_case(case))
    return counts


def test_all_but_what_the_backward_does_not_reach_is_started_before_it_ends(ranks: RankPool) -> None:
    case = build_case("1f1b", num_stages=2)
    found = ranks.run(run_counting, case, world_size=case.plan.num_ranks)
    for rank, counts in enumerate(found):
        is_idle = rank in case.plan.units["llm"].replicas[2].ranks
        assert len(counts) == 1
        for num_started, num_buckets in counts:
            assert num_buckets >= 3
            assert num_started == (0 if is_idle else num_buckets)


def test_a_stage_whose_weight_gradients_come_apart_keeps_its_reduction_whole(ranks: RankPool) -> None:
    case = build_case("zb-h1", num_stages=2)
    assert ranks.run(run_counting, case, world_size=case.plan.num_ranks) == [[]] * case.plan.num_ranks


def split_last_backwards(schedule: Schedule) -> Schedule:
    """Cut what the first part of a reduction stands before into input and weight gradient."""

    def rewritten(lane: Lane) -> Iterator[Action]:
        for before, action in zip((None, *lane.actions), lane.actions, strict=False):
            if before is not None and schedule.shape.begins_early(before) and action.kind is ActionKind.BACKWARD:
                yield from (action._replace(kind=kind) for kind in (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT))
            else:
                yield action

    return schedule.with_lanes(lane_of(lane.ranks, rewritten(lane)) for lane in schedule.lanes)


def test_weight_gradients_that_a_later_pass_puts_off_are_waited_for(ranks: RankPool) -> None:
    case = build_case("1f1b", num_stages=2, passes=(reduce_by_layer, split_last_backwards))
    assert_matches(case, ranks)
