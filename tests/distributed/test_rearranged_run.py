"""A run on nodes of two ranks, with and without node-wise rearrangement: the same losses, fewer bytes between nodes."""

from pathlib import Path

import pytest

from tests.distributed.small_run import LEFT_OUT, SIZED_OTHERWISE, train

FLAGS = {**SIZED_OTHERWISE, "--num-workers": LEFT_OUT, "--global-batch-size": 4, "--llm-tp": 2, "--colocate-units": None}


def test_rearranged_batches_train_the_same(tmp_path: Path) -> None:
    """The LLM's two replicas are a node each; two of four images would be encoded on the other node."""
    rearranged, exchanged = (
        train(tmp_path, FLAGS | how, num_ranks=4, environment={"LOCAL_WORLD_SIZE": "2"})[0]
        for how in ({"--rearrange-nodes": None}, {"--lengths-from": "decode"})
    )
    assert [entry["loss"] for entry in rearranged] == pytest.approx([entry["loss"] for entry in exchanged], rel=1e-9)
    assert all(entry["node_bytes"]["before"] > entry["node_bytes"]["after"] == 0 for entry in rearranged)
    assert all("exchanged_node_bytes" not in entry for entry in rearranged)
    assert all("node_bytes" not in entry and entry["exchanged_node_bytes"] > 0 for entry in exchanged)
