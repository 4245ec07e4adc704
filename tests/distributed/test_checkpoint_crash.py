"""kill -9 of a rank that saves: the newest complete checkpoint always loads, whole, whatever point the save has come to.

The points of a save in the background are those of the other, reached by another thread, while all values change.
"""

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.runtime import platform
from tests.distributed.interruption import keep_at_points, run_until_killed
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan

GRAPH = build_graph(tied=True)
SAVED = TrainingCase(GRAPH, build_plan(GRAPH, vision=(1, 1, 2), llm=(2, 1, 1), colocated=True))
LOADED = TrainingCase(GRAPH, build_plan(GRAPH, vision=(1, 1, 1), llm=(1, 1, 1), colocated=True))


@pytest.mark.deep(when=lambda killed, in_background: killed or in_background)
@pytest.mark.parametrize("in_background", [False, True], ids=["in the foreground", "in the background"])
@pytest.mark.parametrize("killed", [0, 1])
def test_the_newest_complete_checkpoint_always_loads(
    ranks: RankPool, tmp_path: Path, request: pytest.FixtureRequest, killed: int, in_background: bool
) -> None:
    """Beside what a save left that died before: from the files of every point, and once more where a rank really died.

    That is at the first half of a file and at the last point, and with --all at every point.
    """
    case, folder = replace(SAVED, saves_in_background=in_background), tmp_path / "checkpoints"

    def arguments(number: int) -> tuple[object, ...]:
        return case, folder, tmp_path / f"store-{number}", 2 * number

    def check(folders: list[Path], names: list[str], number: int) -> None:
        ((found),) = ranks.run(load, LOADED, folders, world_size=1)
        for (step, values), name in zip(found, names, strict=True):
            assert step in (2 * number, 2 * number + 1), f"step {step} is the newest after {name}"
            assert values == {float(step)}, f"step {step} mixes several saves after {name}"

    assert run_until_killed(save, arguments(1), killed=killed, point=3)
    names = keep_at_points(
        save, arguments(2), rank=killed, keep=lambda point: shutil.copytree(folder, tmp_path / "kept" / str(point))
    )
    check([tmp_path / "kept" / str(point) for point in range(len(names))], names, 2)
    assert {"open", "fsync"} <= set(names)
    assert killed == 1 or {"os.mkdir", "os.rename", "shutil.rmtree", "os.rmdir"} <= set(names)
    points = range(len(names)) if request.config.getoption("all") else [names.index("fsync"), len(names) - 1]
    for number, point in enumerate(points, start=3):
        died_at = run_until_killed(save, arguments(number), killed=killed, point=1 + point)
        assert died_at is not None
        check([folder], [died_at], number)


def save(rank: int, arm: Callable[[Path], None], case: TrainingCase, folder: Path, store: Path, step: int) -> None:
    """Save a step, and then the next one twice, as after a resumption; every parameter and moment is the step's number."""
    gc.freeze()  # what is inherited from the parent takes longer to look through than a save
    torch.set_num_threads(1)
    platform.install()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    training = Training(case)
    training.train_step(0)
    training.fill(float(step), with_moments=True)
    training.save(folder, step=step)
    training.finish_saving()
    dist.barrier()
    arm(folder)
    for _ in range(2):
        training.fill(float(step + 1), with_moments=True)
        training.save(folder, step=step + 1)
        training.fill(-1.0, with_moments=True)
    training.finish_saving()


def load(case: TrainingCase, folders: list[Path]) -> list[tuple[int, set[float]]]:
    """The steps that are the newest in folders, and all values that each has."""
    training = Training(case)
    training.train_step(0)
    found = []
    for folder in folders:
        training.fill(-1.0, with_moments=True)
        found.append((training.load(folder).step, training.found(with_moments=True)))
    return found
