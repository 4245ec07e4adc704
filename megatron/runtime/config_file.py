"""A configuration file: flags as keys, with dashes or underscores, with or without the leading dashes."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron.runtime.configuration import GROUPS
from megatron.runtime.field_flags import field_flags
from megatron.runtime.flag_parser import FlagParser
from multimodal.values.errors import ConfigError
from multimodal.values.file_form import read_mapping


def read_config_file(path: Path) -> dict[str, Any]:
    """Flag -> value as it stands in the file. Raises ConfigError when a key appears twice, or in two spellings."""
    mapping = read_mapping(path, error=ConfigError)
    flags = [_flag(key) for key in _keys(path)]
    for flag in flags:
        if flags.count(flag) > 1:
            raise ConfigError(f"{path}: {flag} is there twice; keep one")
    return {_flag(key): value for key, value in mapping.items()}


def _keys(path: Path) -> list[Any]:
    """All keys as they are written; a mapping would keep only the last of two equal ones."""
    if path.suffix == ".json":
        return [key for key, _ in json.loads(path.read_text(), object_pairs_hook=list)]
    document = yaml.compose(path.read_text(), yaml.SafeLoader)
    return [] if document is None else [key.value for key, _ in document.value]


def _flag(key: Any) -> str:
    return "--" + str(key).lstrip("-").replace("_", "-")


def parse_config_file(entries: Mapping[str, Any], *, parser: FlagParser, path: Path) -> dict[str, Any]:
    """Destination -> value, by the same parser as the command line; input paths are found beside the file.

    Raises ConfigError that starts with the file's path.
    """
    try:
        tokens = [token for flag, value in entries.items() for token in _tokens(flag, value, parser=parser)]
        values = parser.parse_given(tokens)
    except ConfigError as problem:
        raise ConfigError(f"{path}: {problem}") from None
    input_paths = {flag.name for group in GROUPS.values() for flag in field_flags(group) if flag.is_input_path}
    return {name: beside(path, value) if name in input_paths else value for name, value in values.items()}


def beside(path: Path, value: str | Path) -> Any:
    """Return the path relative to the folder of the configuration file where that exists, else as it stands."""
    candidate = path.parent / value
    return type(value)(candidate) if candidate.exists() else value


def _tokens(flag: str, value: Any, *, parser: FlagParser) -> list[str]:
    if flag in ("--config", "--help"):
        raise ConfigError(f"{flag} cannot stand in a configuration file")
    action = parser.action_of(flag)
    if action is None:
        parser.reject_unknown(flag)
        return []
    if value is None:
        raise ConfigError(f"{flag} has no value; give it one or remove the line")
    if action.nargs == 0:
        return _switch_tokens(flag, value, parser=parser)
    if isinstance(value, list) and action.nargs == "+":
        return [flag, *map(str, value)] if value else []
    if isinstance(value, (bool, list, dict)):
        raise ConfigError(f"{flag} expects {_expected(action)}, found {value!r}")
    return [f"{flag}={value}"]


def _switch_tokens(flag: str, value: Any, *, parser: FlagParser) -> list[str]:
    if not isinstance(value, bool):
        raise ConfigError(f"{flag} is a switch: expected true or false, found {value!r}")
    if value:
        return [flag]
    opposite = flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag.replace("--", "--no-", 1)
    assert parser.action_of(opposite) is not None
    return [opposite]


def _expected(action: argparse.Action) -> str:
    return "one or more of " + str(action.metavar) if action.nargs == "+" else f"one value ({action.metavar})"
