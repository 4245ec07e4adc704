"""A run on nodes of two ranks, with and without node-wise rearrangement: the same losses, fewer bytes between nodes."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import train
from tests.distributed.small_run import working_flags, write_working_files


def entries_of(folder: Path, **how: object) -> list[dict[str, Any]]:
    given = {**working_flags(folder), "--dtype": "float64", "--global-batch-size": 4, "--log-json": folder / "log.jsonl"}
    for name in ("--vision-dp", "--llm-dp", "--num-workers"):
        del given[name]
    flags = {**given, "--llm-tp": 2, "--colocate-units": None, **how}
    return train(flags, num_ranks=4, environment={"LOCAL_WORLD_SIZE": "2"})[0]


def test_rearranged_batches_train_the_same(tmp_path: Path) -> None:
    """The LLM's two replicas are a node each; two of four images would be encoded on the other node."""
    write_working_files(tmp_path)
    rearranged, exchanged = (entries_of(tmp_path, **how) for how in ({"--rearrange-nodes": None}, {"--lengths-from": "decode"}))
    assert [entry["loss"] for entry in rearranged] == pytest.approx([entry["loss"] for entry in exchanged], rel=1e-9)
    assert all(entry["node_bytes"]["before"] > entry["node_bytes"]["after"] == 0 for entry in rearranged)
    assert all("exchanged_node_bytes" not in entry for entry in rearranged)
    assert all("node_bytes" not in entry and entry["exchanged_node_bytes"] > 0 for entry in exchanged)
