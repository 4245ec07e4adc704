"""No builder runs in blocks, whatever is frozen and however unevenly long stages are: at most one fill and drain is lost."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from multimodal.cost.cost_table import CostTable, TableCosts, build_table_step
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule

NUM_MICROBATCHES = 16
FROZEN = {
    "nothing": ("full", "full"),
    "llm": ("full", "input"),
    "encoder": ("none", "full"),
    "all but projector": ("last", "input"),
}
"""What is frozen -> backwards of encoders and LLM."""
ENCODERS = {
    "fast": {"vision": (0.2, 2)},
    "slow": {"vision": (4.0, 2)},
    "two": {"vision": (1.0, 2), "audio": (0.5, 3)},
}
"""Seconds of a stage's forward, and stages."""


def stage(seconds: float, backward: str) -> dict[str, float]:
    """An entry of a cost table."""
    return {
        "full": {"forward": seconds, "input_gradient": seconds, "weight_gradient": seconds},
        "input": {"forward": seconds, "input_gradient": seconds, "weight_gradient": 0.0},
        "last": {"forward": seconds, "backward": 0.02 * seconds},
        "none": {"forward": seconds},
    }[backward]


def build_table(encoders: str, frozen: str, *, has_generator: bool, chunks: int = 1) -> Mapping[str, Any]:
    """Encoders in front of an LLM of four stages, and perhaps a generator of two behind it."""
    of_encoder, of_llm = FROZEN[frozen]
    units: dict[str, Any] = {}
    for name, (seconds, num_stages) in ENCODERS[encoders].items():
        kinds = ["none"] * (num_stages - 1) + [of_encoder] if of_encoder == "last" else [of_encoder] * num_stages
        units[name] = {"upstream": [], "stages": [stage(seconds, kind) for kind in kinds]}
    num_ranks = sum(len(unit["stages"]) for unit in units.values())
    ranks = [num_ranks + rank for rank in range(4)] * chunks
    units["llm"] = {"upstream": [*units], "stages": [stage(1.0 / chunks, of_llm)] * (4 * chunks), "ranks": ranks}
    if has_generator:
        units["painter"] = {"upstream": ["llm"], "stages": [stage(1.5, "full")] * 2}
    return {"num_microbatches": NUM_MICROBATCHES, "units": units}


def simulated_seconds(table: Mapping[str, Any], builder: str) -> float:
    """How long a step takes."""
    costs = CostTable.from_dict(table)
    case = build_table_step(costs)[0]
    schedule = build_schedule(BUILDERS[builder], case)
    return simulate_schedule(schedule, TableCosts(costs)).iteration_seconds


def seconds_of(unit: Mapping[str, Any]) -> list[float]:
    """Per stage one microbatch's forward and backward."""
    return [sum(each.values()) for each in unit["stages"]]


@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize(("encoders", "frozen"), itertools.product(ENCODERS, FROZEN))
@pytest.mark.parametrize("builder", ["1f1b", "zb-h1"])
def test_a_step_takes_its_busiest_stage_and_one_way_through_the_others(
    builder: str, encoders: str, frozen: str, has_generator: bool
) -> None:
    table = build_table(encoders, frozen, has_generator=has_generator)
    units = table["units"]
    busiest = max(max(seconds_of(unit)) for unit in units.values())
    longest_way = max(sum(seconds_of(units[name])) for name in ENCODERS[encoders])
    longest_way += sum(sum(seconds_of(units[name])) for name in ("llm", "painter") if name in units)
    found = simulated_seconds(table, builder)
    assert NUM_MICROBATCHES * busiest <= found <= (NUM_MICROBATCHES - 1) * busiest + longest_way + 1e-9


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("chunks", [2, 4])
def test_an_interleaved_llm_is_no_slower_behind_encoders_that_work_evenly(frozen: str, chunks: int) -> None:
    table = build_table("two", frozen, has_generator=False)
    interleaved = build_table("two", frozen, has_generator=False, chunks=chunks)
    assert simulated_seconds(interleaved, "interleaved-1f1b") <= simulated_seconds(table, "1f1b") + 1e-9
