"""--sample-prompts: what a model answers while it is trained over several ranks, without a change of the training."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from megatron.runtime.generation.sample_prompts import answer_prompts
from multimodal.values.errors import DataError
from tests.distributed.launch import launch
from tests.distributed.small_run import working_flags, write_working_files
from tools import generate


def run(folder: Path, name: str, *, prompts: Path | None = None) -> list[dict[str, Any]]:
    """Train with the LLM in two stages; returns what is in the log."""
    flags = working_flags(folder) | {"--llm-dp": 1, "--llm-pp": 2, "--dtype": "float64", "--split": "50,50", "--lora-rank": 2}
    flags |= {"--eval-iters": 1, "--eval-interval": 1, "--save": folder / name, "--log-json": folder / f"{name}.jsonl"}
    asked = {} if prompts is None else {"--sample-prompts": prompts, "--sample-max-new-tokens": 5}
    done = launch(flags | asked, num_ranks=3)
    assert done.exit_codes == (0, 0, 0), done.output
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_answers_are_those_of_the_checkpoint_and_change_nothing(tmp_path: Path) -> None:
    write_working_files(tmp_path)
    prompts, output = tmp_path / "data" / "manifest.jsonl", tmp_path / "answers.jsonl"
    asked, plain = run(tmp_path, "asked", prompts=prompts), run(tmp_path, "plain")
    numbers = [[(entry["step"], entry["loss"]) for entry in log if "loss" in entry] for log in (asked, plain)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 4
    assert [entry["step"] for entry in asked if "samples" in entry] == [1, 2]
    assert not (tmp_path / "asked" / ".samples").exists()

    assert generate.main(["--load", str(tmp_path / "asked"), "--jsonl", str(prompts), "--output", str(output), *_LONGEST]) == 0
    later = [json.loads(line) for line in output.read_text().splitlines()]
    (*_, last) = (entry["samples"] for entry in asked if "samples" in entry)
    assert [(each["answer"], each["expected"]) for each in last] == [(each["answer"], each["expected"]) for each in later]
    assert last[3]["expected"] == "picture 3"


_LONGEST = ("--max-new-tokens", "5")


def test_a_file_without_answers_is_an_error_at_the_start(tmp_path: Path) -> None:
    write_working_files(tmp_path)
    prompts = write_question(tmp_path)
    flags = {**working_flags(tmp_path), "--eval-iters": 1, "--save": tmp_path / "saved", "--split": "50,50"}
    done = launch({**flags, "--sample-prompts": prompts}, num_ranks=2)
    assert all(done.exit_codes) and f"--sample-prompts {prompts}: {prompts}, line 1: the assistant" in done.output, done.output


def write_question(folder: Path) -> Path:
    (folder / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "what?"}]}\n')
    return folder / "prompts.jsonl"


@pytest.mark.deep  # it starts Python anew, as users' runs do
def test_a_lost_checkpoint_is_an_error_of_the_answers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no complete checkpoint"):
        answer_prompts(tmp_path, write_question(tmp_path), max_new_tokens=1, guidance_scale=1.0, timeout=timedelta(minutes=5))
