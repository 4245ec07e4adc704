"""kill -9 at every point of saving, one after the other: the newest complete checkpoint always loads, whole.

The points of a save in the background are those of the other, reached by another thread, while all values change.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.runtime import platform
from tests.distributed.interruption import run_until_killed
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan, run

GRAPH = build_graph(tied=True)
SAVED = TrainingCase(GRAPH, build_plan(GRAPH, vision=(1, 1, 2), llm=(2, 1, 1), colocated=True))
LOADED = TrainingCase(GRAPH, build_plan(GRAPH, vision=(1, 1, 1), llm=(1, 1, 1), colocated=True))


@pytest.mark.deep(when=lambda killed, in_background: killed != in_background)
@pytest.mark.parametrize("in_background", [False, True], ids=["in the foreground", "in the background"])
@pytest.mark.parametrize("killed", [0, 1])
def test_the_newest_complete_checkpoint_always_loads(ranks: RankPool, tmp_path: Path, killed: int, in_background: bool) -> None:
    case, folder = replace(SAVED, saves_in_background=in_background), tmp_path / "checkpoints"
    points = []
    for point in count(1):
        name = run_until_killed(save, (case, folder, tmp_path / f"store-{point}", 2 * point), killed=killed, point=point)
        if name is None:
            break
        points.append(name)
        ((step, values),) = run(ranks, load, LOADED, folder)
        assert step in (2 * point, 2 * point + 1), f"step {step} is the newest after {name} (point {point})"
        assert values == {float(step)}, f"step {step} mixes several saves after {name} (point {point})"
    assert {"open", "fsync"} <= set(points)
    assert killed == 1 or {"os.mkdir", "os.rename", "shutil.rmtree", "os.rmdir"} <= set(points)


def save(rank: int, arm: Callable[[Path], None], case: TrainingCase, folder: Path, store: Path, step: int) -> None:
    """Save a step, and then the next one twice, as after a resumption; every parameter and moment is the step's number."""
    gc.freeze()  # what is inherited from the parent takes longer to look through than a save
    torch.set_num_threads(1)
    platform.install()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    training = Training(case)
    training.train_step(0)
    fill(training, float(step))
    training.save(folder, step=step)
    training.finish_saving()
    dist.barrier()
    arm(folder)
    for _ in range(2):
        fill(training, float(step + 1))
        training.save(folder, step=step + 1)
        fill(training, -1.0)
    training.finish_saving()


def fill(training: Training, value: float) -> None:
    with torch.no_grad():
        for tensor in saved_tensors(training):
            tensor.fill_(value)


def load(case: TrainingCase, folder: Path) -> tuple[int, set[float]]:
    training = Training(case)
    training.train_step(0)
    step = training.load(folder).step
    return step, {value for tensor in saved_tensors(training) for value in tensor.detach().unique().tolist()}


def saved_tensors(training: Training) -> list[torch.Tensor]:
    parameters = [parameter for stage in training.session.stages.values() for parameter in stage.parameters()]
    states = [state for optimizer in training.session.optimizers.values() for state in optimizer.optimizer.state.values()]
    return [*parameters, *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step"))]
