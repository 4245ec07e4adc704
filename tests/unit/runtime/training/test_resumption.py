"""What a run starts from, for every combination of flags and folders."""

from pathlib import Path
from typing import Any

import pytest

from megatron.runtime.flags.configuration import CheckpointConfig
from megatron.runtime.training.resumption import Start, choose_start
from multimodal.values.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`full` holds a checkpoint, `own` holds one, too; `empty` none."""
    for path in ("full/step_00000005", "own/step_00000002", "empty"):
        (tmp_path / path).mkdir(parents=True)
    return tmp_path


def start_of(folder: Path, **flags: Any) -> Start | None:
    places = {name: folder / value if isinstance(value, str) else value for name, value in flags.items()}
    return choose_start(CheckpointConfig(**places))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"save": "own"}, None),
        ({"load": "full"}, ("full", "--load", True)),
        ({"load": "full", "save": "empty"}, ("full", "--load", True)),
        ({"load": "own", "save": "own"}, ("own", "--load", True)),
        ({"load": "empty", "save": "empty"}, None),
        ({"finetune": True, "load": "full"}, ("full", "--load", False)),
        ({"finetune": True, "load": "full", "save": "empty"}, ("full", "--load", False)),
        ({"finetune": True, "load": "full", "save": "own"}, ("own", "--save", True)),
        ({"finetune": True, "load": "gone", "save": "own"}, ("own", "--save", True)),
        ({"pretrained_checkpoint": "full"}, ("full", "--pretrained-checkpoint", False)),
        ({"pretrained_checkpoint": "full", "save": "own"}, ("full", "--pretrained-checkpoint", False)),
        ({"pretrained_checkpoint": "full", "load": "empty", "save": "empty"}, ("full", "--pretrained-checkpoint", False)),
        ({"pretrained_checkpoint": "full", "load": "own", "save": "own"}, ("own", "--load", True)),
    ],
)
def test_what_a_run_starts_from(folder: Path, flags: dict[str, Any], expected: tuple[str, str, bool] | None) -> None:
    assert start_of(folder, **flags) == (None if expected is None else Start(folder / expected[0], *expected[1:]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"load": "empty"}, "--load {}/empty: no complete checkpoint there; give a folder that --save wrote to, or leave"),
        ({"load": "gone", "save": "own"}, "--load {}/gone: no complete checkpoint there"),
        ({"finetune": True, "load": "empty"}, "--load {}/empty: no complete checkpoint there"),
        ({"finetune": True, "load": "gone", "save": "empty"}, "--load {}/gone: no complete checkpoint there"),
        ({"pretrained_checkpoint": "empty"}, "--pretrained-checkpoint {}/empty: no complete checkpoint there"),
        (
            {"pretrained_checkpoint": "gone", "load": "empty", "save": "empty"},
            "--pretrained-checkpoint {}/gone: no complete checkpoint there",
        ),
    ],
)
def test_a_folder_that_should_hold_a_checkpoint(folder: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as problem:
        start_of(folder, **flags)
    assert str(problem.value).startswith(message.format(folder))
