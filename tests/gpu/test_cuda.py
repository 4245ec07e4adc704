"""The same run on CUDA as on the CPU; NCCL cannot put two ranks on one GPU, so it is a run of one process."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import REPOSITORY, launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
RUN = (
    "--config",
    REPOSITORY / "examples/digits/config.yaml",
    "--vision-dp",
    1,
    "--llm-pp",
    1,
    "--eval-iters",
    0,
    "--num-workers",
    0,
)


def losses(log: Path, *flags: object, environment: dict[str, str] | None = None) -> list[float]:
    """Run one process and return the losses that it logged."""
    launched = launch([*RUN, "--log-json", log, *flags], num_ranks=1, environment=environment, is_new_program=True)
    assert launched.exit_codes == (0,), launched.output
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on the CPU: weights are drawn on the device, so a comparison starts from saved ones."""
    folder = tmp_path_factory.mktemp("cuda")
    flags = ("--dtype", "float64", "--train-iters", 5, "--exit-interval", 2, "--save", folder / "saved")
    losses(folder / "log.jsonl", *flags, environment=ON_CPU)
    return folder / "saved"


def test_float64_losses_equal_the_cpus(tmp_path: Path, checkpoint: Path) -> None:
    flags = ("--dtype", "float64", "--train-iters", 5, "--load", checkpoint)
    on_cpu = losses(tmp_path / "cpu.jsonl", *flags, environment=ON_CPU)
    on_gpu = losses(tmp_path / "gpu.jsonl", *flags)
    assert on_gpu == pytest.approx(on_cpu, rel=0, abs=1e-9)


@pytest.mark.parametrize("flags", [("--bf16",), ("--bf16", "--recompute-activations"), ("--recompute-granularity", "full")])
def test_trains_in_other_precisions(tmp_path: Path, flags: tuple[object, ...]) -> None:
    found = losses(tmp_path / "log.jsonl", "--train-iters", 20, *flags)
    assert found[-1] < 0.8 * found[0]
