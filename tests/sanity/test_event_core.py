"""Work in lanes runs on one clock: each kind of run is one rule on the event core, in C++ and in Python."""

import re

from tests.sanity.repository import ROOT

RULES = {"fill_idle_lanes", "list_schedule", "simulate_events"}


def test_each_kind_of_run_has_one_rule_on_the_event_core():
    callers = {path: len(re.findall(r"\brun_events\(", path.read_text())) for path in (ROOT / "csrc").glob("*.cpp")}
    assert {path.stem: count for path, count in callers.items() if count} == dict.fromkeys(RULES, 1)
    subclasses = {path: path.read_text().count("(EventRun[") for path in (ROOT / "multimodal").rglob("*.py")}
    assert {path.stem: count for path, count in subclasses.items() if count} == dict.fromkeys(RULES, 1)


def test_what_happens_next_is_asked_of_the_clock_alone():
    """A loop of its own would need a clock: a time that advances to the next of a heap of times."""
    for name in RULES:
        assert not re.search(r"\bnow_? = ", (ROOT / "csrc" / f"{name}.cpp").read_text()), name
        assert not re.search(r"self\.now = ", (ROOT / "multimodal" / "references" / f"{name}.py").read_text()), name
