"""Without --all, deep rows are left out and hypothesis draws fewer examples; planted errors cannot be deep, nor ids long."""

import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.sanity.repository import ROOT

ROWS = """
import pytest
from hypothesis import given, settings, strategies

DRAWN = []

@pytest.mark.deep(when=lambda size, name: size > 1 and name != "a")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["a", "b", "b" * 99])
def test_rows(size, name):
    pass

@pytest.mark.deep
def test_whole():
    pass

@settings(max_examples=60)
@given(strategies.integers())
def test_drawn(number):
    DRAWN.append(number)

def test_number_of_examples(request):
    assert len(DRAWN) == (60 if request.config.getoption("all") else 10)
"""
PLANTED = "import pytest\n@pytest.mark.deep\ndef test_a_planted_error():\n    pass\n"
LONG = "import pytest\n@pytest.mark.parametrize('n', [1], ids=['x' * 121])\ndef test_row(n):\n    pass\n"


def run(folder: Path, source: str, *arguments: str) -> str:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_rows.py").write_text(source)
    process = multiprocessing.get_context("fork").Process(target=run_here, args=(folder, arguments))
    process.start()
    process.join()
    return (folder / "said").read_text()


def run_here(folder: Path, arguments: tuple[str, ...]) -> None:
    """Run pytest in this process, which is there for nothing else."""
    os.chdir(folder)
    said = os.open("said", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(said, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    options = ["-n", "0", "-vv", "-c", "/dev/null", "--rootdir", ".", "-o", "markers=deep", "-p", "no:cacheprovider"]
    pytest.main([*options, "test_rows.py", *arguments])
    sys.stdout.flush()


@pytest.mark.parametrize(("arguments", "counts"), [((), "6 passed, 3 deselected"), (("--all",), "9 passed")])
def test_deep_rows_and_most_examples_need_all(tmp_path: Path, arguments: tuple[str, ...], counts: str) -> None:
    output = run(tmp_path, ROWS, *arguments)
    assert counts in output and f"test_rows[{'b' * 32}...-1]" in output, output


@pytest.mark.parametrize(("source", "message"), [(PLANTED, "planted errors are never deep"), (LONG, "more than 120 characters")])
def test_a_wrong_mark_or_id_is_refused(tmp_path: Path, source: str, message: str) -> None:
    assert message in run(tmp_path, source)
