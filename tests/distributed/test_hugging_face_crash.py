"""kill -9 of a rank at every point of writing a Hugging Face folder: all ranks end, and what has its name is whole."""

import gc
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from megatron.runtime import platform
from megatron.runtime.hugging_face.save_weights import save_hugging_face
from multimodal.cost.layers.registry import read_model
from tests.distributed.hugging_face_case import FromFolder
from tests.distributed.hugging_face_comparison import case_of
from tests.distributed.hugging_face_models import TEXTS
from tests.distributed.interruption import keep_at_points, run_until_killed
from tests.distributed.test_hugging_face_runs import small_qwen2


@pytest.mark.deep(when=lambda killed: killed == 1)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_export_leaves_no_folder_by_half(tmp_path: Path, killed: int, request: pytest.FixtureRequest) -> None:
    """From what is there at every point, and once more where a rank really died.

    That is at one point of every kind, and with --all at every point.
    """
    source, target, kept = (tmp_path / name for name in ("source", "target", "kept"))
    small_qwen2().save_pretrained(source, max_shard_size="9KB")
    target.mkdir()
    expected = {path.name: path.read_bytes() for path in source.iterdir()}

    def keep(point: int) -> None:
        if (target / "whole").exists():
            shutil.copytree(target / "whole", kept / str(point))

    names = keep_at_points(write, (tmp_path / "store", source, target / "whole"), rank=killed, keep=keep)
    shutil.copytree(target / "whole", kept / "at the end")
    for folder in kept.iterdir():
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected, f"point {folder.name} of {names}"
    assert {"pwrite", "fsync"} <= set(names)
    assert killed == 1 or {"os.mkdir", "open", "os.rename"} <= set(names)
    for point in range(len(names)) if request.config.getoption("all") else {names.index(name) for name in names}:
        folder = target / str(point)
        died_at = run_until_killed(write, (tmp_path / f"store-{point}", source, folder), killed=killed, point=1 + point)
        assert died_at is not None
        if folder.exists():
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected, f"{died_at} (point {point})"


def write(rank: int, arm: Callable[[Path], None], store: Path, source: Path, target: Path) -> None:
    """Write a folder, as one of two tensor parallel ranks."""
    gc.freeze()  # what is inherited from the parent takes longer to look through than a save
    torch.set_num_threads(1)
    platform.install()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    session = FromFolder(source).session(case_of(read_model(source), TEXTS, {"llm": (2, 1, 1)}))
    dist.barrier()
    arm(target.parent)
    save_hugging_face(target, session=session, like=source)
