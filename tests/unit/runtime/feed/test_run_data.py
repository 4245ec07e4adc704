"""What must be the same for a run to go on as it was, and what may change."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.runtime.feed.data_sets import DataSets, RunData, check_same_data, describe_data
from megatron.runtime.flags.configuration import (
    DataConfig,
    ModelConfig,
    OptimizerSettings,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
)
from multimodal.values.errors import CheckpointError


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run over a manifest, with a tokenizer's file."""
    (tmp_path / "manifest.jsonl").write_text("first\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    return RunConfig(
        model=ModelConfig(model=Path("model.yaml")),
        parallelism=ParallelismConfig(),
        training=TrainingConfig(global_batch_size=4, train_iters=10),
        optimizer=OptimizerSettings(lr=0.1),
        data=DataConfig(
            data_path=(str(tmp_path / "manifest.jsonl"),),
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(tmp_path / "tokenizer.json"),
        ),
    )


def describe(config: RunConfig, num_samples: int = 9) -> RunData:
    samples: Any = range(num_samples)
    return describe_data(config, DataSets(samples, samples, SimpleNamespace()))  # type: ignore[arg-type]


def change(config: RunConfig, group: str, **values: Any) -> RunConfig:
    changed: RunConfig = replace(config, **{group: replace(getattr(config, group), **values)})
    return changed


@pytest.mark.parametrize(
    ("group", "name", "now", "words"),
    [
        (
            "training",
            "seed",
            7,
            "with --seed 1234, this run has 7, so the data would not go on as it was; use --seed 1234, or start",
        ),
        ("training", "global_batch_size", 8, "use --global-batch-size 4, add --new-phase to go on otherwise from here, or start"),
        ("data", "split", "9,1", "--split 969,30,1, this run has 9,1"),
        ("data", "seq_length", 64, "--seq-length 4096, this run has 64"),
        ("data", "tokenizer_type", "ByteTokenizer", "--tokenizer-type HuggingFaceTokenizer, this run has ByteTokenizer"),
        ("model", "attention_mask", "prefix", "--attention-mask causal, this run has prefix"),
    ],
)
def test_flags_that_must_be_the_same(config: RunConfig, group: str, name: str, now: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as problem:
        check_same_data("--load d", saved=describe(config), current=describe(change(config, group, **{name: now})))
    message = str(problem.value)
    assert message.startswith("--load d: it was trained ")
    assert words in message
    assert message.endswith("start another run from its weights alone: --finetune, with a --save of its own")


@pytest.mark.parametrize(("flag", "name"), [("--data-path", "data_path"), ("--tokenizer-model", "tokenizer_model")])
def test_files_count_by_their_content(config: RunConfig, tmp_path: Path, flag: str, name: str) -> None:
    saved = describe(config)
    is_data = name == "data_path"
    file = Path(config.data.data_path[0] if is_data else str(config.data.tokenizer_model))

    def named(path: Path) -> Any:
        return (str(path),) if is_data else str(path)

    (tmp_path / "moved").mkdir()
    moved = file.rename(tmp_path / "moved" / file.name)
    for place in (moved, moved.parent):  # the file, or the folder that holds it
        check_same_data("--load d", saved=saved, current=describe(change(config, "data", **{name: named(place)})))
    moved.write_text("another\n")
    with pytest.raises(CheckpointError) as problem:
        check_same_data("--load d", saved=saved, current=describe(change(config, "data", **{name: named(moved)})))
    assert f"trained with {flag} {file} (content " in str(problem.value)
    assert f"this run has {moved} (content " in str(problem.value)


def test_the_same_manifest_with_other_usable_samples(config: RunConfig) -> None:
    with pytest.raises(CheckpointError, match="--data-path 9 training samples, this run has 8 training samples"):
        check_same_data("--load d", saved=describe(config), current=describe(config, num_samples=8))


def test_digits_have_no_file(config: RunConfig) -> None:
    digits = change(config, "data", data_path=("digits",), program_samples=50)
    saved = describe(digits)
    check_same_data("--load d", saved=saved, current=describe(change(digits, "data", split="1")))
    with pytest.raises(CheckpointError, match="--program-samples 50, this run has 60"):
        check_same_data("--load d", saved=saved, current=describe(change(digits, "data", program_samples=60)))
    with pytest.raises(CheckpointError, match=r"--data-path digits \(content [0-9a-f]{12}\), this run has /"):
        check_same_data("--load d", saved=saved, current=describe(config))


@pytest.mark.parametrize(
    ("group", "values"),
    [
        ("training", {"train_iters": 99, "schedule": "gpipe", "micro_batch_size": 2, "balance": "orchmllm"}),
        ("optimizer", {"lr": 0.5, "weight_decay": 0.0}),
        ("parallelism", {"sequence_parallel": True}),
        ("data", {"num_workers": 0, "lengths_from": "decode"}),
        ("model", {"model": Path("moved.yaml"), "attention_backend": "blocks", "freeze": ("vision",)}),
    ],
)
def test_what_may_change(config: RunConfig, group: str, values: dict[str, Any]) -> None:
    check_same_data("--load d", saved=describe(config), current=describe(change(config, group, **values)))


def test_what_an_older_checkpoint_does_not_know_is_not_compared(config: RunConfig) -> None:
    check_same_data("--load d", saved={"seed": 1234}, current=describe(config))


def test_a_new_phase_may_change_data_and_batches_but_not_seed_or_tokenizer(config: RunConfig) -> None:
    for group, values in (("training", {"global_batch_size": 8}), ("data", {"split": "9,1"}), ("data", {"seq_length": 64})):
        current = describe(change(config, group, **values), num_samples=7)
        check_same_data("--load d", saved=describe(config), current=current, is_new_phase=True)
    for group, values in (("training", {"seed": 8}), ("data", {"tokenizer_type": "ByteTokenizer"})):
        with pytest.raises(CheckpointError, match="the data would not go on as it was"):
            check_same_data(
                "--load d", saved=describe(config), current=describe(change(config, group, **values)), is_new_phase=True
            )
