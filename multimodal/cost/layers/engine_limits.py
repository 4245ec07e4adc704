"""The runs whose layers cannot be Transformer Engine's: one table for flags, their defaults and planners."""

from collections.abc import Callable
from typing import NamedTuple


class LayerUse(NamedTuple):
    """The properties of a run on which the choice of its layers depends."""

    dtype: str
    runs_segments: bool
    splits_backwards: bool
    tp_comm_overlap: bool
    shards_weights: bool
    multiplies_in_fp8: bool = False


class EngineLimit(NamedTuple):
    """A use that needs local layers."""

    name: str
    """As the table of defaults in docs/gpu.md has it."""
    is_met: Callable[[LayerUse], bool]


FLOAT64 = EngineLimit("`--dtype float64`", lambda use: use.dtype == "float64")
SEGMENTS = EngineLimit("pieces of layers (`optimus`) in FP8", lambda use: use.runs_segments and use.multiplies_in_fp8)
OVERLAP = EngineLimit("`--tp-comm-overlap`", lambda use: use.tp_comm_overlap)
SHARDED_WEIGHTS = EngineLimit(
    "ZeRO-3 with split backwards or FP8", lambda use: use.shards_weights and (use.splits_backwards or use.multiplies_in_fp8)
)


def needs_local_layers(use: LayerUse) -> bool:
    """Return True if Transformer Engine's layers of version 2.3 or newer cannot run so; older ones split no backwards either."""
    return any(limit.is_met(use) for limit in (FLOAT64, SEGMENTS, OVERLAP, SHARDED_WEIGHTS))
