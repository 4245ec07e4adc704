"""What the tools' command lines have in common."""

import argparse
from typing import NoReturn

from multimodal.values.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        """Raise."""
        raise ConfigError(message)


def count(text: str) -> int:
    """Read a positive integer."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found '{text}'")
    return int(text)


def values_by_unit(text: str, *, kind: str = "VALUE") -> dict[str, str]:
    """Read UNIT=VALUE,UNIT=VALUE; kind: what a value is, for messages."""
    pairs = [entry.partition("=") for entry in text.split(",")]
    if not all(name and value for name, _, value in pairs):
        raise argparse.ArgumentTypeError(f"expected UNIT={kind},UNIT={kind}, found '{text}'")
    return {name: value for name, _, value in pairs}


def counts_by_unit(text: str) -> dict[str, int]:
    """Read UNIT=NUMBER,UNIT=NUMBER."""
    return {name: count(number) for name, number in values_by_unit(text, kind="NUMBER").items()}


def seed(text: str) -> int:
    """Read the seed of a random generator."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, found '{text}'")
    return int(text)
