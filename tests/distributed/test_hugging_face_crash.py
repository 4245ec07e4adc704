"""kill -9 of a rank at every point of writing a Hugging Face folder: all ranks end, and what has its name is whole."""

import gc
from collections.abc import Callable
from datetime import timedelta
from itertools import count
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
from tests.distributed.interruption import run_until_killed
from tests.distributed.test_hugging_face_runs import small_qwen2


@pytest.mark.deep(when=lambda killed: killed == 1)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_export_leaves_no_folder_by_half(tmp_path: Path, killed: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    small_qwen2().save_pretrained(source, max_shard_size="9KB")
    expected = {path.name: path.read_bytes() for path in source.iterdir()}
    target.mkdir()
    points, num_complete = [], 0
    for point in count(1):
        folder = target / str(point)
        name = run_until_killed(write, (tmp_path / f"store-{point}", source, folder), killed=killed, point=point)
        if folder.exists():
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected, f"{name} (point {point})"
            num_complete += 1
        if name is None:
            break
        points.append(name)
    assert num_complete >= 1
    assert {"pwrite", "fsync"} <= set(points)
    assert killed == 1 or {"os.mkdir", "open", "os.rename"} <= set(points)


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
