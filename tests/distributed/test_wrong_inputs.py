"""Wrong inputs: every rank ends by itself, soon, and one message names the fix. No launcher is there to end them."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import yaml

from megatron.runtime.checkpoint.claim import MARK_NAME, Writer
from tests.distributed.launch import Launched, launch
from tests.distributed.small_run import MODEL, NUM_RANKS, working_flags, write_working_files

TIME_LIMIT_SECONDS = 120.0
"""Beyond this a run counts as hanging; on an idle machine each ends in a few seconds."""
Prepare = Callable[[Path], Sequence[object]]


@dataclass(frozen=True)
class WrongInput:
    """One wrong input: what it does to a run that would work, and what the message must say."""

    name: str
    prepare: Prepare
    """Changes files in the folder; returns further flags."""
    says: tuple[str, ...]
    """Parts of the message: the place and the fix."""
    drops: tuple[str, ...] = ()
    """Flags of the working run that are left out."""
    num_ranks: int = NUM_RANKS


def flags_only(*flags: object) -> Prepare:
    """A wrong flag needs no file."""
    return lambda folder: flags


def change_model(change: Callable[[dict[str, dict[str, object]]], object]) -> Prepare:
    """Write another model file; `change` edits the units in place."""

    def prepare(folder: Path) -> Sequence[object]:
        units = {name: dict(unit) for name, unit in MODEL["units"].items()}
        change(units)
        (folder / "model.yaml").write_text(yaml.safe_dump({"units": units}, sort_keys=False))
        return ()

    return prepare


def change_file(name: str, change: Callable[[bytes], bytes]) -> Prepare:
    """Change one file of the data."""

    def prepare(folder: Path) -> Sequence[object]:
        path = folder / "data" / name
        path.write_bytes(change(path.read_bytes()))
        return ()

    return prepare


def put_images_last(manifest: bytes) -> bytes:
    """Of every sample of a manifest."""
    entries = [json.loads(line) for line in manifest.splitlines()]
    return b"\n".join(json.dumps({**entry, "segments": entry["segments"][::-1]}).encode() for entry in entries)


def plan_file(units: dict[str, list[tuple[list[int], list[list[int]]]]]) -> Prepare:
    """Use a plan file: unit -> stages of its one replica as (ranks, layer ranges)."""

    def prepare(folder: Path) -> Sequence[object]:
        plan = {
            name: {"replicas": [{"stages": [{"ranks": ranks, "layers": layers} for ranks, layers in stages]}]}
            for name, stages in units.items()
        }
        (folder / "plan.yaml").write_text(yaml.safe_dump({"units": plan}))
        return ("--plan", folder / "plan.yaml")

    return prepare


def saved_then(change: Callable[[Path], object], *flags: object) -> Prepare:
    """Train and save first, then change what was saved and load it."""

    def prepare(folder: Path) -> Sequence[object]:
        save = folder / "saved"
        base = [item for pair in working_flags(folder).items() for item in pair]
        saved = launch([*base, "--save", save], num_ranks=NUM_RANKS)
        assert saved.exit_codes == (0,) * NUM_RANKS, saved.output
        change(folder)
        return ("--load", save, *flags)

    return prepare


def mark_of_this_process(folder: Path) -> Sequence[object]:
    """Save where this very process, which lives, says that it saves."""
    save = folder / "saved"
    save.mkdir()
    (save / MARK_NAME).write_text(json.dumps(asdict(Writer.of_this_process({}))))
    return ("--save", save)


def change_manifest(folder: Path) -> None:
    """Give the same number of samples another order."""
    manifest = folder / "data" / "manifest.jsonl"
    manifest.write_text("".join(reversed(manifest.read_text().splitlines(keepends=True))))


def truncate_largest(folder: Path) -> None:
    """Cut the largest file of a checkpoint in half."""
    largest = max((path for path in (folder / "saved").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def widen_model(folder: Path) -> None:
    """Another model than the one that was saved."""
    change_model(lambda units: units["llm"].update(hidden_size=64))(folder)


def write_file_in_place_of_folder(folder: Path) -> Sequence[object]:
    """--save names a file."""
    (folder / "occupied").write_text("")
    return ("--save", folder / "occupied")


def report_under_a_file(folder: Path) -> Sequence[object]:
    """Where a folder cannot be made."""
    (folder / "file").write_text("")
    return ("--tensorboard-dir", folder / "file" / "board")


PLAN_FLAGS = ("--vision-dp", "--llm-dp")
WRONG_INPUTS = [
    WrongInput("no model", flags_only(), ("--model",), drops=("--model",)),
    WrongInput("model file missing", flags_only(), ("no/such.yaml", "no such file"), drops=("--model",)),
    WrongInput("misspelt flag", flags_only("--trian-iters", 3), ("--trian-iters", "--train-iters")),
    WrongInput("broken model file", change_model(lambda units: units), ("model.yaml", "parsed")),
    WrongInput(
        "unknown key in the model", change_model(lambda units: units["llm"].update(num_layer=3)), ("num_layer", "num_layers")
    ),
    WrongInput(
        "heads do not divide",
        change_model(lambda units: units["llm"].update(num_attention_heads=5)),
        ("divisible", "kv_channels"),
    ),
    WrongInput("two backbones", change_model(lambda units: units.update(other=units["llm"])), ("exactly one", "backbone")),
    WrongInput(
        "a generator of nothing",
        change_model(lambda units: units.update(painter={**units["llm"], "role": "generator"})),
        ("'painter'", "'image'"),
        num_ranks=3,
    ),
    WrongInput(
        "no memory for the model",
        change_model(lambda units: units["llm"].update(hidden_size=32768, ffn_hidden_size=131072, num_layers=64)),
        ("needs at least", "are free", "--llm-tensor-model-parallel-size", "--allow-low-memory"),
    ),
    WrongInput("sizes do not fit the processes", flags_only("--llm-pp", 2), ("launch 3",)),
    WrongInput("a rank is left over", flags_only("--vision-tp", 2), ("launch",)),
    WrongInput("heads not divisible by tp", flags_only("--llm-tp", 3), ("--llm-tensor-model-parallel-size",), num_ranks=4),
    WrongInput("more stages than layers", flags_only("--llm-pp", 5), ("stages", "1 to 2"), num_ranks=6),
    WrongInput(
        "context parallelism of a backend that cannot",
        flags_only("--llm-cp", 2, "--attention-backend", "sequences"),
        ("--attention-backend blocks",),
        num_ranks=3,
    ),
    WrongInput(
        "plan for another model",
        plan_file({"audio": [([0], [[0, 3]])], "llm": [([1], [[0, 4]])]}),
        ("plan", "vision"),
        drops=PLAN_FLAGS,
    ),
    WrongInput(
        "plan leaves layers out",
        plan_file({"vision": [([0], [[0, 3]])], "llm": [([1], [[0, 3]])]}),
        ("layers 0 to 3",),
        drops=PLAN_FLAGS,
    ),
    WrongInput(
        "plan for more ranks",
        plan_file({"vision": [([0], [[0, 3]])], "llm": [([1], [[0, 2]]), ([2], [[2, 4]])]}),
        ("launch 3",),
        drops=PLAN_FLAGS,
    ),
    WrongInput(
        "plan and sizes",
        plan_file({"vision": [([0], [[0, 3]])], "llm": [([1], [[0, 4]])]}),
        ("--plan", "--vision-data-parallel-size"),
    ),
    WrongInput("freeze an unknown unit", flags_only("--freeze", "visoin"), ("visoin", "vision")),
    WrongInput("everything frozen", flags_only("--freeze", "vision", "llm", "--freeze-projector", "vision"), ("freeze",)),
    WrongInput("microbatch of zero", flags_only("--micro-batch-size", 0), ("--micro-batch-size", "1")),
    WrongInput(
        "microbatch above global batch", flags_only("--micro-batch-size", 8), ("--micro-batch-size", "--global-batch-size")
    ),
    WrongInput("sequence parallel without tp", flags_only("--sequence-parallel"), ("--sequence-parallel", "tensor")),
    WrongInput("save interval without save", flags_only("--save-interval", 1), ("--save-interval", "--save")),
    WrongInput("two precisions", flags_only("--bf16", "--dtype", "float64"), ("--bf16", "--dtype")),
    WrongInput(
        "a flag that would be ignored", flags_only("--lr-decay-style", "constant", "--min-lr", 1e-5), ("--min-lr", "constant")
    ),
    WrongInput(
        "Transformer Engine missing", flags_only("--transformer-impl", "transformer_engine"), ("transformer_engine", "local")
    ),
    WrongInput("nccl without CUDA", flags_only("--distributed-backend", "nccl"), ("nccl", "gloo")),
    WrongInput(
        "manifest missing", flags_only("--data-path", "no/such.jsonl"), ("no/such.jsonl", "--data-path"), drops=("--data-path",)
    ),
    WrongInput("manifest empty", change_file("manifest.jsonl", lambda text: b""), ("manifest.jsonl",)),
    WrongInput(
        "manifest line truncated", change_file("manifest.jsonl", lambda text: text[: len(text) - 40]), ("manifest.jsonl", "4")
    ),
    WrongInput(
        "no sample that the model takes",
        change_file("manifest.jsonl", lambda text: text.replace(b'"image"', b'"audio"')),
        ("audio",),
    ),
    WrongInput(
        "image behind text under prefix",
        lambda folder: change_file("manifest.jsonl", put_images_last)(folder) or ("--attention-mask", "prefix"),
        ("line 1", "'0'", "0.png", "images first", "--attention-mask embedded"),
    ),
    WrongInput("image missing", lambda folder: (folder / "data" / "2.png").unlink() or (), ("2.png",)),
    WrongInput("image truncated", change_file("2.png", lambda image: image[: len(image) // 2]), ("2.png", "replace")),
    WrongInput(
        "image of another size",
        change_file("manifest.jsonl", lambda text: text.replace(b'"width": 64', b'"width": 65')),
        ("2.png", "65"),
    ),
    WrongInput(
        "tokenizer missing",
        flags_only("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "no/such"),
        ("--tokenizer-model",),
    ),
    WrongInput("sample longer than allowed", flags_only("--seq-length", 3), ("--seq-length",)),
    WrongInput("nothing to load", flags_only("--load", "no/such/folder"), ("no/such/folder", "--load")),
    WrongInput("checkpoint truncated", saved_then(truncate_largest), ("step_00000002",)),
    WrongInput("checkpoint of other data", saved_then(change_manifest), ("step_00000002", "--data-path", "--finetune")),
    WrongInput(
        "another run saves there", mark_of_this_process, ("another run writes there", f"process {os.getpid()} on", "--save")
    ),
    WrongInput("checkpoint of another model", saved_then(widen_model), ("hidden_size",)),
    WrongInput(
        "other batches than before",
        saved_then(lambda folder: None, "--global-batch-size", 3),
        ("--global-batch-size 2",),
        drops=("--global-batch-size",),
    ),
    WrongInput("report under a file", report_under_a_file, ("--tensorboard-dir", "board", "another folder")),
    WrongInput(
        "image outside the manifest's folder",
        change_file("manifest.jsonl", lambda text: text.replace(b'"0.png"', b'"/proc/self/environ"')),
        ("line 1", "'0'", "/proc/self/environ", "--allow-outside-paths"),
    ),
    WrongInput(
        "image larger than allowed",
        flags_only("--max-image-pixels", 3071),
        ("line 3", "'2'", "64 x 48", "--max-image-pixels"),
    ),
    WrongInput("save into a file", write_file_in_place_of_folder, ("occupied",)),
    WrongInput(
        "loss becomes infinite",
        flags_only("--lr", "1e30", "--clip-grad", 0, "--train-iters", 6),
        ("--lr",),
        drops=("--lr", "--train-iters"),
    ),
]


def run_wrong_input(wrong: WrongInput, folder: Path) -> Launched:
    """Launch the working run with one thing wrong."""
    write_working_files(folder)
    further = wrong.prepare(folder)
    if wrong.name == "broken model file":
        (folder / "model.yaml").write_text("units: [vision: {")
    if wrong.name == "model file missing":
        further = ("--model", "no/such.yaml")
    kept = {flag: value for flag, value in working_flags(folder).items() if flag not in wrong.drops}
    return launch(
        [item for pair in kept.items() for item in pair] + list(further),
        num_ranks=wrong.num_ranks,
        timeout_seconds=TIME_LIMIT_SECONDS,
    )


@pytest.mark.parametrize("wrong", WRONG_INPUTS, ids=lambda wrong: wrong.name)
def test_all_ranks_end_with_a_message_that_names_the_fix(wrong: WrongInput, tmp_path: Path) -> None:
    outcome = run_wrong_input(wrong, tmp_path)
    assert all(code not in (0, None) for code in outcome.exit_codes), outcome.output
    messages = [line for line in outcome.output.splitlines() if "error:" in line]
    assert messages, outcome.output
    assert all(part in messages[0] for part in wrong.says), messages[0]
    assert "Traceback" not in outcome.output, outcome.output


def test_the_run_that_is_made_wrong_works(tmp_path: Path) -> None:
    write_working_files(tmp_path)
    flags = [item for pair in working_flags(tmp_path).items() for item in pair]
    launched = launch(flags, num_ranks=NUM_RANKS, is_new_program=True)
    assert launched.exit_codes == (0,) * NUM_RANKS, launched.output
