"""Values in the user's cache."""

from pathlib import Path

import pytest

from megatron.runtime.orchestrator.kept_values import find_value, keep_value, key_of, place_file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "braid"


def test_what_was_kept_is_found_under_all_that_it_depends_on(cache: Path) -> None:
    keep_value("layers", key_of(("CPU", 2)), {"seconds": 0.1})
    assert find_value("layers", key_of(("CPU", 2))) == {"seconds": 0.1}
    assert find_value("layers", key_of(("CPU", 3))) is None
    assert find_value("machines", key_of(("CPU", 2))) is None
    assert key_of(("ab", "c")) != key_of(("a", "bc"))


@pytest.mark.parametrize("damaged", ["", "{", "[1]", "\xff"])
def test_what_cannot_be_read_was_not_kept(cache: Path, damaged: str) -> None:
    keep_value("layers", "a", {})
    (cache / "layers" / "a.json").write_text(damaged, encoding="latin-1")
    assert find_value("layers", "a") is None


def test_a_file_is_placed_whole_where_it_can_be(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place_file("plans/x", "plan.yaml", "units: {}\n")
    assert path == cache / "plans" / "x" / "plan.yaml" and path.read_text() == "units: {}\n"
    assert place_file("plans/x", "plan.yaml", "other\n").read_text() == "other\n"
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.yaml"]
    (cache / "blocked").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "blocked"))
    elsewhere = place_file("plans/x", "plan.yaml", "third\n")
    assert elsewhere.read_text() == "third\n" and cache not in elsewhere.parents
    keep_value("layers", "a", {"lost": True})
    assert find_value("layers", "a") is None
