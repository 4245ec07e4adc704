"""kill -9 at random moments of saving: the newest complete checkpoint always loads, whole.

Every other time savers write in the background, and change all values meanwhile.

BRAID_CRASH_MOMENTS=200 tries that many moments.
"""

import gc
import multiprocessing
import os
import random
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.runtime import platform
from megatron.runtime.checkpoint.checkpoint import find_newest_checkpoint
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan, run

NUM_MOMENTS = int(os.environ.get("BRAID_CRASH_MOMENTS", "12"))
GRAPH = build_graph(tied=True)
SAVED = TrainingCase(GRAPH, build_plan(GRAPH, vision=(1, 1, 2), llm=(2, 1, 1), colocated=True))
LOADED = TrainingCase(GRAPH, build_plan(GRAPH, vision=(1, 1, 1), llm=(1, 1, 1), colocated=True))


def test_the_newest_complete_checkpoint_always_loads(ranks: RankPool, tmp_path: Path) -> None:
    generator = random.Random(20)
    folder = tmp_path / "checkpoints"
    num_interrupted, last_step = 0, 0
    for moment in range(NUM_MOMENTS):
        case = replace(SAVED, saves_in_background=moment % 2 == 1)
        kill_while_saving(case, folder, store=tmp_path / f"store-{moment}", generator=generator)
        num_interrupted += any(".partial-" in path.name for path in folder.iterdir())
        newest = find_newest_checkpoint(folder)
        assert newest is not None
        ((step, values),) = run(ranks, load, LOADED, folder)
        assert step >= last_step, f"step {last_step} was complete, but {newest} was found"
        assert values == {float(step)}, f"{newest} mixes several saves"
        last_step = step
    assert num_interrupted >= NUM_MOMENTS // 4, "hardly any save was interrupted: the moments are badly chosen"


def kill_while_saving(case: TrainingCase, folder: Path, *, store: Path, generator: random.Random) -> None:
    """Let two ranks save without end, and kill one, or both, at a random moment."""
    context = multiprocessing.get_context("fork")
    has_saved = context.Event()
    savers = [context.Process(target=save_without_end, args=(case, rank, store, folder, has_saved)) for rank in range(2)]
    for saver in savers:
        saver.start()
    try:
        assert has_saved.wait(30), "nothing was saved"
        time.sleep(generator.uniform(0.0, 0.15))
        for saver in generator.sample(savers, generator.choice([1, 2])):
            saver.kill()
        for saver in savers:
            saver.join(5)  # the other one notices and ends by itself
        assert not any(saver.is_alive() for saver in savers), "a rank goes on without its peer"
    finally:
        for saver in savers:
            saver.kill()
            saver.join()


def save_without_end(case: TrainingCase, rank: int, store: Path, folder: Path, has_saved: Any) -> None:
    """Save step after step, every parameter and moment at the step's number; every third step twice, as after a resumption."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the error of a lost peer is expected
    gc.freeze()  # what is inherited from the parent takes longer to look through than a save
    torch.set_num_threads(1)
    platform.install()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=10))
    training = Training(case)
    training.train_step(0)
    newest = find_newest_checkpoint(folder)
    step = int(newest.name[5:13]) if newest else 0
    dist.barrier()
    while True:
        step += 1
        fill(training, float(step))
        for _ in range(2 if step % 3 == 0 else 1):
            training.save(folder, step=step)
        if find_newest_checkpoint(folder) is not None:
            has_saved.set()


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
