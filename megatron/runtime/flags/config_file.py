"""A configuration file: flags as keys, with dashes or underscores, with or without the leading dashes."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.runtime.flags.configuration import GROUPS
from megatron.runtime.flags.field_flags import field_flags
from megatron.runtime.flags.flag_parser import FlagParser
from multimodal.values.errors import BraidError, ConfigError
from multimodal.values.file_form import at_line, read_mapping
from multimodal.values.typed_reader import shown


def read_config_file(path: Path) -> dict[str, Any]:
    """Flag -> value as it stands in the file. Raises ConfigError when a key appears twice, or in two spellings."""
    mapping = read_mapping(path, error=ConfigError)
    entries: dict[str, Any] = {}
    for key, value in mapping.items():
        if (flag := _flag(key)) in entries:
            raise at_line(path, ConfigError(f"{flag} is there twice; keep one", place=(key,)))
        entries[flag] = value
    return entries


def _flag(key: str) -> str:
    return "--" + key.lstrip("-").replace("_", "-")


def parse_config_file(entries: Mapping[str, Any], *, parser: FlagParser, path: Path) -> dict[str, Any]:
    """Destination -> value, by the same parser as the command line; input paths are found beside the file.

    Raises ConfigError that starts with the file's path.
    """
    try:
        tokens = [token for flag, value in entries.items() for token in _tokens(flag, value, parser=parser)]
        values = parser.parse_given(tokens)
    except ConfigError as problem:
        raise _at_flag(path, problem) from None
    input_paths = {flag.name for group in GROUPS.values() for flag in field_flags(group) if flag.is_input_path}
    return {name: beside(path, value) if name in input_paths else value for name, value in values.items()}


def _at_flag(path: Path, problem: ConfigError) -> BraidError:
    """The same error, with the file and the line of the first key whose flag it names."""
    keys = read_mapping(path, error=ConfigError)
    named = [key for key in keys if re.search(rf"{re.escape(_flag(key))}(?![\w-])", str(problem))]
    return at_line(path, ConfigError(str(problem), place=tuple(named[:1])))


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
        for entry in value:
            if isinstance(entry, (bool, list, dict)) or str(entry or "-").startswith("-"):
                raise ConfigError(f"{flag} expects {_expected(action)}, found {shown(entry)} in its list")
        return [flag, *map(str, value)] if value else []
    if isinstance(value, (bool, list, dict)):
        raise ConfigError(f"{flag} expects {_expected(action)}, found {shown(value)}")
    return [f"{flag}={value}"]


def _switch_tokens(flag: str, value: Any, *, parser: FlagParser) -> list[str]:
    if not isinstance(value, bool):
        raise ConfigError(f"{flag} is a switch: expected true or false, found {shown(value)}")
    if value:
        return [flag]
    opposite = flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag.replace("--", "--no-", 1)
    assert parser.action_of(opposite) is not None
    return [opposite]


def _expected(action: argparse.Action) -> str:
    return "one or more of " + str(action.metavar) if action.nargs == "+" else f"one value ({action.metavar})"
