"""Builders and communication insertion against the text in tests/golden/schedule.

After a change that is meant, print the new text with `schedule_to_text` and review the difference.
"""

from pathlib import Path

import pytest

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.text import schedule_from_text, schedule_to_text
from multimodal.schedule.validate import validate_schedule
from tests.unit.schedule.schedule_cases import golden_cases

GOLDEN = Path(__file__).parents[2] / "golden" / "schedule"


SHOWN = sorted(path.name.split(".")[:2] for path in GOLDEN.glob("*.txt") if path.name.count(".") == 2)
"""(case, builder) of each text: the cases that show what a builder does."""


def test_every_builder_has_golden_text() -> None:
    """But for those that only have more rounds than another one."""
    assert {name for name, row in BUILDERS.items() if row.num_rounds <= 2} == {builder for _, builder in SHOWN}
    assert {name for name, _ in SHOWN} == set(golden_cases())
    for builder in ("gpipe", "1f1b"):
        assert [name for name, shown in SHOWN if shown == builder] == sorted(golden_cases())
    lowered = {path.name for path in GOLDEN.glob("*.txt")} - {f"{name}.{builder}.txt" for name, builder in SHOWN}
    assert lowered == {f"{name}.1f1b.lowered.txt" for name in golden_cases()}


@pytest.mark.parametrize(("name", "builder"), SHOWN)
def test_builder_gives_the_golden_schedule(name: str, builder: str) -> None:
    assert schedule_to_text(BUILDERS[builder](golden_cases()[name])) == (GOLDEN / f"{name}.{builder}.txt").read_text()


@pytest.mark.parametrize("name", golden_cases())
def test_communication_insertion_turns_golden_compute_text_into_golden_lowered_text(name: str) -> None:
    case = golden_cases()[name]
    before = schedule_from_text((GOLDEN / f"{name}.1f1b.txt").read_text(), case)
    after = insert_communication(before)
    assert schedule_to_text(after) == (GOLDEN / f"{name}.1f1b.lowered.txt").read_text()
    validate_schedule(after)
