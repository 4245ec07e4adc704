"""Messages that travel through host memory, as those of GPUs do over gloo: the same losses, whatever waits for them."""

from pathlib import Path
from unittest import mock

from megatron.runtime.communication import message_channel
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan, run

GRAPH = build_graph()
CASE = TrainingCase(GRAPH, build_plan(GRAPH, vision=(2, 1, 1), llm=(2, 2, 1)))


def losses(case: TrainingCase, is_staged: bool) -> tuple[list[float], int]:
    """The losses of three steps, and how many messages were copied behind their receives."""
    with (
        mock.patch.object(message_channel, "needs_staging", return_value=is_staged),
        mock.patch.object(
            message_channel.StagedReceive, "wait", autospec=True, side_effect=message_channel.StagedReceive.wait
        ) as wait,
    ):
        training = Training(case)
        return [training.train_step(number) for number in range(3)], wait.call_count


def test_staged_messages_carry_the_same(ranks: RankPool, tmp_path: Path) -> None:
    direct, staged = (run(ranks, losses, CASE, is_staged) for is_staged in (False, True))
    assert [found for found, _ in staged] == [found for found, _ in direct]
    assert not any(count for _, count in direct)
    assert all(count for _, count in staged), "a rank received nothing"
