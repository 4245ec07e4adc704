"""Makes the table of flags from the configuration dataclasses: name, value type, bounds and help of every field."""

import argparse
import ast
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from operator import ge, gt, le, lt
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron.runtime.flags.configuration import GROUPS, RunConfig
from multimodal.values.typed_reader import shown

_MOST_BITS = 100
"""Bounds of whole numbers, so that they can be shown and compared with floats; each field's own bounds follow."""
BOUNDS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": ("at least", ge),
    "above": ("above", gt),
    "below": ("below", lt),
    "maximum": ("at most", le),
}
"""Key of a field's metadata -> how it is said, and how a number is compared with it."""


@dataclass(frozen=True, kw_only=True)
class FieldFlag:
    """One field of a configuration dataclass, or of a unit's sizes, as the flag it becomes."""

    name: str
    """The field's name, which is also the flag's destination; a unit's as `vision.tensor_parallel_size`."""
    flag: str
    """The documented spelling."""
    also: tuple[str, ...] = ()
    """Other spellings."""
    opposite: str | None = None
    """For booleans: the spelling that sets the default again, to overrule a configuration file."""
    parse: Callable[[str], Any] | None = None
    """The parser of one value's text; None for booleans."""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    """The texts that it takes; empty: any that `parse` reads."""
    is_list: bool = False
    is_required: bool = False
    default: Any = None
    help: str = ""
    shorthand: tuple[str, Any, Any] | None = None
    """A boolean flag that sets this field to one value, and its opposite to another: (name, value, opposite value)."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Names of `BOUNDS` -> their numbers."""
    is_input_path: bool = False

    def read(self, text: str) -> Any:
        """Parse one value's text; raises ArgumentTypeError, also for a number outside of the bounds."""
        assert self.parse is not None, "a switch has no value"
        value = self.parse(text)
        if broken := {name for name, bound in self.bounds.items() if not BOUNDS[name][1](value, bound)}:
            named = [name for name in self.bounds if (name == "maximum") == ("maximum" in broken)]
            raise argparse.ArgumentTypeError(f"must be {self.range_in_words(*named)}, found {shown(value)}")
        return value

    def range_in_words(self, *names: str) -> str:
        """Describe these bounds."""
        return " and ".join(f"{BOUNDS[name][0]} {self.bounds[name]:.15g}" for name in names)


def all_flags() -> Iterator[FieldFlag]:
    """Yield all flags that belong to no unit, group by group."""
    for name in GROUPS:
        yield from field_flags(name)


def value_of(config: RunConfig, name: str) -> Any:
    """Return the value of the field with this name, in whichever group it is."""
    return next(getattr(settings, name) for group in GROUPS if hasattr(settings := getattr(config, group), name))


def field_flags(group_name: str) -> tuple[FieldFlag, ...]:
    """List the flags of one group, in the order of its fields, with the names that are registered when this is called."""
    named = [f.metadata[key] for f in fields(GROUPS[group_name]) for key in ("choices", "names") if key in f.metadata]
    return _flags_while_registered(group_name, tuple(tuple(names()) for names in named))


@cache
def _flags_while_registered(group_name: str, names: tuple[tuple[str, ...], ...]) -> tuple[FieldFlag, ...]:
    """List a group's flags; names: those that its fields take now."""
    group = GROUPS[group_name]
    hints, helps = _field_hints(group), field_docstrings(group)
    return tuple(_field_flag(f, hints[f.name], helps[f.name]) for f in fields(group) if "per_unit" not in f.metadata)


_field_hints = cache(get_type_hints)


@cache
def field_docstrings(group: type) -> dict[str, str]:
    """Return the string literal under each field of a dataclass, on one line."""
    body = _classes(group.__module__)[group.__qualname__]
    docstrings = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and isinstance(following, ast.Expr):
            docstrings[statement.target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    return docstrings


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module, read at once: inspect.getsource would read all of it for each."""
    parsed = ast.parse(inspect.getsource(sys.modules[module]))
    return {each.name: each for each in parsed.body if isinstance(each, ast.ClassDef)}


def whole_number(text: str) -> int:
    """Parse an int; the error names the expected value."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {shown(text)}") from None
    if number.bit_length() > _MOST_BITS:
        raise argparse.ArgumentTypeError(f"expected a whole number of at most {_MOST_BITS} bits, found {shown(number)}")
    return number


def finite_number(text: str) -> float:
    """Parse a finite float; the error names the expected value."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a number, found {shown(text)}")
    return number


def flag_of(name: str) -> str:
    """Spell the flag of a field or unit name: dashes for underscores, two in front."""
    return "--" + name.replace("_", "-")


_PARSERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (whole_number, "N"),
    float: (finite_number, "X"),
    str: (str, "TEXT"),
    Path: (Path, "PATH"),
}


def _field_flag(field: Field[Any], hint: Any, help_text: str) -> FieldFlag:
    metadata = field.metadata
    shared: dict[str, Any] = {
        "name": field.name,
        "help": metadata.get("off", help_text),
        "is_required": field.default is MISSING and field.default_factory is MISSING,
        "default": None if field.default is MISSING else field.default,
        "shorthand": metadata.get("shorthand"),
        "is_input_path": bool(metadata.get("input_path")),
        "bounds": {name: metadata[name] for name in BOUNDS if name in metadata},
    }
    if hint is bool:
        spellings = flag_of(field.name), flag_of(f"no_{field.name}")
        flag, opposite = reversed(spellings) if field.default else spellings
        return FieldFlag(flag=flag, opposite=opposite, **shared)
    if get_origin(hint) in (Union, UnionType):
        (hint,) = [part for part in get_args(hint) if part is not NoneType]
    if names := metadata.get("names"):
        shared["help"] = f"{help_text.removesuffix('.')}: {', '.join(names())}."
    if get_origin(hint) is Literal or "choices" in metadata:
        choices = metadata["choices"]() if "choices" in metadata else get_args(hint)
        parse, metavar = metadata.get("parse", str), metadata.get("metavar", "{" + ",".join(choices) + "}")
        return FieldFlag(flag=flag_of(field.name), parse=parse, metavar=metavar, choices=choices, **shared)
    is_list = get_origin(hint) is tuple
    parse, metavar = _PARSERS[get_args(hint)[0] if is_list else hint]
    metavar = metadata.get("metavar", metavar)
    return FieldFlag(flag=flag_of(field.name), parse=parse, metavar=metavar, is_list=is_list, **shared)
