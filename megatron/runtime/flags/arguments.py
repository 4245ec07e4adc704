"""Reads the command line, a configuration file and the model file into a checked `RunConfig`; without torch, so in an instant."""

import argparse
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.runtime.checkpoint.folder import find_newest_checkpoint
from megatron.runtime.flags.configuration import A_COUNT, GROUPS, UNIT_RATES, ModelConfig, RunConfig
from megatron.runtime.flags.field_flags import all_flags, field_flags, flag_of
from megatron.runtime.flags.flag_parser import FlagParser
from megatron.runtime.flags.ignored_flags import ignored_flags
from megatron.runtime.flags.megatron_flags import FREEZES
from megatron.runtime.flags.unit_flags import LLM, MICRO_BATCH_SIZE, SIZE_SPELLINGS
from megatron.runtime.launch.rank_place import find_rank_place, find_ranks_per_node
from multimodal.plan.plans_of_sizes import EVEN, LayerSeconds, UnitSizes, fold_stages, plan_colocated, plan_disaggregated
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import ConfigError
from multimodal.values.file_form import at_line, read_mapping
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.typed_reader import shown


def parse_arguments(argv: Sequence[str], *, environ: Mapping[str, str]) -> RunConfig:
    """Read flags and configuration file, and check everything that can be checked without loading anything.

    argv: without the program's name; environ: WORLD_SIZE is the number of processes. Raises BraidErrors, SystemExit for `--help`.
    """
    # These say which model and which units there are, and so which flags.
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False)
    for flag in ("--config", "--model", "--load-hf"):
        early.add_argument(flag)
    try:
        first = vars(early.parse_known_args(list(argv))[0])
    except argparse.ArgumentError as problem:
        raise ConfigError(str(problem)) from None
    config_path = Path(first["config"]) if "config" in first else None
    entries = read_config_file(config_path) if config_path else {}
    graph = _read_model(first, entries=entries, config_path=config_path) if first else None
    parser = FlagParser(graph)
    from_command_line = parser.parse_given(argv)
    from megatron.runtime.flags.cross_checks import check_config, check_plan  # behind the flags: --help ends before it
    from multimodal.cost.seconds.layer_profile import LayerProfile

    from_command_line.pop("config", None)
    from_file = _parse_config_file(entries, parser=parser, path=config_path) if config_path else {}
    config = _merge(from_command_line, from_file=from_file, graph=graph)
    assert graph is not None  # --model is required, so _merge would have raised an error
    frozen_graph = choose_trained(graph, config.model)
    check_config(config, graph=frozen_graph)
    world_size = find_rank_place(environ).size
    if not config.parallelism.plans_itself:
        _check_input_file("--plan", config.parallelism.plan)
        plan = build_plan(config, frozen_graph, world_size, ranks_per_node=find_ranks_per_node(environ))
        check_plan(config, graph=frozen_graph, plan=plan)
    for name in ("emulate", "cluster", "layer_costs"):
        _check_input_file(flag_of(name), getattr(config.training, name))
    if config.training.layer_costs is not None:
        LayerProfile.from_file(config.training.layer_costs).check(frozen_graph)
    return config if config.training.num_epochs else _with_steps(config)


def with_epochs(config: RunConfig, *, graph: ModelGraph, num_samples: int) -> RunConfig:
    """Return the configuration with --num-epochs, if given, as --train-iters; raises ConfigError if other flags do not fit."""
    training = config.training
    if training.num_epochs is None:
        return config
    from megatron.runtime.flags.cross_checks import check_config

    train_iters = max(1, math.ceil(training.num_epochs * num_samples / training.global_batch_size))
    config = replace(config, training=replace(training, train_iters=train_iters))
    check_config(config, graph=graph)
    return _with_steps(config)


def _with_steps(config: RunConfig) -> RunConfig:
    """Return the configuration with values that are relative to the length of training as steps."""
    decay_iters = config.optimizer.lr_decay_iters or config.training.train_iters
    return replace(config, optimizer=config.optimizer.in_steps(decay_iters))


def _read_model(first: Mapping[str, str], *, entries: Mapping[str, Any], config_path: Path | None) -> ModelGraph | None:
    """Read the model of --model, or else of --load-hf, the command line first; raises ConfigError if there is no such file."""
    from multimodal.cost.layers.registry import read_model

    for flag in ("--model", "--load-hf"):
        entry = entries.get(flag)
        if (path := first.get(flag[2:].replace("-", "_"))) is None:
            if config_path is None or entry is None or isinstance(entry, (bool, list, dict)):
                continue
            return read_model(beside(config_path, str(entry)))
        is_folder, has_config = Path(path).is_dir(), (Path(path) / "config.json").is_file()
        if flag == "--load-hf" and not is_folder:
            found = "is a file" if Path(path).exists() else "no such folder"
            raise ConfigError(
                f"{flag} {path}: {found}; give a folder of Hugging Face that is on this machine (nothing is downloaded)"
            )
        if is_folder and not has_config and find_newest_checkpoint(Path(path)) is not None:
            raise ConfigError(
                f"{flag} {path}: is a folder of checkpoints of Braid's own, not of Hugging Face; start from their weights with "
                f"--pretrained-checkpoint {path} and the --model of that run, or make a folder of Hugging Face of them: "
                f"tools/convert.py --load {path} --save-hf DIR"
            )
        if flag == "--load-hf" and not has_config:
            raise ConfigError(f"{flag} {path}: there is no config.json; give the folder of a model of Hugging Face")
        if not (is_folder and has_config):
            _check_input_file(flag, path)
        return read_model(path)
    return None


def _check_input_file(flag: str, path: str | Path | None) -> None:
    """Raise ConfigError, which names the flag, if there is no file to read; the file's reader checks its content."""
    if path is not None and not Path(path).is_file():
        found = "is a folder or a device" if Path(path).exists() else "no such file"
        raise ConfigError(f"{flag} {path}: {found}; give the path of an existing .yaml or .json file")


def _merge(from_command_line: Mapping[str, Any], *, from_file: Mapping[str, Any], graph: ModelGraph | None) -> RunConfig:
    """Return one configuration from both; if they exclude each other, the command line wins."""
    values = {**from_file, **from_command_line}
    for given in (from_command_line, from_file):
        if "data_args_path" in given:
            values["data_path"] = _listed_data(given)
        if "data_path" in given or "data_args_path" in given:
            break
    if "load_hf" in values:
        values = {**_taken_from(Path(values["load_hf"]), values), **values}
    if "load_adapter" in values and graph is not None:
        values |= _adapters_of(Path(values["load_adapter"]), values, graph)
    has_length = {"train_iters"} if "num_epochs" in values else set[str]()
    required = [flag for flag in all_flags() if flag.is_required and flag.name not in values.keys() | has_length]
    if missing := [f"{flag.flag} {flag.metavar}" for flag in required]:
        raise ConfigError(
            f"missing {', '.join(missing)}; give {'it' if len(missing) == 1 else 'them'} as flags or in the --config file"
        )
    assert graph is not None
    from megatron.runtime.flags.cross_checks import drop_overruled

    def overruled(name: str, by: str) -> bool:
        return name not in from_command_line and by in from_command_line

    values = drop_overruled(values, overruled=overruled, units=graph.unit_names)
    if "num_epochs" in values:
        values["train_iters"] = A_COUNT["maximum"]  # until the data are open
    rows = ignored_flags(_build_config(values, graph=graph))
    yielding = {row.name for row in rows if any(overruled(row.name, cause) for cause in row.because_of)}
    return _build_config({name: value for name, value in values.items() if name not in yielding}, graph=graph)


def _listed_data(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of --data-path that are in the file of --data-args-path; raises ConfigError."""
    path = given["data_args_path"]
    if "data_path" in given:
        raise ConfigError(f"--data-path and --data-args-path {path} both say where the data are; keep one")
    try:
        words = tuple(path.read_text().split())
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"--data-args-path {path}: cannot be read ({problem}); give a text file with paths") from None
    if not words:
        raise ConfigError(f"--data-args-path {path}: is empty; write what --data-path takes into it")
    return words


def _taken_from(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model and, unless given, the tokenizer of a folder of --load-hf; raises ConfigError if it has no tokenizer."""
    tokenizer = folder / "tokenizer.json"
    if "tokenizer_type" in values or "tokenizer_model" in values:
        return {"model": folder}
    if not tokenizer.is_file():
        raise ConfigError(
            f"--load-hf {folder}: there is no tokenizer.json; copy the model's own there (transformers make one of other "
            "forms: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)), or give --tokenizer-type and --tokenizer-model"
        )
    return {"model": folder, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer)}


def _adapters_of(folder: Path, values: Mapping[str, Any], graph: ModelGraph) -> dict[str, Any]:
    """Return the flags of the adapters in a folder of --load-adapter; raises ConfigError if other adapters are requested."""
    if given := [name for name in ("lora_rank", "lora_alpha", "lora_targets") if name in values]:
        raise ConfigError(
            f"{flag_of(given[0])} would be ignored: --load-adapter {folder} says which adapters there are; leave one of them out"
        )
    from multimodal.hugging_face.adapter_files import read_peft_adapter  # few runs start from adapters

    base = values.get("load_hf") or values.get("model")
    adapter = read_peft_adapter(folder, graph=graph, base=base)
    if adapter.dropout:
        raise ConfigError(
            f"--load-adapter {folder}: lora_dropout is {adapter.dropout:g} in adapter_config.json, and adapters are trained "
            "without dropout here; make it 0 there to go on without"
        )
    return {"lora_rank": adapter.rank, "lora_alpha": adapter.alpha, "lora_targets": adapter.targets}


def _build_config(values: Mapping[str, Any], *, graph: ModelGraph) -> RunConfig:
    units = {
        name: UnitSizes(**{size: values[f"{name}.{size}"] for size in SIZE_SPELLINGS if f"{name}.{size}" in values})
        for name in graph.unit_names
    }
    sizes = {unit.name: values.get(f"{unit.name}.{MICRO_BATCH_SIZE}") for unit in graph.encoders}
    per_unit: dict[str, dict[str, Any]] = {
        "parallelism": {"units": units},
        "training": {"encoder_micro_batch_sizes": {name: size for name, size in sizes.items() if size is not None}},
        "optimizer": {
            "unit_rates": {
                key: values[key] for name in graph.unit_names for rate in UNIT_RATES if (key := f"{name}.{rate}") in values
            }
        },
    }
    groups = {
        name: group(
            **{flag.name: values[flag.name] for flag in field_flags(name) if flag.name in values}, **per_unit.get(name, {})
        )
        for name, group in GROUPS.items()
    }
    return RunConfig(**groups, given=frozenset(values))


def build_plan(
    config: RunConfig,
    graph: ModelGraph,
    world_size: int,
    *,
    ranks_per_node: int | None = None,
    layer_seconds: LayerSeconds = EVEN,
) -> Plan:
    """Build the plan of the flags for `world_size` processes, `ranks_per_node` of them per node if that is known.

    A plan file is used as it is; `--colocate-units`, or one process with sizes of 1, shares all ranks; otherwise every unit gets
    ranks of its own. layer_seconds: by which size flags cut units into stages, once there is data. Raises PlanError.
    """
    flags = config.parallelism
    if flags.plan is not None and flags.elastic:
        from megatron.runtime.flags.schedule_checks import plan_of_start  # loads all planners

        return plan_of_start(config, graph, world_size)
    if flags.plan is not None:
        from multimodal.values.validate import read_plan

        return read_plan(flags.plan, graph=graph, world_size=world_size)
    sizes = flags.units.values()
    is_alone = world_size == 1 and all(each.ranks_per_replica == 1 and each.data_parallel_size in (None, 1) for each in sizes)
    place = plan_colocated if flags.colocate_units or is_alone else partial(plan_disaggregated, ranks_per_node=ranks_per_node)
    plan = place(graph, sizes=flags.units, world_size=world_size, layer_seconds=layer_seconds)
    return fold_stages(plan) if BUILDERS[config.training.schedule].is_folded else plan


def choose_trained(graph: ModelGraph, model: ModelConfig) -> ModelGraph:
    """Return the model as trained: units frozen (`llm`: the backbone), adapters added; raises ConfigError for unknown names."""
    modules = {_unit_name(graph, name, flag="--freeze") for name in model.freeze}
    projectors = {_unit_name(graph, name, flag="--freeze-projector") for name in model.freeze_projector}
    if graph.backbone.name in projectors:
        owners = ", ".join(unit.name for unit in (*graph.encoders, *graph.generators)) or "none"
        raise ConfigError(
            f"--freeze-projector {graph.backbone.name}: the backbone has no projector; units with one are: {owners} "
            f"(to freeze the backbone itself, use --freeze {graph.backbone.name})"
        )
    units = (  # which the model file may freeze, too
        replace(
            unit,
            freeze_module=unit.freeze_module or unit.name in modules,
            freeze_projector=unit.freeze_projector or unit.name in projectors,
        )
        for unit in graph.units
    )
    frozen = replace(graph, units=tuple(units))
    if model.lora_rank is None:
        return frozen
    from multimodal.cost.layers.adapters import adapt_units
    from multimodal.cost.layers.registry import linear_layers

    return adapt_units(frozen, linear_layers(frozen), rank=model.lora_rank, alpha=model.lora_alpha, targets=model.lora_targets)


def _unit_name(graph: ModelGraph, name: str, *, flag: str) -> str:
    if name in graph.unit_names:
        return name
    if name == LLM:
        return graph.backbone.name
    close = difflib.get_close_matches(name, graph.unit_names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    units = ", ".join(f"{unit.name} ({unit.role})" for unit in graph.units)
    raise ConfigError(f"{flag} {name}: the model has no such unit; its units are {units}{hint}")


def read_config_file(path: Path) -> dict[str, Any]:
    """Return flag -> value as written in the file. Raises ConfigError if a key appears twice, or in two spellings."""
    mapping = read_mapping(path, error=ConfigError)
    entries: dict[str, Any] = {}
    for key, value in mapping.items():
        if (flag := flag_of(key.lstrip("-"))) in entries:
            raise at_line(path, ConfigError(f"{flag} is there twice; keep one", place=(key,)))
        entries[flag] = value
    return entries


def _parse_config_file(entries: Mapping[str, Any], *, parser: FlagParser, path: Path) -> dict[str, Any]:
    """Return destination -> value, input paths looked up beside the file; ConfigErrors begin with its path and the key's line."""
    try:
        tokens = [token for flag, value in entries.items() for token in _tokens(flag, value, parser=parser)]
        values = parser.parse_given(tokens)
    except ConfigError as problem:
        keys = read_mapping(path, error=ConfigError)
        named = [key for key in keys if re.search(rf"{re.escape(flag_of(key.lstrip('-')))}(?![\w-])", str(problem))]
        raise at_line(path, ConfigError(str(problem), place=tuple(named[:1]))) from None
    input_paths = {flag.name for flag in all_flags() if flag.is_input_path}
    return {name: beside(path, value) if name in input_paths else value for name, value in values.items()}


def beside(path: Path, value: str | Path | tuple[str, ...]) -> Any:
    """Return the path, or each of several, relative to the configuration file's folder if it exists there, else unchanged."""
    if isinstance(value, tuple):
        return tuple(beside(path, each) for each in value)
    if (candidate := path.parent / value).exists():
        return type(value)(candidate)
    name, is_named, inner = str(value).partition("=")
    return f"{name}={candidate}" if is_named and (candidate := path.parent / inner).exists() else value


def _tokens(flag: str, value: Any, *, parser: FlagParser) -> list[str]:
    """Return an entry of a configuration file as it would be on the command line."""
    if flag in ("--config", "--help"):
        raise ConfigError(f"{flag} cannot stand in a configuration file")
    action = parser.actions.get(flag)
    if action is None:  # what it is, the parser says, together with all others that it does not know
        return [] if flag in FREEZES and value is False else [flag]
    if value is None:
        raise ConfigError(f"{flag} has no value; give it one or remove the line")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{flag} is a switch: expected true or false, found {shown(value)}")
        opposite = flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag.replace("--", "--no-", 1)
        return [flag if value else opposite]
    if isinstance(value, list) and action.nargs == "+":
        for entry in value:
            if isinstance(entry, (bool, list, dict)) or str(entry or "-").startswith("-"):
                raise ConfigError(f"{flag} expects one or more of {action.metavar}, found {shown(entry)} in its list")
        return [flag, *map(str, value)] if value else []
    if isinstance(value, (bool, list, dict)):
        expected = f"one or more of {action.metavar}" if action.nargs == "+" else f"one value ({action.metavar})"
        raise ConfigError(f"{flag} expects {expected}, found {shown(value)}")
    return [f"{flag}={value}"]
