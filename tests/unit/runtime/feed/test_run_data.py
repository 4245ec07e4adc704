"""What must be the same for a run to go on as it was, and what may change."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.runtime.feed.data_sets import DataSet, DataSets, RunData, check_same_data, describe_data
from megatron.runtime.feed.phase import Phase, find_phase
from megatron.runtime.feed.step_inputs import needed_pieces
from megatron.runtime.feed.step_planner import NodeDecisions
from megatron.runtime.flags import configuration
from multimodal.data.global_batches import DataPart, GlobalBatches
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.errors import CheckpointError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, LengthBatch, SampleLengths
from tests.unit.golden_answers import Kinds, golden_test


@pytest.fixture
def config(tmp_path: Path) -> configuration.RunConfig:
    return config_in(tmp_path)


def config_in(folder: Path) -> configuration.RunConfig:
    """A run over a manifest, with a tokenizer's file."""
    (folder / "manifest.jsonl").write_text("first\n")
    (folder / "tokenizer.json").write_text("{}")
    return configuration.RunConfig(
        model=configuration.ModelConfig(model=Path("model.yaml")),
        parallelism=configuration.ParallelismConfig(),
        training=configuration.TrainingConfig(global_batch_size=4, train_iters=10),
        optimizer=configuration.OptimizerSettings(lr=0.1),
        data=configuration.DataConfig(
            data_path=(str(folder / "manifest.jsonl"),),
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(folder / "tokenizer.json"),
        ),
    )


def describe(config: configuration.RunConfig, num_samples: int = 9) -> RunData:
    samples: Any = range(num_samples)
    parts = (DataPart(num_samples),)
    return describe_data(config, DataSets(DataSet(samples, parts), DataSet(samples, parts), SimpleNamespace()))  # type: ignore[arg-type]


def change(config: configuration.RunConfig, group: str, **values: Any) -> configuration.RunConfig:
    changed: configuration.RunConfig = replace(config, **{group: replace(getattr(config, group), **values)})
    return changed


def go_on(document: dict[str, Any]) -> None:
    """Go on from a checkpoint with other flags of some groups, and with so many training samples."""
    was = now = config_in(Path())
    for group in ("model", "parallelism", "training", "optimizer", "data"):
        now = change(now, group, **document.get(group, {}))
    current = describe(now, num_samples=document["samples"])
    check_same_data("--load d", saved=describe(was), current=current, is_new_phase=document["is_new_phase"])


GOING_ON: Kinds = {"run that goes on": ({"samples": 9, "is_new_phase": False}, go_on)}
test_what_may_change_is_as_written = golden_test("going_on.txt", GOING_ON)


@pytest.mark.parametrize(("flag", "name"), [("--data-path", "data_path"), ("--tokenizer-model", "tokenizer_model")])
def test_files_count_by_their_content(config: configuration.RunConfig, tmp_path: Path, flag: str, name: str) -> None:
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


def test_digits_have_no_file(config: configuration.RunConfig) -> None:
    digits = change(config, "data", data_path=("digits",), program_samples=50)
    saved = describe(digits)
    check_same_data("--load d", saved=saved, current=describe(change(digits, "data", split="1")))
    with pytest.raises(CheckpointError, match="--program-samples 50, this run has 60"):
        check_same_data("--load d", saved=saved, current=describe(change(digits, "data", program_samples=60)))
    with pytest.raises(CheckpointError, match=r"--data-path digits \(content [0-9a-f]{12}\), this run has /"):
        check_same_data("--load d", saved=saved, current=describe(config))


def test_what_an_older_checkpoint_does_not_know_is_not_compared(config: configuration.RunConfig) -> None:
    check_same_data("--load d", saved={"seed": 1234}, current=describe(config))


A, B, C = "aa 9,1 30", "bb 9,1 10", "cc 9,1 7"
"""Data sets of 30, 10 and 7 training samples."""


def describe_run(*data_sets: tuple[str, float], size: int = 8, **changed: Any) -> dict[str, Any]:
    run = {"global_batch_size": size, "data_sets": [list(each) for each in data_sets]}
    return {**run, "learning_rate": {"lr": 0.1}, "trained": {}, **changed}


def batches_of(run: dict[str, Any]) -> GlobalBatches:
    parts = tuple(DataPart(int(name.split()[-1]), weight) for name, weight in run["data_sets"])
    return GlobalBatches(parts, run["global_batch_size"], seed=5)


def test_nothing_changed_goes_on_as_it_was() -> None:
    run = describe_run((A, 1.0))
    for may_change in (False, True):
        assert find_phase(run, run, step=6, may_change=may_change) == Phase()
    assert Phase().go_on(batches_of(run), run) == batches_of(run)


def test_another_batch_size_goes_on_with_the_next_sample() -> None:
    before, now = describe_run((A, 1.0)), describe_run((A, 1.0), size=12)
    phase = find_phase(before, now, step=6, may_change=True)
    assert phase == Phase(6, 48, {A: 48})
    found = phase.go_on(batches_of(now), now).batch(6)
    following = batches_of(before).batch(6) + batches_of(before).batch(7)
    assert found == following[:12]


def test_a_data_set_comes_back_where_it_was_left_two_phases_later() -> None:
    first, second, third = describe_run((A, 0.75), (B, 0.25)), describe_run((C, 1.0), size=4), describe_run((B, 0.5), (C, 0.5))
    phase = find_phase(first, second, step=10, may_change=True)
    assert phase == Phase(10, 80, {A: 60, B: 20})
    phase = find_phase({**second, "phase": asdict(phase)}, third, step=13, may_change=True)
    assert phase == Phase(13, 92, {A: 60, B: 20, C: 12})
    assert [part.position for part in phase.go_on(batches_of(third), third).parts] == [20, 12]
    saved = {**third, "phase": asdict(phase)}
    assert find_phase(saved, third, step=20, may_change=True) == phase, "the same command again is no new phase"


@pytest.mark.parametrize("changed", [{"learning_rate": {"lr": 0.2}}, {"trained": {"frozen": ["vision"]}}])
def test_the_learning_rate_begins_anew_where_it_or_what_is_trained_changes(changed: dict[str, Any]) -> None:
    before = describe_run((A, 1.0))
    assert find_phase(before, {**before, **changed}, step=6, may_change=True) == Phase(learning_rate_first_step=6)
    assert find_phase(before, {**before, **changed}, step=6, may_change=False) == Phase()


def test_a_checkpoint_that_lists_no_data_sets_has_one() -> None:
    older = {"global_batch_size": 8, "data_digest": "aa", "split": "9,1", "num_train_samples": 30}
    now = describe_run((A, 1.0), size=4)
    assert find_phase(older, now, step=6, may_change=True) == Phase(6, 48, {A: 48})


SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16}
GRAPH = ModelGraph.from_dict({"units": {"vision": {"role": "encoder", **SHAPE}, "llm": {"role": "backbone", **SHAPE}}})
PLAN = Plan.from_dict(
    {
        "units": {
            "vision": {"replicas": [{"stages": [{"ranks": [rank], "layers": [[0, 4]]}]} for rank in (0, 1)]},
            "llm": {"replicas": [{"stages": [{"ranks": [0], "layers": [[0, 2]]}, {"ranks": [1], "layers": [[2, 4]]}]}]},
        }
    }
)
ASSIGNMENT = Assignment({"vision": [[[(0, 0)]], [[(1, 0)], [(2, 0)]]], "llm": [[[(0, -1)], [(1, -1), (2, -1)]]]})
LENGTHS = {sample: SampleLengths(sample, (ItemLengths("vision", 4, 1),), 4, 2) for sample in range(3)}


def test_a_replica_needs_the_pixels_of_its_own_microbatches() -> None:
    needed = needed_pieces(ASSIGNMENT.shape(GRAPH, PLAN), ASSIGNMENT, LENGTHS, ranks=range(2))
    pixels = [{piece.sample_id for piece in needed[rank] if piece == Atom(piece.sample_id, 0)} for rank in (0, 1)]
    assert pixels == [{0}, {1, 2}]


CHOSEN = Assignment({"llm": (((Atom(0, -1), Atom(1, -1)),), ())})
OTHER = Assignment({"llm": (((Atom(0, -1),),), ((Atom(1, -1),),))})


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def lengths(*text_tokens: int) -> LengthBatch:
    return LengthBatch(SampleLengths(index, (), tokens, tokens - 1) for index, tokens in enumerate(text_tokens))


def test_others_wait_for_the_one_that_chooses(node: Path):
    begun, may_end = Event(), Event()

    def choose() -> Assignment:
        begun.set()
        assert may_end.wait(60)
        return CHOSEN

    with ThreadPoolExecutor() as ranks:
        first = ranks.submit(NodeDecisions("run", subject="plan").find, lengths(5, 6), choose)
        assert begun.wait(60)
        second = ranks.submit(NodeDecisions("run", subject="plan").find, lengths(5, 6), lambda: OTHER)
        may_end.set()
        assert first.result() == second.result() == CHOSEN
    NodeDecisions("run", subject="plan").close()
    assert not [*node.iterdir()]


@pytest.mark.parametrize(
    ("name", "subject", "seen"), [("run", "plan", (5, 7)), ("run", "another plan", (5, 6)), ("another run", "plan", (5, 6))]
)
def test_what_differs_is_chosen_anew(name: str, subject: str, seen: tuple[int, ...]):
    NodeDecisions("run", subject="plan").find(lengths(5, 6), lambda: CHOSEN)
    assert NodeDecisions(name, subject=subject).find(lengths(*seen), lambda: OTHER) == OTHER


def test_without_a_folder_every_rank_chooses(node: Path):
    (node / "braid-run").write_text("no folder")
    assert NodeDecisions("run", subject="plan").find(lengths(5, 6), lambda: OTHER) == OTHER


def test_old_decisions_are_dropped(node: Path):
    decisions = NodeDecisions("run", subject="plan")
    for tokens in range(2, 80):
        decisions.find(lengths(tokens, 2), lambda: CHOSEN)
    assert len([*(node / "braid-run").iterdir()]) <= 66
