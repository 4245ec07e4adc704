"""Mutations of a checkpoint that the run loads: its files, its `braid.json`, and flags that do not go with it."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.distributed.mutations.files import LEAVES, place_mutations, places, replaced
from tests.distributed.mutations.flags import set_flag
from tests.distributed.mutations.mutation import Given, Inputs, Mutation, short


def checkpoint_mutations() -> Iterator[Mutation]:
    """Change the checkpoint, or resume it with flags of another run."""
    changes: dict[str, Callable[[Inputs, Path], object]] = {
        "flipped": _flip,
        "truncated": lambda inputs, path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "emptied": lambda inputs, path: path.write_bytes(b""),
        "removed": lambda inputs, path: path.unlink(),
        "longer": lambda inputs, path: path.write_bytes(path.read_bytes() + b"\0" * 8),
        "replaced by a pickle": lambda inputs, path: path.write_bytes(b"cos\nabort\n(tR."),
    }
    for name, change in changes.items():
        for which in range(3):
            apply = partial(_change_checkpoint, change=change, which=which)
            yield Mutation(f"checkpoint: file {which} {name}", apply, ("saved",), must_be_refused=True, given=Given.CHECKPOINT)
    for file in ("braid.json", "tensors.json", "rank_00000.bin"):
        find = partial(_find, file=file)
        yield from place_mutations("checkpoint", find, file=file, given=Given.CHECKPOINT)
    for leaf in LEAVES:
        apply = partial(_change_manifest_of_checkpoint, leaf=leaf)
        yield Mutation(f"checkpoint: something = {short(leaf)}", apply, ("saved",), must_be_refused=True, given=Given.CHECKPOINT)
    yield Mutation(
        "checkpoint: of another step",
        lambda inputs: inputs.checkpoint.rename(inputs.checkpoint.parent / "step_00000003"),
        ("saved",),
        must_be_refused=True,
        given=Given.CHECKPOINT,
    )
    for name, flag, value in (
        ("seed", "--seed", 7),
        ("batch", "--global-batch-size", 3),
        ("mask", "--attention-mask", "embedded"),
        ("precision", "--dtype", "float32"),
    ):
        apply = partial(set_flag, flag=flag, value=value)
        yield Mutation(f"checkpoint: of another {name}", apply, (flag,), must_be_refused=True, given=Given.CHECKPOINT)


def _change_checkpoint(inputs: Inputs, *, change: Callable[[Inputs, Path], object], which: int) -> None:
    files = sorted(path for path in inputs.checkpoint.rglob("*") if path.is_file())
    change(inputs, files[which % len(files)])


def _find(inputs: Inputs, *, file: str) -> Path:
    return inputs.checkpoint / file


def _flip(inputs: Inputs, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[inputs.random.randrange(len(content))] ^= 1 << inputs.random.randrange(8)
    path.write_bytes(content)


def _change_manifest_of_checkpoint(inputs: Inputs, *, leaf: Any) -> None:
    path = inputs.checkpoint / "braid.json"
    document = json.loads(path.read_text())
    found = [place for place, value in places(document) if value != leaf]
    path.write_text(json.dumps(replaced(document, inputs.random.choice(found), leaf)))
