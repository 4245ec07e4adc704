"""pretrain_mllm.py with layers of Transformer Engine, over the stand-in for its compiled module: from flags to steps."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.engine_on_cpu.install import FOLDER

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits" / "model.yaml"
ENGINE = Path(os.environ.get(FOLDER, "none")) / "2.8.0"
pytestmark = pytest.mark.skipif(not ENGINE.is_dir(), reason=f"{FOLDER} names no folder with Transformer Engine 2.8.0")
PROGRAM = """
import sys
from pathlib import Path
from tests.engine_on_cpu.install import install
install(Path(sys.argv[1]))
from megatron.runtime.flags import device_rules
device_rules._has_cuda = lambda: True
import pretrain_mllm
pretrain_mllm.main(sys.argv[2:])
"""


def train(model: Path, flags: str) -> list[float]:
    """Train two steps of the digits on one rank, or up to step 4 from a checkpoint; returns the losses that are printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        environment = {**os.environ, **place, "MASTER_PORT": str(free.getsockname()[1])}
    steps = "" if "--train-iters" in flags else "--train-iters 2"
    line = (
        f"--model {model} --data-path digits --global-batch-size 8 --lr 1e-3 --bf16 --attention-backend blocks --log-interval 1"
    )
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, ENGINE, *f"{line} --transformer-impl transformer_engine {steps} {flags}".split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0 and "layers of Transformer Engine" in found.stdout + found.stderr, found.stdout + found.stderr
    return [float(loss) for loss in re.findall(r"^step .*  loss ([\d.]+)  ", found.stdout + found.stderr, re.MULTILINE)]


def test_experts_in_fp8(tmp_path: Path) -> None:
    document = yaml.safe_load(DIGITS.read_text())
    document["units"]["llm"]["experts"] = {"num_experts": 4}
    model = tmp_path / "model.yaml"
    model.write_text(yaml.safe_dump(document, sort_keys=False))
    first, second = train(model, "--fp8-format hybrid")
    assert second < first


def test_a_run_that_is_resumed_goes_on_as_one_that_was_not_and_adapters_start_as_none(tmp_path: Path) -> None:
    before = train(DIGITS, f"--save {tmp_path}/saved --lr-decay-iters 4")
    after = train(DIGITS, f"--load {tmp_path}/saved --train-iters 4 --lr-decay-iters 4")
    assert before + after == train(DIGITS, "--train-iters 4 --lr-decay-iters 4")
    assert train(DIGITS, "--lora-rank 4")[0] == before[0]
