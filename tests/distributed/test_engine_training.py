"""pretrain_mllm.py with layers of Transformer Engine, over the stand-in for its compiled module: from flags to steps."""

import os
import re
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
LINE = "--data-path digits --global-batch-size 4 --lr 1e-3 --bf16 --attention-backend blocks --log-interval 1"
PROGRAM = """
import os
import sys
from pathlib import Path
from tests.engine_on_cpu.install import install
install(Path(sys.argv[1]))
from megatron.runtime.flags import device_rules
device_rules._has_cuda = lambda: True
import pretrain_mllm
from tools.launch import free_port
for line in sys.argv[2:]:
    print("run", flush=True)
    if not (process := os.fork()):
        os.environ["MASTER_PORT"] = str(free_port())
        pretrain_mllm.main(line.split())
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        sys.exit(1)
"""
"""Runs with several command lines, one after another."""


def test_runs_go_on_from_checkpoints_with_adapters_and_with_experts_in_fp8(tmp_path: Path) -> None:
    """On one rank, a step of the digits each, or as many as flags say; all in one process, which imports everything once."""
    document = yaml.safe_load(DIGITS.read_text())
    document["units"]["llm"]["experts"] = {"num_experts": 4}
    experts = tmp_path / "model.yaml"
    experts.write_text(yaml.safe_dump(document, sort_keys=False))
    flags = (
        f"--model {DIGITS} --train-iters 1 --save {tmp_path}/saved --lr-decay-iters 2",
        f"--model {DIGITS} --load {tmp_path}/saved --train-iters 2 --lr-decay-iters 2",
        f"--model {DIGITS} --train-iters 2 --lr-decay-iters 2",
        f"--model {DIGITS} --train-iters 1 --lora-rank 4",
        f"--model {experts} --train-iters 2 --fp8-format hybrid",
    )
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-c", PROGRAM, ENGINE, *(f"--transformer-impl transformer_engine {LINE} {each}" for each in flags)]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert found.returncode == 0 and found.stdout.count("layers of Transformer Engine") >= len(flags), found.stdout
    losses = [
        [float(loss) for loss in re.findall(r"^step .*  loss ([\d.]+)  ", said, re.MULTILINE)]
        for said in found.stdout.split("run\n")[1:]
    ]
    before, after, whole, adapted, (first, second) = losses
    assert before + after == whole
    assert adapted[0] == before[0], "adapters start as none"
    assert second < first
