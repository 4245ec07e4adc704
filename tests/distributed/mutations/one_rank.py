"""Mutations of one rank, which is given another flag, file or environment than the others."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.distributed.mutations.files import replaced
from tests.distributed.mutations.mutation import Inputs, Mutation
from tests.distributed.small_run import MODEL

Change = Callable[[Inputs], object]
VISION, LLM = [(0, [[0, 3]])], [(1, [[0, 4]])]


def plan(**units: list[tuple[int, list[list[int]]]]) -> Change:
    """Take a plan file in place of sizes: unit -> stages of its one replica as (rank, layer ranges)."""
    return lambda inputs: inputs.write_plan(plan_of(units))


def plan_of(units: dict[str, list[tuple[int, list[list[int]]]]]) -> dict[str, Any]:
    stages = {name: [{"ranks": [rank], "layers": layers} for rank, layers in found] for name, found in units.items()}
    return {"units": {name: {"replicas": [{"stages": found}]} for name, found in stages.items()}}


def both(*changes: Change) -> Change:
    return lambda inputs: [change(inputs) for change in changes]


def named(given: dict[str, object]) -> dict[str, object]:
    return {"--" + name.replace("_", "-"): value for name, value in given.items()}


def of_rank(rank: int, *, environment: dict[str, str] | None = None, **given: object) -> Change:
    """Give one rank flags of its own."""

    def change(inputs: Inputs) -> None:
        inputs.flags_of_rank[rank] = named(given)
        inputs.environment_of_rank[rank] = environment or {}

    return change


def other_file(flag: str, text: Callable[[Inputs], str]) -> Change:
    """Have rank 1 read another file than rank 0."""

    def change(inputs: Inputs) -> None:
        path = inputs.folder / "data" / f"other{Path(str(inputs.flags[flag])).suffix}"
        path.write_text(text(inputs))
        inputs.flags_of_rank[1] = {flag: path}

    return change


WIDER = replaced(MODEL, ("units", "llm", "ffn_hidden_size"), 96)
PLAN, SWAPPED = plan(vision=VISION, llm=LLM), plan_of({"vision": [(1, [[0, 3]])], "llm": [(0, [[0, 4]])]})
OF_ONE_RANK: dict[str, tuple[Change, tuple[str, ...]]] = {
    "learning rate": (of_rank(1, lr=0.01), ("rank 1 was started with --lr 0.01, rank 0 with --lr 0.001", "same flags")),
    "clipping, on rank 0": (of_rank(0, clip_grad=0.5), ("rank 1", "--clip-grad 1.0", "rank 0 with --clip-grad 0.5")),
    "freezing": (of_rank(1, freeze="vision"), ("rank 1 was started with --freeze vision, rank 0 without --freeze",)),
    "backend": (of_rank(1, distributed_backend="gloo"), ("--distributed-backend gloo, rank 0 without",)),
    "model": (
        other_file("--model", lambda inputs: yaml.safe_dump(WIDER, sort_keys=False)),
        ("rank 1 has another model", "units.llm.ffn_hidden_size is 96, rank 0's 64", "--model"),
    ),
    "plan": (
        both(PLAN, other_file("--plan", lambda inputs: yaml.safe_dump(SWAPPED))),
        ("rank 1 has another plan", "units.vision.replicas", "--plan"),
    ),
    "data": (
        other_file("--data-path", lambda inputs: inputs.manifest.read_text().replace("picture 3", "pictures 3")),
        ("rank 1 sees other data", "training samples", "--data-path"),
    ),
    "model missing on rank 1": (of_rank(1, model="no/such.yaml"), ("no/such.yaml", "rank 1")),
    "model missing on rank 0": (of_rank(0, model="no/such.yaml"), ("no/such.yaml", "rank 0")),
    "corrupt plan": (both(PLAN, other_file("--plan", lambda inputs: "units: [vision: {")), ("other.yaml", "rank 1")),
    "unknown flag": (of_rank(1, learning_rate=1), ("--learning-rate", "rank 1")),
    "data missing": (of_rank(1, data_path="no/such.jsonl"), ("no/such.jsonl", "rank 1")),
    "log on rank 0": (of_rank(0, log_json="/proc/none/log.jsonl"), ("/proc/none/log.jsonl", "rank 0")),
    "no number of processes": (of_rank(1, environment={"WORLD_SIZE": "two"}), ("WORLD_SIZE must be the number", "rank 1")),
    "number of processes": (of_rank(1, environment={"WORLD_SIZE": "3"}), ("the run has 3 processes", "rank 1")),
}


def rank_mutations() -> Iterator[Mutation]:
    """Give rank 0 or 1 something of its own."""
    for name, (change, names) in OF_ONE_RANK.items():
        yield Mutation(f"rank: {name}", change, names, must_be_refused=True)
