"""What a launch is given, and one mutation of it: a flag, a file or one rank is changed in one place, all else stays."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

PLAN = {
    "units": {
        "vision": {"replicas": [{"stages": [{"ranks": [0], "layers": [[0, 3]]}]}]},
        "llm": {"tensor_parallel_size": 1, "replicas": [{"stages": [{"ranks": [1], "layers": [[0, 4]]}]}]},
    }
}
"""The plan of a run that takes a file in place of the sizes."""


@dataclass
class Inputs:
    """All that a launch is given; a mutation changes one thing of it."""

    folder: Path
    random: random.Random
    flags: dict[str, object]
    flags_of_rank: dict[int, dict[str, object]] = field(default_factory=dict)
    """Flags that one rank has in another form; None: a switch."""
    environment_of_rank: dict[int, dict[str, str]] = field(default_factory=dict)

    @property
    def manifest(self) -> Path:
        """The manifest file."""
        return self.folder / "data" / "manifest.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint that the run loads."""
        return next((self.folder / "saved").glob("step_*"))

    def write_plan(self, plan: Any) -> Path:
        """Have the run take a plan file in place of the sizes."""
        path = self.folder / "plan.yaml"
        path.write_text(yaml.safe_dump(plan, sort_keys=False))
        for flag in ("--vision-dp", "--llm-dp"):
            self.flags.pop(flag, None)
        self.flags["--plan"] = path
        return path


class Mutation(NamedTuple):
    """One kind of mutation."""

    name: str
    """Its area, a colon, and what it does."""
    apply: Callable[[Inputs], object]
    names: tuple[str, ...] = ()
    """What a refusal's message must contain: the flag, or the file and the key."""
    must_be_refused: bool = False
    needs_checkpoint: bool = False

    @property
    def area(self) -> str:
        """flag, model, plan, manifest, image, checkpoint or rank."""
        return self.name.split(":")[0]


def short(value: Any) -> str:
    """Return a value's text for the name of a mutation: long ones by their beginning."""
    text = repr(value) if not isinstance(value, str) else value or "''"
    return text if len(text) <= 24 else f"{text[:8]}...({len(text)} characters)"
