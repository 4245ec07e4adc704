"""docs/train_qwen.md is a script: its blocks run as they stand, on two processes, with a tiny model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from safetensors.torch import load_file

from tests.distributed.launch import HANG_SECONDS, REPOSITORY
from tests.distributed.test_llava_example import write_inputs

BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_blocks_of_the_page_train_answer_and_export(tmp_path: Path) -> None:
    model, data = write_inputs(tmp_path, "qwen2_5_vl")
    run = tmp_path / "run"
    inputs = {"MODEL": model, "DATA": data, "IMAGE": min((data.parent / "images").iterdir()), "RUN": run}
    small = {
        "NUM_GPUS": "2",
        "CLUSTER": "examples/clusters/cpu.yaml",
        "BATCH": "4",
        "PLAN_FLAGS": "--transformer-impl local --time-budget 1",
        "FLAGS": "--train-iters 2 --eval-iters 1 --num-workers 0",
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = "".join(BLOCK.findall((REPOSITORY / "docs" / "train_qwen.md").read_text()))
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": path, **{name: str(value) for name, value in inputs.items()}, **small},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, opened = done.stdout.splitlines()
    assert opened == "opened"
    assert f"starting at step 0 from the weights of {run}/projector/step_00000002" in done.stderr
    steps = [entry for entry in map(json.loads, (run / "all.jsonl").read_text().splitlines()) if "evaluation" not in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert (run / "report" / "index.html").is_file()
    before, after = (load_file(folder / "model.safetensors") for folder in (model, run / "trained"))
    assert before.keys() == after.keys() and any(not before[key].equal(after[key]) for key in before)
