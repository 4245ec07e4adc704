"""pretrain_mllm.py with the defaults of CUDA: Transformer Engine over the stand-in for its compiled module, and fused kernels."""

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
OVERLAPPED = "--tp-comm-overlap --tp-comm-overlap-rows 180"  # nearly filled by four samples
LINE = "--global-batch-size 4 --lr 1e-3 --attention-backend blocks --log-interval 1 --peak-tflops 1"
PROGRAM = """
import os
import sys
from dataclasses import replace
from pathlib import Path
from tests.engine_on_cpu.install import install
install(Path(sys.argv[1]))
from megatron.runtime.flags import flag_rules
from megatron.runtime.training import run
flag_rules._has_cuda = lambda: True
with_defaults, build_options = run.with_device_defaults, run._build_options
run.with_device_defaults = lambda config, **given: with_defaults(config, **{**given, "has_cuda": True})
run._build_options = lambda config: replace(
    build_options(config), fuses_kernels=True, accumulates_in_products=not config.parallelism.shards_weights
)
from tests.distributed.forked_programs import pretrain_mllm  # which imports what each run would
from tools.launch import free_port
for line in sys.argv[2:]:
    num_ranks, _, flags = line.partition(" ")
    print("run", flush=True)
    os.environ.update(MASTER_PORT=str(free_port()), WORLD_SIZE=num_ranks)
    processes = []
    for rank in range(int(num_ranks)):
        if not (process := os.fork()):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            pretrain_mllm.main(flags.split())
            os._exit(0)
        processes.append(process)
    if any([os.waitpid(process, 0)[1] for process in processes]):
        sys.exit(1)
"""
"""Runs with several command lines, one after another; each begins with its number of ranks."""


def test_every_way_to_train(tmp_path: Path) -> None:
    """A step of the digits each, or as many as flags say; all in one process, which imports everything once."""
    document = yaml.safe_load(DIGITS.read_text())
    document["units"]["llm"]["experts"] = {"num_experts": 4}
    experts = tmp_path / "model.yaml"
    experts.write_text(yaml.safe_dump(document, sort_keys=False))
    texts = pytest.importorskip("tests.distributed.test_hugging_face_runs", reason="transformers is not installed")
    model, (trained, of_local) = tmp_path / "model", (tmp_path / name for name in ("trained", "local"))
    texts.small_qwen2(vocab_size=265).save_pretrained(model)
    manifest = texts.write_manifest(tmp_path / "data")
    digits, two = f"--data-path digits --model {DIGITS} --lora-rank 4", "--train-iters 2 --lr-decay-iters 2"
    split = "--schedule zb-h1 --colocate-units --vision-dp 2 --llm-pp 2"
    tuned = f"--data-path {manifest} --seq-length 64 --tokenizer-type ByteTokenizer --load-hf {model} --train-iters 1"
    flags = (
        f"1 {digits} {two}",
        f"2 --data-path digits --model {experts} --train-iters 2 --fp8-format hybrid {split}",
        f"2 {digits} {two} --colocate-units --vision-dp 2 --llm-tp 2 --sequence-parallel --micro-batch-size 4 {OVERLAPPED}",
        f"1 {tuned} --save-hf {trained}",
        f"1 {tuned} --save-hf {of_local} --transformer-impl local",
    )
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "TORCHDYNAMO_DISABLE": "1"}  # fused kernels run step by step
    command = [sys.executable, "-c", PROGRAM, ENGINE, *(f"{each} {LINE}" for each in flags)]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert found.returncode == 0 and found.stdout.count("layers of Transformer Engine") >= len(flags) - 1, found.stdout
    losses = [
        [float(loss) for loss in re.findall(r"^step .*  loss ([\d.]+)  ", said, re.MULTILINE)]
        for said in found.stdout.split("run\n")[1:]
    ]
    whole, (first, second), overlapped, *tuned = losses
    assert second < first
    assert overlapped == pytest.approx(whole, abs=0.02)
    assert "collectives of the LLM in user buffers of 180 rows" in found.stdout
    assert tuned[0] == pytest.approx(tuned[1], abs=0.02)
    source, exported, expected = (texts.weights_of(folder) for folder in (model, trained, of_local))
    differing, moved = (
        sum(float((weight - other[name]).abs().sum()) for name, weight in expected.items()) for other in (exported, source)
    )
    assert differing < 0.3 * moved
