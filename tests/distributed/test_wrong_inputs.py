"""Wrong inputs, of all ranks or of one: every rank ends by itself, soon, and one message names the place and the fix.

No launcher is there to end them. Some are drawn from the single mutations of `mutations/` (`benchmarks/mutated_inputs.py`
runs as many as one wants): each is refused so, or trains as one process. Others are what is likely, and what exactly is said.
What the parser of flags refuses by itself, of which some rows are here, is in tests/unit/runtime/flags and tests/unit/values.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from megatron.runtime.checkpoint.claim import MARK_NAME, Writer
from tests.distributed.conftest import Once
from tests.distributed.launch import launch
from tests.distributed.mutations import table
from tests.distributed.mutations.files import replaced, rewrite
from tests.distributed.mutations.mutation import Given, Inputs, Mutation
from tests.distributed.mutations.run import run_mutation, save_given
from tests.distributed.small_run import MODEL, NUM_RANKS, working_flags, write_working_files


def flags(*, without: str = "", **given: object) -> table.Change:
    """Give flags, written as names (None: a switch), and leave some out."""

    def change(inputs: Inputs) -> None:
        for flag in without.split():
            del inputs.flags[flag]
        inputs.flags |= table.named(given)

    return change


def model(place: str, value: object, *, ranks: int = NUM_RANKS) -> table.Change:
    """Write another value into the model file; place: keys from a unit's name on."""

    def change(inputs: Inputs) -> None:
        inputs.give("model", replaced(MODEL, ("units", *place.split(".")), value))
        inputs.num_ranks = ranks

    return change


def data(name: str, change: Callable[[bytes], bytes]) -> table.Change:
    return partial(rewrite, find=lambda inputs: inputs.folder / "data" / name, change=change)


def manifest(old: bytes, new: bytes) -> table.Change:
    return data("manifest.jsonl", lambda text: text.replace(old, new))


def put_images_last(manifest: bytes) -> bytes:
    entries = [json.loads(line) for line in manifest.splitlines()]
    return b"\n".join(json.dumps({**entry, "segments": entry["segments"][::-1]}).encode() for entry in entries)


def truncate_largest(inputs: Inputs) -> None:
    largest = max((path for path in inputs.checkpoint.iterdir()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def save_where_this_process_does(inputs: Inputs) -> None:
    """This process lives, and says that it saves there."""
    inputs.flags["--save"] = save = inputs.folder / "saved"
    save.mkdir()
    (save / MARK_NAME).write_text(json.dumps(asdict(Writer.of_this_process({}))))


def under_a_file(flag: str, name: str) -> table.Change:
    """Name a folder where one cannot be made."""

    def change(inputs: Inputs) -> None:
        inputs.flags[flag] = inputs.folder / "model.yaml" / name

    return change


LARGE = {**MODEL["units"]["llm"], "hidden_size": 32768, "ffn_hidden_size": 131072, "num_layers": 64}
OF_LATENTS = {"patch_size": 16, "merge_size": 1, "latents": {"directory": "no/such"}}
OF_ALL: dict[str, tuple[table.Change, tuple[str, ...]]] = {
    "no model": (flags(without="--model"), ("--model",)),
    "misspelt flag": (flags(trian_iters=3), ("--trian-iters", "--train-iters")),
    "two backbones": (model("other", MODEL["units"]["llm"]), ("exactly one", "backbone")),
    "a generator of nothing": (
        model("painter", {**MODEL["units"]["llm"], "role": "generator"}, ranks=3),
        ("'painter'", "'image'"),
    ),
    "latents without an autoencoder": (
        model("painter", {**MODEL["units"]["llm"], "role": "generator", "flow": {}, "image": OF_LATENTS}, ranks=3),
        ("'painter'", "no/such", "config.json", "`vae`"),
    ),
    "no memory for the model": (
        model("llm", LARGE),
        ("needs at least", "are free", "--llm-tensor-model-parallel-size", "--allow-low-memory"),
    ),
    "nccl without CUDA": (flags(distributed_backend="nccl"), ("nccl", "gloo")),
    "manifest missing": (flags(data_path="no/such.jsonl"), ("no/such.jsonl", "--data-path")),
    "manifest empty": (data("manifest.jsonl", lambda text: b""), ("manifest.jsonl",)),
    "manifest line truncated": (data("manifest.jsonl", lambda text: text[:-40]), ("manifest.jsonl", "4")),
    "no sample that the model takes": (manifest(b'"image"', b'"audio"'), ("audio",)),
    "image behind text under prefix": (
        table.both(data("manifest.jsonl", put_images_last), flags(attention_mask="prefix")),
        ("line 1", "'0'", "0.png", "images first", "--attention-mask embedded"),
    ),
    "image missing": (lambda inputs: (inputs.folder / "data" / "2.png").unlink(), ("2.png",)),
    "image truncated": (data("2.png", lambda image: image[: len(image) // 2]), ("2.png", "replace")),
    "image of another size": (manifest(b'"width": 64', b'"width": 65'), ("2.png", "65")),
    "image outside the manifest's folder": (
        manifest(b'"0.png"', b'"/proc/self/environ"'),
        ("line 1", "'0'", "/proc/self/environ", "--allow-outside-paths"),
    ),
    "image larger than allowed": (flags(max_image_pixels=3071), ("line 3", "'2'", "64 x 48", "--max-image-pixels")),
    "tokenizer missing": (flags(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="no/such"), ("--tokenizer-model",)),
    "sample longer than allowed": (flags(seq_length=3), ("--seq-length",)),
    "nothing to load": (flags(load="no/such/folder"), ("no/such/folder", "--load")),
    "another run saves there": (
        save_where_this_process_does,
        ("another run writes there", f"process {os.getpid()} on", "--save"),
    ),
    "report under a file": (under_a_file("--tensorboard-dir", "board"), ("--tensorboard-dir", "board", "another folder")),
    "no producer there": (
        partial(table.name_producer, address="127.0.0.1:9"),
        ("--producers 127.0.0.1:9: ", "start it with python tools/producer.py --listen"),
    ),
    "a weight of none": (
        manifest(b'{"id"', b'{"loss_weight": 0, "id"'),
        ("'loss_weight' must be a number above 0, found 0; correct it",),
    ),
    "two sets with one name": (
        flags(eval_iters=1, valid_data_path=["a=x.jsonl", "a=y.jsonl"]),
        ("every set needs a name of its own, other than 'held out'; write NAME=PATH",),
    ),
    "a set that is missing": (
        flags(eval_iters=1, valid_data_path=["a=gone.jsonl"]),
        ("--valid-data-path gone.jsonl: gone.jsonl: no such manifest",),
    ),
    "save into a file": (under_a_file("--save", ""), ("model.yaml",)),
    "loss becomes infinite": (flags(lr="1e30", clip_grad=0, train_iters=6, without="--exit-interval"), ("--lr",)),
}
OF_A_CHECKPOINT: dict[str, tuple[table.Change, tuple[str, ...]]] = {
    "truncated": (truncate_largest, ("step_00000002",)),
    "of other data": (
        data("manifest.jsonl", lambda text: b"".join(reversed(text.splitlines(keepends=True)))),
        ("step_00000002", "--data-path", "--finetune"),
    ),
    "of another model": (model("llm.hidden_size", 64), ("hidden_size",)),
    "of other batches": (flags(global_batch_size=3), ("--global-batch-size 2",)),
}
AREAS_OF_ROWS = {"all": OF_ALL, "checkpoint": OF_A_CHECKPOINT, "rank": table.OF_ONE_RANK}
WRONG = [
    Mutation(f"{area}: {name}", change, names, must_be_refused=True, given=Given.CHECKPOINT if area == "checkpoint" else None)
    for area, rows in AREAS_OF_ROWS.items()
    for name, (change, names) in rows.items()
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_all_ranks_end_with_one_message_that_names_the_place_and_the_fix(wrong: Mutation, tmp_path: Path, once: Once) -> None:
    outcome = run_mutation(wrong, folder=tmp_path / "run", given=once(save_given) if wrong.given else tmp_path)
    assert not outcome.problems, f"{outcome.problems}\n{outcome.output}"
    assert outcome.exit_codes == (2,) * len(outcome.exit_codes) or wrong.name == "all: loss becomes infinite", outcome.exit_codes


def test_the_run_that_is_made_wrong_works(tmp_path: Path) -> None:
    write_working_files(tmp_path)
    launched = launch(working_flags(tmp_path), num_ranks=NUM_RANKS)
    assert launched.exit_codes == (0,) * NUM_RANKS, launched.output


def test_what_changes_nothing_may_differ(tmp_path: Path) -> None:
    """One rank reads a copy of the manifest, counts on another peak, and writes a log of its own."""
    same = table.other_file("--data-path", lambda inputs: inputs.manifest.read_text())

    def change(inputs: Inputs) -> None:
        same(inputs)
        inputs.flags_of_rank[1] |= {"--peak-tflops": 2, "--log-json": inputs.folder / "other.jsonl"}

    outcome = run_mutation(Mutation("rank: harmless", change), folder=tmp_path / "run", given=tmp_path)
    assert not (outcome.is_refused or outcome.problems), f"{outcome.problems}\n{outcome.output}"


AREAS = {mutation.area for mutation in table.list_mutations()}
MUTATIONS = table.draw_mutations(len(AREAS), seed=12)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutated_run_is_refused_with_a_message_or_trains_as_one_process(mutation: Mutation, tmp_path: Path, once: Once) -> None:
    outcome = run_mutation(mutation, folder=tmp_path / "run", given=once(save_given))
    assert not outcome.problems, f"{outcome.problems}\n{outcome.message}\n{outcome.output}"


def test_there_are_enough_kinds() -> None:
    assert len(table.list_mutations()) >= 500
    assert {mutation.area for mutation in MUTATIONS} == AREAS
