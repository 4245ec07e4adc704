"""Seconds per stage as a paper publishes them: what can be simulated without a model, a cluster or a plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimodal.values.errors import ConfigError
from multimodal.values.file_form import read_mapping

_TABLE_KEYS = ("num_microbatches", "send_seconds", "units")
_UNIT_KEYS = ("upstream", "stages", "ranks")
_BACKWARD_KEYS = ("backward", "input_gradient", "weight_gradient")


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one stage, one value per microbatch."""

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    has_backward: bool
    """False where the table lists no backward; the gradients then take no time."""


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """One unit of a table."""

    upstream: tuple[str, ...]
    stages: tuple[StageSeconds, ...]
    ranks: tuple[int, ...]
    """The rank of each stage; a rank that appears twice holds two virtual stages."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """One replica per unit, one lane per stage unless ranks say otherwise; units come in a topological order."""

    num_microbatches: int
    send_seconds: float
    """From the end of a computation to its result's arrival in another lane; keeps nothing busy."""
    units: Mapping[str, UnitSeconds]

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "CostTable":
        """Build from the file's form; raises ConfigError naming the offending place.

        Where a stage lists only `backward`, half of it counts as the input gradient and half as the weight gradient, as for the
        matrix products of a layer whose weights are trained; a schedule that does not split backwards sees no difference.
        """
        _check_keys(value, _TABLE_KEYS, required=("num_microbatches", "units"), where="cost table")
        count = value["num_microbatches"]
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"cost table: num_microbatches must be a positive integer, found {count!r}")
        entries = value["units"]
        if not isinstance(entries, Mapping) or not entries:
            raise ConfigError("cost table: 'units' must map each unit's name to its upstream and stages")
        units: dict[str, UnitSeconds] = {}
        for name in _topological_order({str(name): _upstream(str(name), entry, entries) for name, entry in entries.items()}):
            first_rank = 1 + max((rank for unit in units.values() for rank in unit.ranks), default=-1)
            units[name] = _unit_from_dict(name, entries[name], num_microbatches=count, first_rank=first_rank)
        ranks = {rank for unit in units.values() for rank in unit.ranks}
        if ranks != set(range(len(ranks))):
            raise ConfigError(
                f"cost table: ranks {sorted(ranks)} leave gaps; number them from 0 to {len(ranks) - 1} over all units"
            )
        return cls(count, _seconds(value.get("send_seconds", 0.0), "cost table, send_seconds"), units)

    @classmethod
    def from_file(cls, path: str | Path) -> "CostTable":
        """Read a YAML or JSON table."""
        try:
            return cls.from_dict(read_mapping(path, error=ConfigError))
        except ConfigError as problem:
            raise problem if str(problem).startswith(str(path)) else ConfigError(f"{path}: {problem}") from None


def _upstream(name: str, entry: Any, units: Mapping[str, Any]) -> tuple[str, ...]:
    where = f"unit '{name}'"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected a mapping with upstream and stages, found {type(entry).__name__}")
    _check_keys(entry, _UNIT_KEYS, required=("stages",), where=where)
    upstream = entry.get("upstream") or []
    if not isinstance(upstream, list):
        raise ConfigError(f"{where}: 'upstream' must be a list of unit names, found {upstream!r}")
    for source in upstream:
        if str(source) not in map(str, units):
            raise ConfigError(f"{where}: upstream names '{source}', which is no unit of the table ({', '.join(map(str, units))})")
    return tuple(dict.fromkeys(map(str, upstream)))


def _topological_order(upstream: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Order units so that each stands behind its upstream ones, else as listed."""
    order: list[str] = []
    while len(order) < len(upstream):
        ready = [name for name, sources in upstream.items() if name not in order and set(sources) <= set(order)]
        if not ready:
            circle = [name for name in upstream if name not in order]
            raise ConfigError(f"cost table: units {', '.join(circle)} wait for each other in a circle; correct their 'upstream'")
        order.append(ready[0])
    return tuple(order)


def _unit_from_dict(name: str, entry: Mapping[str, Any], *, num_microbatches: int, first_rank: int) -> UnitSeconds:
    where = f"unit '{name}'"
    stages = entry["stages"]
    if not isinstance(stages, list) or not stages:
        raise ConfigError(f"{where}: 'stages' must be a list with at least one stage")
    ranks = entry.get("ranks", list(range(first_rank, first_rank + len(stages))))
    if not isinstance(ranks, list) or not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
        raise ConfigError(f"{where}: 'ranks' must be a list of ranks, found {ranks!r}")
    if len(ranks) != len(stages):
        raise ConfigError(f"{where}: {len(stages)} stages but {len(ranks)} ranks; give one rank per stage")
    built = tuple(
        _stage_from_dict(stage, num_microbatches=num_microbatches, where=f"{where}, stage {index}")
        for index, stage in enumerate(stages)
    )
    return UnitSeconds(tuple(dict.fromkeys(map(str, entry.get("upstream") or ()))), built, tuple(ranks))


def _stage_from_dict(stage: Any, *, num_microbatches: int, where: str) -> StageSeconds:
    if not isinstance(stage, Mapping):
        raise ConfigError(f"{where}: expected a mapping such as {{forward: 0.1, backward: 0.2}}, found {stage!r}")
    _check_keys(stage, ("forward", *_BACKWARD_KEYS), required=("forward",), where=where)
    given = {key: _per_microbatch(value, num_microbatches, f"{where}, {key}") for key, value in stage.items()}
    backward, input_gradient, weight_gradient = (given.get(key) for key in _BACKWARD_KEYS)
    if backward is not None and (input_gradient is not None or weight_gradient is not None):
        raise ConfigError(f"{where}: give either backward, or input_gradient and weight_gradient, not both")
    if (input_gradient is None) != (weight_gradient is None):
        missing = "input_gradient" if input_gradient is None else "weight_gradient"
        raise ConfigError(f"{where}: {missing} is missing beside its other half; give both (0.0 where there is none)")
    if backward is not None:
        half = tuple(seconds / 2 for seconds in backward)
        return StageSeconds(given["forward"], half, half, has_backward=True)
    nothing = (0.0,) * num_microbatches
    return StageSeconds(
        given["forward"], input_gradient or nothing, weight_gradient or nothing, has_backward=input_gradient is not None
    )


def _per_microbatch(value: Any, num_microbatches: int, where: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        return (_seconds(value, where),) * num_microbatches
    if len(value) != num_microbatches:
        raise ConfigError(
            f"{where}: a list needs one value for each of the {num_microbatches} microbatches, found {len(value)} values"
        )
    return tuple(_seconds(entry, where) for entry in value)


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where}: expected seconds, a number of at least 0, found {value!r}")
    return float(value)


def _check_keys(value: Mapping[str, Any], known: tuple[str, ...], *, required: tuple[str, ...], where: str) -> None:
    if unknown := [key for key in value if key not in known]:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known keys are {', '.join(known)}")
    if missing := [key for key in required if key not in value]:
        raise ConfigError(f"{where}: '{missing[0]}' is missing")
