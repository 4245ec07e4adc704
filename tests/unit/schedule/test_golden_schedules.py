"""Builders and communication insertion against the text in tests/golden/schedule.

After a change that is meant, print the new text with `schedule_to_text` and review the difference.
"""

from pathlib import Path

import pytest

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.text import schedule_from_text, schedule_to_text
from multimodal.schedule.validate import validate_schedule
from tests.unit.schedule.schedule_cases import golden_cases, placed_for

GOLDEN = Path(__file__).parents[2] / "golden" / "schedule"


SHOWN = {
    "gpipe": tuple(golden_cases()),
    "breadth-first": ("interleaved_llm", "v_shaped_llm", "encoder_copies", "two_encoders"),
    "1f1b": tuple(golden_cases()),
    "eager-1f1b": ("one_unit", "encoder_dp2_llm_pp2"),
    "interleaved-1f1b": ("interleaved_llm",),
    "zb-h1": ("one_unit", "encoder_dp2_llm_pp2", "frozen_encoder"),
    "zb-v": ("v_shaped_llm",),
    "dip": ("colocated_different_tp", "two_encoders"),
    "dip-2": ("colocated_different_tp",),
    **dict.fromkeys(("dip-4", "dip-8", "dip-16"), ()),
    "encoders-colocated": ("two_encoders",),
    "encoders-replicated": ("encoder_copies",),
}
"""Per builder the cases that show what it does."""


def test_every_builder_has_golden_text() -> None:
    assert set(SHOWN) == set(BUILDERS)
    assert {path.name for path in GOLDEN.glob("*.txt")} == {
        f"{name}.{builder}{dialect}.txt"
        for builder, names in SHOWN.items()
        for name in names
        for dialect in ("", *([".lowered"] if builder == "1f1b" else []))
    }


@pytest.mark.parametrize(("name", "builder"), [(name, builder) for builder, names in SHOWN.items() for name in names])
def test_builder_gives_the_golden_schedule(name: str, builder: str) -> None:
    case = placed_for(builder, golden_cases()[name])
    assert schedule_to_text(BUILDERS[builder](*case)) == (GOLDEN / f"{name}.{builder}.txt").read_text()


@pytest.mark.parametrize("name", golden_cases())
def test_communication_insertion_turns_golden_compute_text_into_golden_lowered_text(name: str) -> None:
    graph, plan, assignment = golden_cases()[name]
    before = schedule_from_text((GOLDEN / f"{name}.1f1b.txt").read_text())
    after = insert_communication(before, graph=graph, plan=plan, assignment=assignment)
    assert schedule_to_text(after) == (GOLDEN / f"{name}.1f1b.lowered.txt").read_text()
    validate_schedule(after, graph=graph, plan=plan, assignment=assignment, lowered=True)
