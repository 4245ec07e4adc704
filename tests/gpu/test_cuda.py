"""The same run on CUDA as on the CPU: of one process by NCCL, which cannot put two ranks on one GPU, and of several by gloo."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import REPOSITORY, launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
RUN = ("--config", REPOSITORY / "examples/digits/config.yaml", "--eval-iters", 0, "--num-workers", 0)
ONE = ("--vision-dp", 1, "--llm-pp", 1)


def losses(
    log: Path, *flags: object, environment: dict[str, str] | None = None, sizes: tuple[object, ...] = ONE, num_ranks: int = 1
) -> list[float]:
    """Run and return the losses that were logged."""
    given = [*RUN, *sizes, "--log-json", log, *flags]
    launched = launch(given, num_ranks=num_ranks, environment=environment, is_new_program=True)
    assert launched.exit_codes == (0,) * num_ranks, launched.output
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on the CPU: weights are drawn on the device, so a comparison starts from saved ones."""
    folder = tmp_path_factory.mktemp("cuda")
    flags = ("--dtype", "float64", "--train-iters", 5, "--exit-interval", 2, "--save", folder / "saved")
    losses(folder / "log.jsonl", *flags, environment=ON_CPU)
    return folder / "saved"


def test_float64_losses_equal_the_cpus(tmp_path, checkpoint):
    flags = ("--dtype", "float64", "--train-iters", 5, "--load", checkpoint)
    on_cpu = losses(tmp_path / "cpu.jsonl", *flags, environment=ON_CPU)
    on_gpu = losses(tmp_path / "gpu.jsonl", *flags)
    assert on_gpu == pytest.approx(on_cpu, rel=0, abs=1e-9)


@pytest.mark.parametrize("flags", [("--bf16",), ("--bf16", "--recompute-activations"), ("--recompute-granularity", "full")])
def test_trains_in_other_precisions(tmp_path, flags):
    found = losses(tmp_path / "log.jsonl", "--train-iters", 20, *flags)
    assert found[-1] < 0.8 * found[0]


SHARED = ("--distributed-backend", "gloo")
"""Several ranks on one GPU."""


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "flags"),
    [
        (3, ("--vision-dp", 1, "--llm-pp", 2), ("--schedule", "zb-h1")),
        (4, ("--colocate-units", "--vision-tp", 2, "--llm-pp", 2, "--llm-tp", 2), ("--sequence-parallel",)),
    ],
)
def test_several_ranks_on_one_gpu_have_the_losses_of_one(tmp_path, checkpoint, num_ranks, sizes, flags):
    """With real streams: where tensors are, how long they live, and what waits for what."""
    common = ("--dtype", "float64", "--train-iters", 5, "--load", checkpoint)
    alone = losses(tmp_path / "one.jsonl", *common)
    shared = losses(tmp_path / "shared.jsonl", *common, *flags, *SHARED, sizes=sizes, num_ranks=num_ranks)
    assert shared == pytest.approx(alone, rel=0, abs=1e-9)


def test_replicas_on_one_gpu_train_by_the_defaults(tmp_path):
    sizes = ("--vision-dp", 1, "--llm-pp", 1, "--llm-dp", 2)
    found = losses(tmp_path / "log.jsonl", "--train-iters", 20, "--bf16", *SHARED, sizes=sizes, num_ranks=3)
    assert found[-1] < 0.8 * found[0]
