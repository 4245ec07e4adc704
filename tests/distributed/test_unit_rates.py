"""Learning rates and weight decays of single units and projectors, as runs have them under any plan."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.distributed.conftest import Once
from tests.distributed.small_run import SIZED_OTHERWISE, losses

ALIKE = {"--train-iters": 4, "--lr-decay-style": "cosine", "--min-lr": 1e-4, "--lr-warmup-iters": 1, "--lr": 1e-2}
RATES = {"--vision-lr": 3e-3, "--projector-lr": 3e-2, "--vision-projector-weight-decay": 0.5, "--llm-weight-decay": 0.0}
RATES |= {"--vision-lr-warmup-iters": 3, "--vision-projector-lr-warmup-iters": 0}
NOT_AT_ALL = 1e-30
"""A learning rate that changes no weight."""


PLANS = {
    "tp and dp": {"--vision-tp": 2, "--llm-dp": 2, "--micro-batch-size": 1},
    "zero 3": {"--vision-dp": 2, "--llm-dp": 2, "--data-parallel-sharding-strategy": "optim_grads_params"},
    "shared ranks": {**SIZED_OTHERWISE, "--llm-tp": 2, "--colocate-units": None},
}


def losses_of_one_process(folder: Path) -> tuple[Path, list[float], list[float]]:
    """The folder of the data, which is random, and the losses with and without `RATES`."""
    return folder, losses(folder, ALIKE | RATES, num_ranks=1), losses(folder, ALIKE, num_ranks=1)


@pytest.mark.deep(when=lambda plan: plan == "shared ranks")
@pytest.mark.parametrize("plan", PLANS)
def test_rates_are_those_of_one_process_under_any_plan(plan: str, once: Once, tmp_path: Path) -> None:
    folder, alone, with_one_rate = once(losses_of_one_process)
    assert alone != with_one_rate
    num_ranks = 2 if plan == "shared ranks" else 4
    flags = {**ALIKE, **RATES, **PLANS[plan], "--log-json": tmp_path / "log.jsonl"}
    assert losses(folder, flags, num_ranks=num_ranks) == pytest.approx(alone, rel=0, abs=1e-9)


@pytest.mark.parametrize(
    ("rates", "frozen", "dtype"),
    [
        ({"--vision-lr": NOT_AT_ALL}, {"--freeze": "vision"}, "float64"),
        (
            {"--vision-projector-lr": NOT_AT_ALL, "--llm-lr": NOT_AT_ALL},
            {"--freeze": "llm", "--freeze-projector": "vision"},
            "float32",
        ),
    ],
    ids=["encoder", "projector and LLM"],
)
def test_what_hardly_learns_is_as_if_frozen(
    rates: Mapping[str, object], frozen: Mapping[str, object], dtype: str, tmp_path: Path
) -> None:
    """In float32 over Megatron's sharded optimizer; clipping, which counts all gradients, is off."""
    plan = {**ALIKE, "--vision-dp": 2, "--llm-dp": 2, "--clip-grad": 0, "--min-lr": 0, "--dtype": dtype}
    expected = losses(tmp_path, plan | frozen, num_ranks=4)
    found = losses(tmp_path, plan | rates, num_ranks=4)
    assert found == pytest.approx(expected, rel=0, abs=1e-9 if dtype == "float64" else 1e-5)


def test_one_warm_up_for_every_unit_is_that_of_all(tmp_path: Path) -> None:
    own = {f"--{part}-lr-warmup-iters": 3 for part in ("vision", "vision-projector", "llm")}
    alone, together, shorter = (losses(tmp_path, ALIKE | flags, num_ranks=1) for flags in (own, {"--lr-warmup-iters": 3}, {}))
    assert alone == together != shorter
