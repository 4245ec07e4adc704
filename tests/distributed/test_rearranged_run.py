"""A run on nodes of two ranks, with and without node-wise rearrangement: the same losses, fewer bytes between nodes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import launch
from tests.distributed.small_run import working_flags, write_working_files


def train(folder: Path, *flags: str) -> list[dict[str, Any]]:
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    base = {**working_flags(folder), "--dtype": "float64", "--global-batch-size": 4, "--log-json": log, "--llm-tp": 2}
    for name in ("--vision-dp", "--llm-dp", "--num-workers"):
        del base[name]
    words = [word for pair in base.items() for word in pair]
    done = launch([*words, "--colocate-units", *flags], num_ranks=4, environment={"LOCAL_WORLD_SIZE": "2"})
    assert done.exit_codes == (0,) * 4, done.output
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_rearranged_batches_train_the_same(tmp_path: Path) -> None:
    """The LLM's two replicas are a node each; two of four images would be encoded on the other node."""
    write_working_files(tmp_path)
    rearranged, exchanged = train(tmp_path, "--rearrange-nodes"), train(tmp_path, "--lengths-from", "decode")
    assert [entry["loss"] for entry in rearranged] == pytest.approx([entry["loss"] for entry in exchanged], rel=1e-9)
    assert all(entry["node_bytes"]["before"] > entry["node_bytes"]["after"] == 0 for entry in rearranged)
    assert all("exchanged_node_bytes" not in entry for entry in rearranged)
    assert all("node_bytes" not in entry and entry["exchanged_node_bytes"] > 0 for entry in exchanged)
