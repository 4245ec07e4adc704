"""What the tools say to wrong input: one line on stderr, exit code 2, as whole texts in tests/golden/tools.txt.

A case is a command behind `$`, beside the flags of `BASE` that it does not have itself, and its answer in the next line.
`python -m tests.unit.tools.test_refusals` writes the answers anew.
"""

import contextlib
import importlib
import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from multimodal.schedule.chrome_trace import write_chrome_trace
from tests.sanity.repository import ROOT
from tests.unit.tools.test_simulate import LENGTHS, MODEL, PLAN, timeline_of

GOLDEN = ROOT / "tests" / "golden" / "tools.txt"
RUN = "--cluster examples/clusters/a40.yaml --global-batch-size 8 --num-gpus"
BASE: Mapping[str, str] = {
    "simulate": "--model model.yaml --plan plan.yaml --cluster examples/clusters/a40.yaml --schedule 1f1b",
    "plan": f"--model model.yaml {RUN} 4",
    "elastic": f"--model examples/models/oobleck-gpt-2-medium.yaml {RUN} 24 --micro-batch-size 1 --trace nodes.csv",
    "balance": "--lengths lengths.csv --units vision,audio,llm --replicas vision=4,audio=2,llm=4 --global-batch-size 32 "
    "--microbatches 2 --balance orchmllm --gpus-per-node 2 --num-batches 2",
    "generate": "--load saved",
    "profile_layers": "--model model.yaml --output costs.yaml",
}
FILES: Mapping[str, str] = {
    "model.yaml": json.dumps(MODEL),
    "plan.yaml": json.dumps(PLAN),
    "lengths.csv": LENGTHS,
    "nodes.csv": "seconds,nodes\n600,-1\n",
    "object.json": "{}",
    "list.json": "[1]",
    "words.json": "nonsense",
}


def answers(text: str) -> Iterator[str]:
    """Yield the lines of the golden text, with the answers that are given now, in an empty working folder."""
    Path("examples").symlink_to(ROOT / "examples")
    for name, content in FILES.items():
        Path(name).write_text(content)
    write_chrome_trace(timeline_of(1.0, 2.0), Path("a.json"))
    for line in filter(None, text.splitlines()):
        if line.startswith("$"):
            tool, *given = line[1:].split()
            base = BASE.get(tool, "").split()
            kept = [word for pair in zip(base[::2], base[1::2], strict=True) if pair[0] not in given for word in pair]
            told, printed = io.StringIO(), io.StringIO()
            folder = "benchmarks" if tool == "elastic" else "tools"
            with contextlib.redirect_stderr(told), contextlib.redirect_stdout(printed):
                code = importlib.import_module(f"{folder}.{tool}").main([*given, *kept])
            assert (code, printed.getvalue()) == (2, ""), line
            yield from (line, told.getvalue().removesuffix("\n"))


def test_every_command_is_answered_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = [line for line in GOLDEN.read_text().splitlines() if line]
    assert [pair for pair in zip(answers(GOLDEN.read_text()), written, strict=True) if pair[0] != pair[1]] == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        GOLDEN.write_text("".join(f"{line}\n" for line in answers(GOLDEN.read_text())))
