"""kill -9 of a rank at random moments of writing a Hugging Face folder: all ranks end, and whatever has its name is whole."""

import gc
import multiprocessing
import os
import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from megatron.runtime import platform
from megatron.runtime.hugging_face.save_weights import save_hugging_face
from multimodal.cost.layers.registry import read_model
from tests.distributed.hugging_face_case import FromFolder
from tests.distributed.hugging_face_comparison import case_of
from tests.distributed.test_hugging_face_runs import small_qwen2
from tests.distributed.test_hugging_face_text import SAMPLES

NUM_MOMENTS = 6


def test_a_killed_export_leaves_no_folder_by_half(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    small_qwen2().save_pretrained(source, max_shard_size="9KB")
    expected = {path.name: path.read_bytes() for path in source.iterdir()}
    target.mkdir()
    generator, context = random.Random(3), multiprocessing.get_context("fork")
    num_interrupted = 0
    for moment in range(NUM_MOMENTS):
        has_saved = context.Event()
        arguments = (tmp_path / f"store-{moment}", source, target, has_saved)
        writers = [context.Process(target=write_without_end, args=(rank, *arguments)) for rank in range(2)]
        for writer in writers:
            writer.start()
        assert has_saved.wait(30), "nothing was written"
        time.sleep(generator.uniform(0.0, 0.05))
        writers[moment % 2].kill()
        for writer in writers:
            writer.join(30)
            assert writer.exitcode not in (0, None), "the rank that is left hangs"
        num_interrupted += any(path.name.startswith(".") for path in target.iterdir())
    written = [path for path in target.iterdir() if not path.name.startswith(".")]
    assert len(written) >= NUM_MOMENTS
    for folder in written:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected, folder
    assert num_interrupted > 0, "no export was interrupted: the moments are badly chosen"


def write_without_end(rank: int, store: Path, source: Path, target: Path, has_saved: Any) -> None:
    """Write folder after folder, as two tensor parallel ranks."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the error of a lost peer is expected
    gc.freeze()  # what is inherited from the parent takes longer to look through than a save
    torch.set_num_threads(1)
    platform.install()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=10))
    session = FromFolder(source).session(case_of(read_model(source), SAMPLES, {"llm": (2, 1, 1)}))
    number = 0
    while True:
        number += 1
        save_hugging_face(target / f"{store.name}-{number}", session=session, like=source)
        has_saved.set()
