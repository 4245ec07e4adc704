"""Gloo with GPUs: messages that travel through host memory, and collectives one by one, give the same losses."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer

from megatron.runtime.communication import message_channel
from megatron.runtime.gradients import gradients
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan, run

GRAPH = build_graph()
CASE = TrainingCase(GRAPH, build_plan(GRAPH, vision=(2, 1, 1), llm=(2, 2, 1)))


def losses(case: TrainingCase, is_staged: bool, is_on_device: bool) -> tuple[list[float], int, int]:
    """The losses of two steps; how many messages were copied behind their receives, and blocks of collectives taken apart."""
    wait = message_channel.StagedReceive.wait
    with (
        mock.patch.object(message_channel, "needs_staging", return_value=is_staged),
        mock.patch.object(message_channel.StagedReceive, "wait", autospec=True, side_effect=wait) as copied,
        mock.patch.object(param_and_grad_buffer, "_coalescing_manager", param_and_grad_buffer._coalescing_manager),
        mock.patch.object(gradients, "is_by_gloo_on_device", return_value=is_on_device),
        mock.patch.object(gradients, "call_one_by_one", side_effect=gradients.call_one_by_one) as apart,
    ):
        training = Training(case)
        return [training.train_step(number) for number in range(2)], copied.call_count, apart.call_count


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
