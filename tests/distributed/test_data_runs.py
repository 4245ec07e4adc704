"""Runs over data of every form, in buckets, behind producers and with bad samples: their losses are those of plain files."""

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from megatron.runtime.launch.meeting import wait_until
from multimodal.data.index.index_cache import FOLDER_NAME
from tests.distributed.happenings import HAPPENINGS
from tests.distributed.launch import HANG_SECONDS, Forked, launch, read_log
from tests.distributed.small_run import LEFT_OUT, MODEL, losses, manifest_entries, train, working_flags, write_working_files
from tests.unit.data.forms.test_sample_files import FORMS, write_form
from tests.unit.data.remote_servers import BUCKET, s3_client, serve_folder, serve_s3, upload

NAMES = [f"{index}.png" for index in range(4)]
STEPS = {"--train-iters": 5, "--lr-decay-style": "constant", "--dtype": "float64"}
PACKED = {"--seq-length": 60, "--packing-seq-length": 60, "--global-batch-size": 1, "--micro-batch-size": 1}
SHOWN = {("rows.parquet", False), ("shards/train", False), ("manifest.jsonl", True)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    write_working_files(folder)
    return folder


@pytest.fixture(scope="module")
def expected(corpus: Path) -> dict[bool, dict[int, float]]:
    """Losses by step, of samples and of packed sequences, never interrupted."""
    path = write_form(corpus / "data", "llava.json", NAMES)
    return {
        is_packed: losses_by_step(train(corpus, {**STEPS, **flags, "--data-path": path})[0])
        for is_packed, flags in ((False, {}), (True, PACKED))
    }


def losses_by_step(entries: list[dict[str, Any]]) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in entries}


@pytest.mark.deep(when=lambda form, is_packed: (form, is_packed) not in SHOWN)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_is_killed_goes_on_as_if_it_was_not(form, is_packed, corpus, expected, tmp_path):
    flags = {**working_flags(corpus), **STEPS, **(PACKED if is_packed else {}), "--log-json": tmp_path / "log.jsonl"}
    flags |= {"--data-path": write_form(corpus / "data", form, NAMES), "--save": tmp_path / "saved", "--save-interval": 1}
    done = launch(flags, num_ranks=2, environment={HAPPENINGS: "all:step:3:KILL"})
    assert done.exit_codes == (-signal.SIGKILL,) * 2, done.output
    before = losses_by_step(read_log(tmp_path / "log.jsonl"))
    resumed = {"--load": tmp_path / "saved", "--num-workers": 2, "--vision-dp": LEFT_OUT, "--llm-dp": 1}
    behind = losses_by_step(train(corpus, {**flags, **resumed}, num_ranks=1)[0])
    assert min(behind) >= 2 and {*before, *behind} == {1, 2, 3, 4, 5}
    for step, loss in (before | behind).items():
        assert loss == pytest.approx(expected[is_packed][step], rel=0, abs=1e-9)


class Producer(NamedTuple):
    process: Forked
    address: str


@contextmanager
def producer(folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Producer]:
    """Start a producer in a process of its own, and end it."""
    flags = ("--listen", "127.0.0.1:0", "--num-workers", "1", "--token", str(folder / "token"))
    process = Forked("tools/producer.py", flags, environment, output=Path(tempfile.mkstemp(dir=folder)[1]))
    try:
        wait_until(lambda: process.poll() is not None or "listens at" in process.said, seconds=HANG_SECONDS)
        assert process.poll() is None, process.said
        yield Producer(process, process.said.split()[3].rstrip(","))
    finally:
        process.kill()
        process.wait(30)


def test_losses_are_the_same_with_producers_and_when_they_are_killed(tmp_path):
    """Two serve, and index the data first; one is killed after some steps, the other some steps later."""
    (tmp_path / "token").write_text("a secret of these tests")
    flags, log = {"--train-iters": 10, "--vision-tp": 2, "--balance": "orchmllm", "--num-workers": 1}, tmp_path / "log.jsonl"
    alone = losses(tmp_path, flags, num_ranks=3)
    (index,) = tmp_path.glob(f"**/{FOLDER_NAME}/*")
    kept = {path.name: path.read_bytes() for path in index.iterdir()}
    shutil.rmtree(index)
    with ExitStack() as stack:
        first, second = (stack.enter_context(producer(tmp_path)) for _ in range(2))

        def has_logged(step: int) -> bool:
            return len(read_log(log)) >= step

        def kill(processes: Sequence[int]) -> None:
            for step, each in ((2, first), (5, second)):
                assert wait_until(partial(has_logged, step), seconds=HANG_SECONDS, pause_seconds=0.02)
                each.process.kill()

        flags |= {"--producers": f"{first.address},{second.address}", "--producer-token": tmp_path / "token"}
        entries, done = train(tmp_path, flags, num_ranks=3, meanwhile=kill)
    assert done.output.count(f"producer {second.address} is done without") >= 1
    assert [entry["loss"] for entry in entries] == pytest.approx(alone, rel=0, abs=1e-12) and len(alone) == 10
    assert {path.name: path.read_bytes() for path in index.iterdir()} == kept


def test_a_bucket_trains_as_its_copy(tmp_path, monkeypatch):
    """Also from what is kept of it, by producers, and resumed; a file that is gone from it is a bad sample."""
    write_working_files(tmp_path)
    constant = {"--lr-decay-style": "constant"}
    expected = losses(tmp_path, {"--train-iters": 4, **constant})
    with serve_s3(monkeypatch) as bucket:
        upload(tmp_path / "data")
        said = {"environment": {name: value for name, value in os.environ.items() if name.startswith("AWS_")}}
        flags = {"--data-path": bucket, "--data-cache-path": tmp_path / "kept", "--num-workers": 1, **constant}
        saved = {**flags, "--save": tmp_path / "saved"}
        resumed = {**saved, "--load": tmp_path / "saved", "--train-iters": 4}
        assert losses(tmp_path, saved, **said) + losses(tmp_path, resumed, **said) == expected
        assert len([*(tmp_path / "kept" / "remote").glob("*/*")]) > 4
        (tmp_path / "token").write_text("a secret of these tests")
        with producer(tmp_path, **said) as found:
            by_producer = {"--producers": found.address, "--producer-token": tmp_path / "token"}
            assert losses(tmp_path, {**flags, **by_producer}, **said) == expected[:2]
        s3_client().delete_object(Bucket=BUCKET, Key="1.png")
        skipped = {"--data-path": bucket, "--bad-sample": "skip", "--bad-samples-per-thousand": 9}
        _, done = train(tmp_path, skipped, **said)
        assert f"left out a sample that cannot be read: {bucket}/manifest.jsonl, line 2" in done.output
        assert f"{bucket}/1.png does not exist" in done.output


@pytest.mark.deep(when=lambda bad_sample: bad_sample == "error")
@pytest.mark.parametrize("bad_sample", ["error", "skip"])
def test_a_server_that_fails_ends_all_ranks(bad_sample, tmp_path):
    """Whichever rank reads the file; a server that does not answer later on is nothing to leave out."""
    write_working_files(tmp_path)
    with serve_folder(tmp_path / "data") as server:
        flags = {**working_flags(tmp_path), "--data-path": server.address, "--data-cache-path": tmp_path / "kept"}
        flags |= {"--data-retries": 1, "--bad-sample": bad_sample, "--num-workers": 1, "--train-iters": 4}
        server.overloaded = "1.png"
        done = launch(flags, num_ranks=2)
    message = f"{server.address}/1.png: cannot be read, tried 2 times (503"
    assert all(done.exit_codes) and message in done.output and "Traceback" not in done.output, done.output


PAINTER = {"role": "generator", "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16}
SKIP: dict[str, object] = {"--bad-sample": "skip", "--bad-samples-per-thousand": 9}
DECODED = {"--llm-cp": 2, "--painter-cp": 2, "--lengths-from": "decode", "--num-workers": LEFT_OUT}


def write_data(folder: Path, name: str, entries: list[dict[str, Any]]) -> Path:
    path = folder / "data" / name
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Two data sets, of which the second has an image to be made, and weights; an image is damaged behind its header."""
    write_working_files(tmp_path)
    image = {"patch_size": 8, "merge_size": 1, "min_pixels": 64, "max_pixels": 1024}
    model = {**MODEL, "units": {**MODEL["units"], "painter": {**PAINTER, "image": image}}}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(model, sort_keys=False))
    entries = manifest_entries()
    for index, entry in enumerate(entries):
        entry["loss_weight"] = 1 + index / 2
        if index > 1:
            entry["segments"].append({**entry["segments"][0], "path": f"{3 - index}.png", "role": "assistant"})
            entry["segments"][-1] |= {"width": 32 + 16 * (3 - index)}
    gone = {**entries[0], "id": "gone", "segments": [{"type": "image", "path": "gone.png"}, entries[0]["segments"][1]]}
    write_data(tmp_path, "first.jsonl", [gone, *entries[:2]])
    write_data(tmp_path, "second.jsonl", entries[2:])
    write_data(tmp_path, "only.jsonl", [entries[0]])
    write_data(tmp_path, "rest.jsonl", [entries[3]])
    picture = tmp_path / "data" / "1.png"  # the picture of the second sample, and what is made of the third
    picture.write_bytes(picture.read_bytes()[:300])
    return tmp_path


def figures_of(
    folder: Path, names: tuple[str, str], flags: dict[str, object], *, num_ranks: int
) -> tuple[list[list[float]], str]:
    """Return the figures of two steps and an evaluation, and what was said; every batch has all samples of both data sets."""
    paths = [folder / "data" / f"{name}.jsonl" for name in names]
    batch = {"--data-path": paths, "--valid-data-path": f"all={paths[1]}", "--eval-iters": 1, "--micro-batch-size": 1}
    _, done = train(folder, {**batch, **flags}, num_ranks=num_ranks)
    figures = ("loss", "generator_loss", "grad_norm", "token_accuracy")
    entries = read_log(folder / "log.jsonl")
    found = [[*(each[name] for name in figures if name in each), *each.get("data_set_losses", {}).values()] for each in entries]
    return found, done.output


SPREAD = {"--llm-pp": 2, "--painter-tp": 2, "--sequence-parallel": None, "--num-workers": 1}


@pytest.mark.deep(when=lambda flags: flags == SPREAD)
@pytest.mark.parametrize("flags", [SPREAD, DECODED], ids=["spread", "decoded"])
def test_what_cannot_be_read_counts_nothing_on_any_plan(damaged, flags):
    expected, _ = figures_of(damaged, ("only", "rest"), {"--global-batch-size": 2}, num_ranks=3)
    assert list(map(len, expected)) == [5, 5, 3]
    found, said = figures_of(damaged, ("first", "second"), {**SKIP, **flags, "--global-batch-size": 4}, num_ranks=5)
    assert found == [pytest.approx(each, rel=0, abs=1e-9) for each in expected], said
    assert "left out 1 samples that cannot be read" in said and "gone.png does not exist" in said
    assert said.count("left out a sample that cannot be read") == 6 and "1.png cannot be decoded as an image" in said


def test_too_many_are_an_error_on_all_ranks(damaged):
    """At the start, and in a step; so is the first without the flag."""
    flags = {**working_flags(damaged), "--painter-dp": 1, "--data-path": [damaged / "data" / "second.jsonl"]}
    index = {**flags, **SKIP, "--data-path": [damaged / "data" / "first.jsonl"], "--bad-samples-per-thousand": 0.5}
    for given, message in (
        (index, "1 of 3 samples cannot be read, and no more than 0.5 per thousand are left out"),
        ({**flags, **SKIP, "--bad-samples-per-thousand": 0}, "1 of 2 samples cannot be read, and no more than 0 per thousand"),
        ({**flags, "--data-path": [damaged / "data" / "first.jsonl"]}, "gone.png does not exist; restore the file"),
        (flags, "1.png cannot be decoded as an image"),
    ):
        done = launch(given, num_ranks=3)
        assert all(done.exit_codes) and message in done.output and "Traceback" not in done.output, done.output
