"""What a launch is given, and one mutation of it: a flag, a file or one rank is changed in one place, all else stays."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.distributed.small_run import MODEL, NUM_RANKS

PLAN = {
    "units": {
        "vision": {"replicas": [{"stages": [{"ranks": [0], "layers": [[0, 3]]}]}]},
        "llm": {"tensor_parallel_size": 1, "replicas": [{"stages": [{"ranks": [1], "layers": [[0, 4]]}]}]},
    }
}
"""The plan of a run that takes a file in place of the sizes."""
CLUSTER = {"gpus_per_node": 2, "peak_tflops": 0.1, "memory_gb": 8.0, "dtype": "float64"}
CLUSTER |= {"intra_node": {"bandwidth_gbytes_per_second": 1.0, "latency_us": 10.0}}
CLUSTER |= {"inter_node": {"bandwidth_gbytes_per_second": 1.0, "latency_us": 10.0, "nics_per_node": 1}}
"""A machine, for a run that goes by durations."""
CONFIG = {"train-iters": 2, "global-batch-size": 2, "lr": 1e-3, "seed": 5, "balance": "orchmllm", "freeze": ["vision"]}
CONFIG |= {"no-progress-bar": True}
"""Flags of a run that takes them from a file."""
DOCUMENTS = {"model": MODEL, "plan": PLAN, "cluster": CLUSTER, "config": CONFIG}
"""What a run can take from a file, by its flag."""
REPLACED_FLAGS = {"plan": ("--vision-dp", "--llm-dp"), "config": tuple(f"--{name}" for name in CONFIG)}


class Given(StrEnum):
    """What a run can be given beside its working files, by the name of its folder."""

    CHECKPOINT = "saved"
    FOLDER = "folder"
    """Of Hugging Face."""
    ADAPTER = "adapter"
    """Of PEFT, beside such a folder."""
    CHAT = "chat"
    """A folder with a tokenizer, a chat template and an image processor, its weights in several files."""


@dataclass
class Inputs:
    """All that a launch is given; a mutation changes one thing of it."""

    folder: Path
    random: random.Random
    flags: dict[str, object]
    flags_of_rank: dict[int, dict[str, object]] = field(default_factory=dict)
    """Flags that one rank has in another form; None: a switch."""
    environment_of_rank: dict[int, dict[str, str]] = field(default_factory=dict)
    num_ranks: int = NUM_RANKS

    def give(self, kind: str, document: Any) -> Path:
        """Have the run take a document from a file in the place of some flags."""
        path = self.folder / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        for flag in REPLACED_FLAGS.get(kind, ()):
            self.flags.pop(flag, None)
        self.flags |= {f"--{kind}": path, **({"--balance": "auto"} if kind == "cluster" else {})}
        return path

    @property
    def manifest(self) -> Path:
        return self.folder / "data" / "manifest.jsonl"

    @property
    def checkpoint(self) -> Path:
        return next((self.folder / "saved").glob("step_*"))


class Mutation(NamedTuple):
    name: str
    """Its area, a colon, and what it does."""
    apply: Callable[[Inputs], object]
    names: tuple[str, ...] = ()
    """What a refusal's message must contain: the flag, or the file and the key."""
    must_be_refused: bool = False
    given: Given | None = None

    @property
    def area(self) -> str:
        """The first word of the name: flag, model, plan, cluster, manifest, checkpoint, folder, producer, ..."""
        return self.name.split(":")[0]


def short(value: Any) -> str:
    """Return a value's text for the name of a mutation: long ones by their beginning."""
    text = repr(value) if not isinstance(value, str) else value or "''"
    return text if len(text) <= 24 else f"{text[:8]}...({len(text)} characters)"
