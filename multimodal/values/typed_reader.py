"""Turns the plain form of YAML and JSON into typed values, and back: one rule for all files, driven by the fields of dataclasses.

A field's type defines the values that it takes (bool, int, float, str, Literal, StrEnum, `X | None`, tuple, a dataclass). Its
metadata define the rest:

minimum, above, maximum   bounds of a number, or of all numbers in a list
choices                   the texts that are allowed
min_entries               of a list
key                       the field's name in the file, where it differs
inline                    True: the field is a dataclass whose keys stand among those of its owner
brief                     True: the field is not written at its default
"""

import difflib
import math
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from multimodal.values.errors import BraidError

T = TypeVar("T")
LARGEST_INTEGER = 2**53
"""The default maximum of integers: a float does not hold larger ones exactly."""
_MOST_KEYS = 20
"""Keys that an error lists where something else than a mapping is given; of more, those that are required."""
LONGEST_TEXT = 200
"""The longest name or key, since messages repeat names and keys in full."""
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.IGNORECASE)


def up_to(maximum: int) -> dict[str, Any]:
    """Return the metadata of a positive integer."""
    return {"minimum": 1, "maximum": maximum}


BRIEF: Mapping[str, Any] = {"brief": True}
"""The metadata of a field that is not written at its default."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A plain value and its place in the file; all methods raise `error` with both."""

    value: Any
    where: str
    """The place in words, for messages, such as `unit 'vision', image`."""
    error: type[BraidError]
    place: tuple[str | int, ...] = ()
    """Keys and indices that lead to the value from the top of the file."""

    def fail(self, problem: str) -> NoReturn:
        """Raise the error about this value."""
        raise self.error(f"{self.where}: {problem}", place=self.place)

    def refuse(self, expected: str, *, hint: str = "") -> NoReturn:
        """Raise the error that names the expected and the actual value."""
        self.fail(f"expected {expected}, found {shown(self.value)}{hint}")

    def inner(self, key: str | int, value: Any, *, where: str = "") -> "Plain":
        """Return the value under a key or an index."""
        step = f"[{key}]" if isinstance(key, int) else f", {key}"
        return Plain(value, where or self.where + step, self.error, (*self.place, key))

    def mapping(
        self, *, known: Sequence[str] = (), required: Sequence[str] = (), at_least: int = 0, expected: str = ""
    ) -> dict[str, "Plain"]:
        """Take the value as a mapping from texts; known: all keys that it may have (empty: any), required: keys it must have."""
        if not isinstance(self.value, Mapping) or len(self.value) < at_least:
            named = known if len(known) <= _MOST_KEYS else required or known[:_MOST_KEYS]
            self.refuse(expected or " with ".join(part for part in ("a mapping", ", ".join(named)) if part))
        for key in self.value:
            if not isinstance(key, str):
                self.fail(f"key {shown(key)} is not text; put it in quotes")
            if len(key) > LONGEST_TEXT or not key.isprintable():
                self.fail(f"key {shown(key)} is no name of at most {LONGEST_TEXT} printable characters; change it")
            if known and key not in known:
                close = difflib.get_close_matches(key[:100], known, n=1, cutoff=0.8)
                hint = f"; did you mean '{close[0]}'?" if close else ""
                named = known if len(known) <= _MOST_KEYS else difflib.get_close_matches(key[:100], known, n=_MOST_KEYS, cutoff=0)
                several = "known keys are" if named is known else f"of {len(known)} known keys the nearest are"
                self.inner(key, None, where=self.where).fail(f"unknown key {shown(key)}; {several} {', '.join(named)}{hint}")
        if missing := [key for key in required if key not in self.value]:
            self.fail(f"'{missing[0]}' is missing; add it")
        return {key: self.inner(key, value) for key, value in self.value.items()}

    def entries(self, *, at_least: int = 0, called: str = "", expected: str = "") -> list["Plain"]:
        """Take the value as a list; called: the name of an entry in messages, before its index."""
        if not isinstance(self.value, (list, tuple)) or len(self.value) < at_least:
            self.refuse(expected or ("a list" if not at_least else f"a list with at least {at_least} entry"))
        return [self.inner(i, value, where=f"{called} {i}" if called else "") for i, value in enumerate(self.value)]

    def read(self, hint: Any, **limits: Any) -> Any:
        """Take the value as the type `hint`; limits: as in a field's metadata."""
        return _reader(hint)(self, limits)

    def build(self, kind: type[T], **given: Any) -> T:
        """Build a dataclass from the value, which is a mapping; given: fields whose values do not come from the mapping."""
        keys = _keys(kind, given)
        known, required = tuple(keys), [key for key, is_required in keys.items() if is_required]
        return _assemble(kind, self.mapping(known=known, required=required), given)


@cache
def _reader(hint: Any) -> Callable[[Plain, Mapping[str, Any]], Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (only,) = (part for part in arguments if part is not NoneType)
        read_only = _reader(only)
        return lambda plain, limits: None if plain.value is None else read_only(plain, limits)
    if origin is Literal:
        return lambda plain, limits: _choice(plain, arguments)
    if origin is tuple:
        return lambda plain, limits: _read_tuple(plain, arguments, limits)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return lambda plain, limits: plain.value if isinstance(plain.value, hint) else plain.build(hint)
    if issubclass(hint, StrEnum):
        return lambda plain, limits: hint(_choice(plain, tuple(hint)))
    return _SCALARS[hint]


def check_fields(value: Any, *, at: Plain) -> None:
    """Check the types and bounds of the fields of a dataclass that was made in Python; at: its place, for messages."""
    kind: Any = type(value)
    for field, hint in _typed_fields(kind):
        part = getattr(value, field.name)
        plain = at.inner(field.metadata.get("key", field.name), part)
        if is_dataclass(part):
            check_fields(part, at=at if field.metadata.get("inline") else plain)
        else:
            plain.read(hint, **field.metadata)


def to_plain(value: Any, *, given: Collection[str] = ()) -> Any:
    """Return the plain form of a value, from which `Plain.build` makes it again; given: fields that are not part of it."""
    if isinstance(value, Mapping):
        return {key: to_plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return list(map(to_plain, value))
    if not is_dataclass(value):
        return str(value) if isinstance(value, StrEnum) else value
    plain: dict[str, Any] = {}
    for field in fields(value):
        part, is_brief = getattr(value, field.name), field.metadata.get("brief", False)
        if field.metadata.get("inline"):
            plain |= to_plain(part)
        elif field.name not in given and not (is_brief and part == field.default):
            plain[field.metadata.get("key", field.name)] = to_plain(part)
    return plain


def shown(value: Any) -> str:
    """Show a plain value in a message, shortened."""
    if isinstance(value, int) and abs(value) > 2**64:
        return f"an integer of {value.bit_length()} bits"
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, 80, 80


@cache
def _typed_fields(kind: Any) -> tuple[tuple[Field[Any], Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field, hints[field.name]) for field in fields(kind))


def _keys(kind: type, given: Mapping[str, Any]) -> dict[str, bool]:
    """Return the keys of the file's form -> True if the key is required."""
    keys: dict[str, bool] = {}
    for field, hint in _typed_fields(kind):
        if field.metadata.get("inline"):
            keys |= _keys(hint, {})
        elif field.name not in given:
            keys[field.metadata.get("key", field.name)] = field.default is MISSING and field.default_factory is MISSING
    return keys


def _assemble(kind: Any, entries: Mapping[str, Plain], given: Mapping[str, Any]) -> Any:
    values = dict(given)
    for field, hint in _typed_fields(kind):
        key = field.metadata.get("key", field.name)
        if field.metadata.get("inline"):
            values[field.name] = _assemble(hint, entries, {})
        elif field.name not in given and key in entries:
            values[field.name] = entries[key].read(hint, **field.metadata)
    return kind(**values)


def _read_tuple(plain: Plain, hints: tuple[Any, ...], limits: Mapping[str, Any]) -> tuple[Any, ...]:
    inner = {key: limit for key, limit in limits.items() if key != "min_entries"}
    if len(hints) == 2 and hints[1] is Ellipsis:
        entries = plain.entries(at_least=limits.get("min_entries", 0))
        return tuple(entry.read(hints[0], **inner) for entry in entries)
    entries = plain.entries(expected=f"a list of {len(hints)} entries")
    if len(entries) != len(hints):
        plain.refuse(f"a list of {len(hints)} entries")
    return tuple(entry.read(hint, **inner) for entry, hint in zip(entries, hints, strict=True))


def _choice(plain: Plain, choices: Sequence[str]) -> Any:
    if not isinstance(plain.value, str) or plain.value not in choices:
        plain.refuse(f"one of {', '.join(choices)}")
    return plain.value


def _read_bool(plain: Plain, limits: Mapping[str, Any]) -> bool:
    if not isinstance(plain.value, bool):
        is_text = isinstance(plain.value, str) and plain.value.lower() in ("true", "false")
        plain.refuse("true or false", hint=_WITHOUT_QUOTES if is_text else "")
    return plain.value


def _read_text(plain: Plain, limits: Mapping[str, Any]) -> str:
    if "choices" in limits:
        return str(_choice(plain, limits["choices"]))
    if not isinstance(plain.value, str):
        plain.refuse("text", hint="; put it in quotes")
    if len(plain.value) > LONGEST_TEXT or not plain.value.isprintable():
        plain.refuse(f"at most {LONGEST_TEXT} printable characters")
    return plain.value


def _read_number(plain: Plain, limits: Mapping[str, Any], *, noun: str, kinds: tuple[type, ...], largest: float) -> Any:
    value, article = plain.value, "an" if noun == "integer" else "a"
    is_number = isinstance(value, kinds) and not isinstance(value, bool) and value == value
    bounds = {"minimum": -largest, "maximum": largest, **limits} if is_number else limits
    minimum, above = bounds.get("minimum"), bounds.get("above")
    if not is_number or value < minimum or value <= (-math.inf if above is None else above):
        expected = f"{article} {noun}" + (f" of at least {minimum:g}" if minimum is not None and above is None else "")
        if above == 0 or (minimum == 1 and noun == "integer"):
            expected = f"a positive {noun}"
        is_quoted = isinstance(value, str) and _NUMBER.fullmatch(value)
        plain.refuse(expected, hint=_WITHOUT_QUOTES if is_quoted else "")
    if value > (most := bounds["maximum"]):
        plain.refuse(f"{article} {noun} of at most " + (f"{most:,}" if isinstance(most, int) else f"{most:g}"))
    return kinds[-1](value)


_SCALARS: Mapping[Any, Callable[[Plain, Mapping[str, Any]], Any]] = {
    bool: _read_bool,
    int: partial(_read_number, noun="integer", kinds=(int,), largest=LARGEST_INTEGER),
    float: partial(_read_number, noun="number", kinds=(int, float), largest=sys.float_info.max),
    str: _read_text,
}
_WITHOUT_QUOTES = "; write it without quotes"


def split_options(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the name, and each option as (key, value) in the given order; the value of an option without one is empty.

    A separator with nothing behind it gives an option whose key and value are empty.
    """
    name, separator, options = text.partition(":")
    parts = (part.partition("=") for part in (options.split(",") if separator else ()))
    return name, [(key.strip(), value.strip()) for key, _, value in parts]
