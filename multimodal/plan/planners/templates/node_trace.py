"""Traces of nodes that are lost and that join, as with spot instances: a CSV file of seconds and numbers of nodes."""

import csv
from pathlib import Path
from typing import NamedTuple

from multimodal.values.errors import ConfigError
from multimodal.values.file_form import read_text

HEADER = ["seconds", "nodes"]


class NodeChange(NamedTuple):
    """A number of nodes lost or joined at once."""

    seconds: float
    """Seconds after the start."""
    change: int
    """Number of joined nodes, or minus the number of lost ones."""


def read_trace(path: str | Path, *, num_nodes: int) -> tuple[NodeChange, ...]:
    """Read a trace: lines `seconds,nodes` such as `3600,-2`, in the order of time; # begins a comment.

    num_nodes: at the start. Raises ConfigError, with the line, if the file is no trace, or exceeds num_nodes or falls below 0
    nodes.
    """
    changes: list[NodeChange] = []
    left = num_nodes
    for number, text in enumerate(read_text(path, error=ConfigError).splitlines(), start=1):
        row = next(csv.reader([text.partition("#")[0].strip()]), [])
        if not row or row == HEADER:
            continue
        where = f"{path}, line {number}"
        try:
            seconds, change = row
            found = NodeChange(float(seconds), int(change))
        except ValueError:
            raise ConfigError(f"{where}: expected seconds,nodes such as 3600,-2, found '{text[:80]}'; correct it") from None
        before = changes[-1].seconds if changes else 0.0
        if not before <= found.seconds < float("inf"):
            raise ConfigError(f"{where}: {found.seconds:g} s is before {before:g} s, or never; sort the lines by time")
        left += found.change
        if not 0 <= left <= num_nodes:
            raise ConfigError(
                f"{where}: {left} nodes would be there, of {num_nodes} at the start; correct the change or --num-gpus"
            )
        changes.append(found)
    return tuple(changes)
