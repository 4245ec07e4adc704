"""Mutations of one rank, which is given another flag or file than the others."""

import json
from collections.abc import Iterator
from functools import partial

import yaml

from tests.distributed.mutations.mutation import PLAN, Inputs, Mutation
from tests.distributed.mutations.nested_documents import replaced
from tests.distributed.small_run import MODEL, NUM_RANKS, manifest_entries


def rank_mutations() -> Iterator[Mutation]:
    """Give the last rank a flag or a file of its own."""
    for flag, value in {
        "--lr": 2e-3,
        "--clip-grad": 0.5,
        "--attention-mask": "embedded",
        "--freeze": "vision",
        "--train-iters": 3,
        "--exit-interval": 1,
        "--dtype": "float32",
        "--make-vocab-size-divisible-by": 64,
        "--seed": 7,
        "--global-batch-size": 3,
        "--micro-batch-size": 2,
        "--balance": "orchmllm",
        "--schedule": "gpipe",
        "--schedule-passes": "defer-receives",
        "--seq-length": 300,
        "--split": "50,50",
        "--recompute-granularity": "full",
        "--eval-iters": 1,
        "--weight-decay": 0.5,
        "--save": "saved-by-one",
    }.items():
        yield Mutation(f"rank: {flag} of one", partial(_set_of_rank, flag=flag, value=value), (flag,), must_be_refused=True)
    for name, change, named in (
        ("model", _other_model, "vision"),
        ("model file missing", lambda inputs: _set_of_rank(inputs, flag="--model", value="no/such.yaml"), "no/such.yaml"),
        ("plan", _other_plan, "plan"),
        ("data", _other_data, "--data-path"),
        ("unknown flag", lambda inputs: _set_of_rank(inputs, flag="--no-such-flag", value=1), "--no-such-flag"),
    ):
        yield Mutation(f"rank: {name} of one", change, (named,), must_be_refused=True)


def _set_of_rank(inputs: Inputs, *, flag: str, value: object, rank: int = NUM_RANKS - 1) -> None:
    inputs.flags_of_rank[rank] = {flag: value}


def _other_model(inputs: Inputs) -> None:
    other = inputs.folder / "other.yaml"
    other.write_text(yaml.safe_dump(replaced(MODEL, ("units", "vision", "ffn_hidden_size"), 48), sort_keys=False))
    _set_of_rank(inputs, flag="--model", value=other)


def _other_plan(inputs: Inputs) -> None:
    inputs.write_plan(PLAN)
    other = inputs.folder / "other_plan.yaml"
    swapped = replaced(
        replaced(PLAN, ("units", "vision", "replicas", 0, "stages", 0, "ranks"), [1]),
        ("units", "llm", "replicas", 0, "stages", 0, "ranks"),
        [0],
    )
    other.write_text(yaml.safe_dump(swapped, sort_keys=False))
    _set_of_rank(inputs, flag="--plan", value=other)


def _other_data(inputs: Inputs) -> None:
    other = inputs.manifest.with_name("other.jsonl")
    other.write_text("".join(json.dumps(entry) + "\n" for entry in reversed(manifest_entries())))
    _set_of_rank(inputs, flag="--data-path", value=other)
