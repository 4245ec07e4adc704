"""From the command line and a configuration file to a `RunConfig`.

Neither torch nor megatron-core is imported on this path, so `--help` and every complaint are instant.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.runtime.flags.config_file import beside, parse_config_file, read_config_file
from megatron.runtime.flags.configuration import GROUPS, RunConfig
from megatron.runtime.flags.cross_checks import check_config, check_plan, drop_overruled, ignored_flags
from megatron.runtime.flags.field_flags import field_flags
from megatron.runtime.flags.flag_parser import FlagParser
from megatron.runtime.flags.freezing import apply_freezing
from megatron.runtime.flags.run_plan import build_plan
from megatron.runtime.flags.schedule_checks import check_schedule
from megatron.runtime.flags.unit_flags import MICRO_BATCH_SIZE, SIZE_SPELLINGS
from multimodal.cost.layers.registry import read_model
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import MOST_RANKS
from multimodal.values.typed_reader import shown


def parse_arguments(argv: Sequence[str], *, environ: Mapping[str, str]) -> RunConfig:
    """Read the flags and the configuration file, and check everything that can be known without loading anything.

    argv: the flags, without the program's name. environ: WORLD_SIZE is the number of processes (1 when absent).
    `--help` prints and raises SystemExit. Raises a BraidError (ConfigError, ModelError or PlanError) for what is wrong.
    """
    first = _read_first(argv)
    config_path = Path(first["config"]) if "config" in first else None
    entries = read_config_file(config_path) if config_path else {}
    graph = _read_model(first.get("model"), entries=entries, config_path=config_path)
    parser = FlagParser(graph)
    from_command_line = parser.parse_given(argv)
    from_command_line.pop("config", None)
    from_file = parse_config_file(entries, parser=parser, path=config_path) if config_path else {}
    config = _merge(from_command_line, from_file=from_file, graph=graph)
    assert graph is not None  # --model is required, so that _merge would have complained.
    frozen_graph = apply_freezing(graph, config)
    check_config(config, graph=frozen_graph)
    _check_input_file("--plan", config.parallelism.plan)
    plan = build_plan(config, frozen_graph, _world_size(environ))
    check_plan(config, graph=frozen_graph, plan=plan)
    check_schedule(config, graph=frozen_graph, plan=plan)
    _check_input_file("--emulate", config.training.emulate)
    _check_input_file("--cluster", config.training.cluster)
    return _fill_in_steps(config)


def _read_first(argv: Sequence[str]) -> dict[str, str]:
    """Find what must be known before the units' flags are: --config and --model."""

    class FirstParser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise ConfigError(message)

    parser = FirstParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config")
    parser.add_argument("--model")
    return vars(parser.parse_known_args(list(argv))[0])


def _read_model(model: str | None, *, entries: Mapping[str, Any], config_path: Path | None) -> ModelGraph | None:
    if model is not None:
        _check_input_file("--model", model)
        return read_model(model)
    entry = entries.get("--model")
    if config_path is None or entry is None or isinstance(entry, (bool, list, dict)):
        return None
    return read_model(beside(config_path, str(entry)))


def _check_input_file(flag: str, path: str | Path | None) -> None:
    """Raise ConfigError, which names the flag, where there is no file to read; what is in it its reader checks."""
    if path is not None and not Path(path).is_file():
        found = "is a folder or a device" if Path(path).exists() else "no such file"
        raise ConfigError(f"{flag} {path}: {found}; give the path of an existing .yaml or .json file")


def _merge(from_command_line: Mapping[str, Any], *, from_file: Mapping[str, Any], graph: ModelGraph | None) -> RunConfig:
    """One configuration of both; where they exclude each other, the command line wins."""
    values = {**from_file, **from_command_line}
    required = [flag for group in GROUPS.values() for flag in field_flags(group) if flag.is_required]
    if missing := [f"{flag.flag} {flag.metavar}" for flag in required if flag.name not in values]:
        raise ConfigError(
            f"missing {', '.join(missing)}; give {'it' if len(missing) == 1 else 'them'} as flags or in the --config file"
        )
    assert graph is not None

    def overruled(name: str, by: str) -> bool:
        return name not in from_command_line and by in from_command_line

    values = drop_overruled(values, overruled=overruled, units=graph.unit_names)
    rows = ignored_flags(_build_config(values, graph=graph))
    yielding = {row.name for row in rows if any(overruled(row.name, cause) for cause in row.because_of)}
    return _build_config({name: value for name, value in values.items() if name not in yielding}, graph=graph)


def _build_config(values: Mapping[str, Any], *, graph: ModelGraph) -> RunConfig:
    units = {
        name: UnitSizes(**{size: values[f"{name}.{size}"] for size in SIZE_SPELLINGS if f"{name}.{size}" in values})
        for name in graph.unit_names
    }
    encoder_destinations = {unit.name: f"{unit.name}.{MICRO_BATCH_SIZE}" for unit in graph.encoders}
    per_unit: dict[str, dict[str, Any]] = {
        "parallelism": {"units": units},
        "training": {
            "encoder_micro_batch_sizes": {name: values[place] for name, place in encoder_destinations.items() if place in values}
        },
    }
    groups = {
        name: group(
            **{flag.name: values[flag.name] for flag in field_flags(group) if flag.name in values}, **per_unit.get(name, {})
        )
        for name, group in GROUPS.items()
    }
    return RunConfig(**groups, given=frozenset(values))


def _fill_in_steps(config: RunConfig) -> RunConfig:
    """Replace what is relative to the length of training by steps: --lr-decay-iters and --lr-warmup-fraction."""
    optimizer = config.optimizer
    decay_iters = optimizer.lr_decay_iters or config.training.train_iters
    fraction = optimizer.lr_warmup_fraction
    warmup_iters = optimizer.lr_warmup_iters if fraction is None else int(fraction * decay_iters)
    return replace(config, optimizer=replace(optimizer, lr_decay_iters=decay_iters, lr_warmup_iters=warmup_iters))


def _world_size(environ: Mapping[str, str]) -> int:
    text = environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MOST_RANKS:
        raise ConfigError(
            f"the environment variable WORLD_SIZE must be the number of processes, found {shown(text)}; launch with torchrun"
        )
    return int(text)
