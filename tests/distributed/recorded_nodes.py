"""What the ranks of an elastic run call through torch: in a file of each node, when its training has ended."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.recorded_calls import Recorded, recording
from megatron.runtime.recovery.member import Member
from megatron.runtime.training.elastic import ElasticRun

CALLS = "BRAID_TEST_CALLS"
"""Environment variable: the folder of the files."""


def read_calls(folder: Path, num_nodes: int) -> list[Recorded]:
    """Return those of each node; none of a node that is gone."""
    files = [folder / str(node) for node in range(num_nodes)]
    return [pickle.loads(file.read_bytes()) if file.exists() else [] for file in files]


@contextmanager
def recording_nodes() -> Iterator[None]:
    """Record what ranks do that are forked inside."""
    form, train, leave = ElasticRun._form, ElasticRun._train, Member.leave

    def forming(self: Any, verdict: Any, found: Any) -> None:
        num_ranks = self._templates.gpus_per_node
        ranks = [node * num_ranks + local for node in found.nodes for local in range(num_ranks)]
        recorder.enter(f"{verdict.generation}:", ranks)
        form(self, verdict, found)

    def training(self: Any, *args: Any) -> None:
        train(self, *args)
        self._member.finish()  # the end of another node does not end this one before it has written
        Path(os.environ[CALLS], os.environ["BRAID_NODE"]).write_bytes(pickle.dumps(recorder.events))

    def leaving(self: Member, problem: Exception) -> None:
        recorder.abort()
        leave(self, problem)

    elastic = patch.multiple(ElasticRun, _form=forming, _train=training)
    with recording() as recorder, elastic, patch.object(Member, "leave", leaving):
        yield
