"""Shared parts of the tools' command lines: types of flags, exit codes, formats of seconds and ranks."""

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

from multimodal.values.errors import BraidError, ConfigError

if TYPE_CHECKING:
    from megatron.runtime.flags.configuration import RunConfig
    from multimodal.values.model_graph import ModelGraph
    from multimodal.values.sample_lengths import SampleLengths

warnings.filterwarnings("ignore", module=r"megatron\.core.*|torch\..*")  # which tools import behind their flags
DEFAULT_VOCAB_SIZE = 50304


class Parser(argparse.ArgumentParser):
    """Takes whole flags only, knows the types below by name, and raises ConfigError instead of printing its usage."""

    def __init__(self, *, description: str | None = None, **options: Any) -> None:
        super().__init__(description=(description or "").partition("\n")[0], allow_abbrev=False, **options)
        for kind in (count, positive, at_least_zero, counts_by_unit):
            self.register("type", kind.__name__, kind)

    def error(self, message: str) -> NoReturn:
        """Raise the message as ConfigError."""
        raise ConfigError(message)


def parser_beside_a_run(name: str, description: str | None) -> Parser:
    """Return a parser of a tool's own flags, beside which those of a run stand (`read_run_flags`)."""
    parser = Parser(prog=name, description=description, add_help=False)
    parser.add_argument("--help", action="help", default=argparse.SUPPRESS, help="Show this message.")
    return parser


def read_run_flags(parser: Parser, argv: Sequence[str]) -> "tuple[argparse.Namespace, RunConfig, ModelGraph]":
    """Return a tool's flags, the run of all others, and the model it trains; raises BraidError."""
    given, of_run = parser.parse_known_args(argv)
    from megatron.runtime.flags.arguments import choose_trained, parse_arguments  # behind the flags, as in all tools
    from multimodal.cost.layers.registry import read_model

    config = parse_arguments([*of_run, "--plan", "auto"], environ={})
    return given, config, choose_trained(read_model(config.model.model), config.model)


def count(text: str) -> int:
    """Read a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found '{text}'")
    return int(text)


def positive(text: str) -> float:
    """Read a finite number above 0."""
    try:
        if 0 < float(text) < math.inf:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a positive number, found '{text}'")


def values_by_unit(text: str, *, kind: str = "VALUE") -> dict[str, str]:
    """Read UNIT=VALUE,UNIT=VALUE; kind: the name of a value, for messages."""
    pairs = [entry.partition("=") for entry in text.split(",")]
    if not all(name and value for name, _, value in pairs):
        raise argparse.ArgumentTypeError(f"expected UNIT={kind},UNIT={kind}, found '{text}'")
    return {name: value for name, _, value in pairs}


def counts_by_unit(text: str) -> dict[str, int]:
    """Read UNIT=NUMBER,UNIT=NUMBER."""
    return {name: count(number) for name, number in values_by_unit(text, kind="NUMBER").items()}


def at_least_zero(text: str) -> int:
    """Read an integer of at least 0, such as the seed of a random generator, which has at most 64 bits."""
    if not text.isdecimal() or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0{', of 64 bits' * text.isdecimal()}, found '{text}'")
    return int(text)


def padded_vocab_size(flags: argparse.Namespace, graph: "ModelGraph") -> int:
    """Return --vocab-size, or what the model file says, or DEFAULT_VOCAB_SIZE."""
    return flags.vocab_size or graph.backbone.vocab_size or DEFAULT_VOCAB_SIZE


def read_lengths(flags: argparse.Namespace, graph: "ModelGraph") -> "tuple[SampleLengths, ...]":
    """Return the samples of --lengths, or one sample of --uniform-lengths; raises ConfigError unless there is one of the two."""
    if (flags.lengths is None) == (flags.uniform_lengths is None):
        raise ConfigError("give exactly one of --lengths and --uniform-lengths")
    from multimodal.data.length_table import read_length_table, uniform_lengths

    if flags.lengths is not None:
        return read_length_table(flags.lengths, graph=graph)
    return uniform_lengths(graph, tokens=flags.uniform_lengths, num_samples=1)


def program(name: str) -> Callable[[Callable[[Sequence[str]], None]], Callable[..., int]]:
    """Make an exit code of a command line's function: 2, with a line on stderr, for wrong input; by default of this process."""

    def decorate(run: Callable[[Sequence[str]], None]) -> Callable[..., int]:
        @wraps(run)
        def main(argv: Sequence[str] | None = None) -> int:
            try:
                run(sys.argv[1:] if argv is None else argv)
            except (BraidError, OSError, ImportError) as problem:
                print(f"{name}: {type(problem).__name__}: {problem}", file=sys.stderr)
                return 2
            return 0

        return main

    return decorate


def format_seconds(seconds: float) -> str:
    """Format a duration in s or ms."""
    return f"{seconds:.4g} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.4g} ms"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format consecutive ranks, such as 4-7."""
    return f"{ranks[0]}" + (f"-{ranks[-1]}" if len(ranks) > 1 else "")
