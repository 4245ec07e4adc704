"""Gradients reduced while the last backward runs: as exact as afterwards, and really begun before that backward ends."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer

from megatron.runtime.communication import message_channel
from megatron.runtime.gradients import gradients
from megatron.runtime.gradients.scheduled_collectives import ReductionByLayer
from multimodal.schedule.passes.reduce_by_layer import reduce_by_layer
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.schedule import Lane, Schedule, lane_of
from tests.distributed.dealt_case import described
from tests.distributed.gradient_case import GradientCase, build_session, plan_case, run_step
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan, run

GRAPH = ModelGraph.from_dict({"units": {**described("vision"), **described("llm", num_layers=6)}})
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
    case = GradientCase(GRAPH, plan, Assignment(assignment), source, builder=builder, passes=(reduce_by_layer,))
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
        counts.append((reduction.num_started, len(reduction.buckets)))
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


STAGED_GRAPH = build_graph()
CASE = TrainingCase(STAGED_GRAPH, build_plan(STAGED_GRAPH, vision=(2, 1, 1), llm=(2, 2, 1)))


def losses(case: TrainingCase, is_staged: bool, is_on_device: bool) -> tuple[list[float], int, int]:
    """The losses of two steps; how many messages were copied behind their receives, and blocks of collectives taken apart."""
    finish = message_channel.finish_staged
    with (
        mock.patch.object(message_channel, "needs_staging", return_value=is_staged),
        mock.patch.object(message_channel, "finish_staged", side_effect=finish) as copied,
        mock.patch.object(param_and_grad_buffer, "_coalescing_manager", param_and_grad_buffer._coalescing_manager),
        mock.patch.object(gradients, "is_by_gloo_on_device", return_value=is_on_device),
        mock.patch.object(gradients, "call_one_by_one", side_effect=gradients.call_one_by_one) as apart,
    ):
        training = Training(case)
        return [training.train_step(number) for number in range(2)], copied.call_count, apart.call_count


@pytest.mark.deep  # messages are as before, and a block of collectives is below
def test_staged_messages_and_collectives_one_by_one_train_the_same(ranks: RankPool) -> None:
    plain, staged, apart = (run(ranks, losses, CASE, *how) for how in ((False, False), (True, False), (False, True)))
    for found in (staged, apart):
        assert [each for each, _, _ in found] == [each for each, _, _ in plain]
    assert all(counts == [0, 0] for _, *counts in plain)
    assert all(count for _, count, _ in staged), "a rank received nothing"
    assert all(count for _, _, count in apart), "a rank coalesced"


def coalesced(is_apart: bool, async_ops: bool) -> list[list[float]]:
    """The results of two collectives of each kind in a block."""
    block = gradients.call_one_by_one if is_apart else dist._coalescing_manager
    own = torch.arange(4.0) + dist.get_rank()
    results = []
    for start in (
        lambda out, own: dist.all_reduce(out.copy_(own)),
        lambda out, own: dist.all_gather_into_tensor(out, own[: 4 // dist.get_world_size()]),
        lambda out, own: dist.reduce_scatter_tensor(out[: 4 // dist.get_world_size()], own),
    ):
        found = [torch.zeros(4), torch.zeros(4)]
        with block(dist.group.WORLD, async_ops=async_ops) as works:
            for out, scale in zip(found, (1.0, 3.0), strict=True):
                start(out, own * scale)
        if async_ops:
            works.wait()
        results += [out.tolist() for out in found]
    return results


@pytest.mark.parametrize("async_ops", [False, True])
def test_a_block_of_collectives_one_by_one(ranks: RankPool, async_ops: bool) -> None:
    assert ranks.run(coalesced, True, async_ops, world_size=2) == ranks.run(coalesced, False, async_ops, world_size=2)
