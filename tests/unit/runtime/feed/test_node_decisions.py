"""Assignments that one rank of a node chooses for all."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from megatron.runtime.feed.node_decisions import NodeDecisions
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.length_arrays import LengthBatch
from multimodal.values.sample_lengths import SampleLengths

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
