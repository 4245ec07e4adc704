"""Files in plain form, and values read from them by their types: what is taken, and what is refused with its place."""

import errno
import json
import math
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

import pytest

from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.file_form import LARGEST_FILE_BYTES, line_of, read_file, read_mapping, write_mapping
from multimodal.values.typed_reader import Plain, check_fields
from tests.unit.golden_answers import Kinds, golden_test

NESTED = 20_000


def write(tmp_path, content, name="a.yaml"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal_of(path):
    with pytest.raises(ConfigError) as caught:
        read_mapping(path, error=ConfigError)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 500 + len(str(path))
    return str(caught.value).removeprefix(str(path))


def test_aliases_may_repeat_a_little_but_not_explode(tmp_path):
    shared = write(tmp_path, "a: &x {c: 1}\nb: {<<: *x, d: 2}\ne: {<<: *x, c: 3}\n")
    assert read_mapping(shared, error=ConfigError) == {"a": {"c": 1}, "b": {"c": 1, "d": 2}, "e": {"c": 3}}
    lines = ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    assert "aliases repeat more than 100,000 values" in refusal_of(write(tmp_path, "\n".join(lines)))
    merged = ["a0: &a0 {k: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12))]
    assert "aliases repeat more than 100,000 values" in refusal_of(write(tmp_path, "\n".join(merged)))


def test_numbers_are_numbers_and_quoted_ones_are_not(tmp_path):
    text = "a: 1e-5\nb: -2E+3\nc: '1e-5'\nd: 1.5e3\ne: 12\nf: 1e5x\ng: .5e1\n"
    expected = {"a": 1e-5, "b": -2000.0, "c": "1e-5", "d": 1500.0, "e": 12, "f": "1e5x", "g": 5.0}
    assert read_mapping(write(tmp_path, text), error=ConfigError) == expected


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    for name in ("a.yaml", "a.json"):
        assert read_mapping(write(tmp_path, b'\xef\xbb\xbf{"a": 1}', name), error=ConfigError) == {"a": 1}


def test_paths_that_are_no_readable_file_are_named(tmp_path):
    assert "no such file" in refusal_of(tmp_path / "absent.yaml")
    assert "is a folder or a device" in refusal_of(tmp_path)
    assert "is a folder or a device" in refusal_of("/dev/zero")
    assert "cannot be read" in refusal_of(tmp_path / ("x" * 5000))
    assert "no such file" in refusal_of(write(tmp_path, "a: 1") / "b.yaml")
    os.truncate(write(tmp_path, "", "huge.yaml"), LARGEST_FILE_BYTES + 1)
    assert f"at most {LARGEST_FILE_BYTES:,} bytes" in refusal_of(tmp_path / "huge.yaml")


def test_a_file_without_permission_is_named(tmp_path, monkeypatch):
    path = write(tmp_path, "a: 1")

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root could read it whatever its mode
    assert "cannot be read (Permission denied)" in refusal_of(path)


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "tabs.json"])
def test_an_error_of_a_value_gets_its_line(tmp_path, name):
    path = tmp_path / name
    write_mapping(path, {"a": {"b": [1, "two"]}, "c": 3})
    if name == "tabs.json":
        path.write_text(json.dumps(read_mapping(path, error=ModelError), indent="\t"))

    def build(value):
        return [entry.read(int) for entry in Plain(value, "list", ModelError).mapping()["a"].mapping()["b"].entries()]

    with pytest.raises(ModelError, match=rf"{name}, line \d+: list, a, b\[1\]: expected an integer, found 'two'") as caught:
        read_file(path, build, error=ModelError)
    line = line_of(path, caught.value.place)
    assert f"line {line}:" in str(caught.value) and "two" in path.read_text().splitlines()[line - 1]


def test_a_line_that_nobody_can_tell_is_left_out(tmp_path):
    path = write(tmp_path, json.dumps({"a": 1, "b" * 2000: 2}), "a.json")  # too long a key for a YAML parser

    def build(value):
        return Plain(value["a"], "file, a", ConfigError, ("a",)).read(str)

    with pytest.raises(ConfigError, match=r"a\.json: file, a: expected text, found 1"):
        read_file(path, build, error=ConfigError)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Wheel:
    spokes: int = field(metadata={"minimum": 1, "maximum": 100})
    radius: float = field(default=1.0, metadata={"above": 0})


@dataclass(frozen=True)
class Cart:
    name: str
    front: Wheel = field(metadata={"inline": True})
    rear: Wheel | None = None
    colour: Colour = Colour.RED
    size: Literal["small", "large"] = "small"
    is_new: bool = False
    offset: float = field(default=0.0, metadata={"minimum": 0})
    spans: tuple[tuple[int, int], ...] = field(default=(), metadata={"key": "ranges", "minimum": 0, "maximum": 9})
    tags: tuple[str, ...] = field(default=("a",), metadata={"min_entries": 1, "choices": ("a", "b")})


def cart(value):
    return Plain(value, "cart", ConfigError).build(Cart, name="first")


def test_a_dataclass_is_read_by_its_fields():
    value = {"spokes": 3, "rear": {"spokes": 4, "radius": 2}, "colour": "blue", "size": "large", "is_new": True, "offset": 1e-5}
    value |= {"ranges": [[0, 4], [4, 9]], "tags": ["b"]}
    read = cart(value)
    assert read == Cart("first", Wheel(3), Wheel(4, 2.0), Colour.BLUE, "large", True, 1e-5, ((0, 4), (4, 9)), ("b",))
    assert isinstance(read.rear.radius, float) and cart({"spokes": 3, "rear": None}) == Cart("first", Wheel(3))
    check_fields(read, at=Plain(None, "cart", ConfigError))


@pytest.mark.parametrize(
    ("change", "message", "place"),
    [
        ({"spokes": 10**5000}, "cart, spokes: expected an integer of at most 100, found an integer of 16610 bits", ("spokes",)),
        ({"radius": math.nan}, "cart, radius: expected a positive number, found nan", ("radius",)),
        ({"radius": 10**400}, "cart, radius: expected a number of at most .*, found an integer of", ("radius",)),
        ({"offset": math.inf}, "cart, offset: expected a number of at most .*, found inf", ("offset",)),
        ({"rear": {"spokes": 0}}, "cart, rear, spokes: expected a positive integer, found 0", ("rear", "spokes")),
        ({"ranges": [[0, 4.9]]}, r"cart, ranges\[0\]\[1\]: expected an integer of at least 0, found 4.9", ("ranges", 0, 1)),
        ({7: 3}, "cart: key 7 is not text; put it in quotes", ()),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(change, message, place):
    with pytest.raises(ConfigError, match=message) as caught:
        cart({"spokes": 3, **change})
    assert caught.value.place == place


def read_bytes(document):
    """Read a file of bytes, some of which follow each other many times."""
    content = document["begin"] + document["repeat"] * document["times"] + document["end"]
    read_mapping(write(Path(), content.encode("latin-1"), document["name"]), error=ConfigError)


CONTENT = {"name": "a.yaml", "begin": "a: 1", "repeat": "", "times": 1, "end": ""}
FORMS: Kinds = {
    "bytes": (CONTENT, read_bytes),
    "yaml": ({"text": "a: 1"}, lambda document: read_mapping(write(Path(), document["text"]), error=ConfigError)),
    "json": ({"text": "{}"}, lambda document: read_mapping(write(Path(), document["text"], "a.json"), error=ConfigError)),
    "cart": ({"spokes": 3}, cart),
}
test_every_file_and_value_is_answered_as_written = golden_test("file_form.txt", FORMS)


def test_far_keys_suggest_nothing():
    with pytest.raises(ConfigError, match="unknown key 'sprocket'") as caught:
        cart({"spokes": 3, "sprocket": 3})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 201, "\x1b[31m", "a\nb"])
def test_names_that_a_message_cannot_repeat_are_refused(name):
    with pytest.raises(ConfigError, match="is no name of at most 200 printable characters") as caught:
        Plain({name: 1}, "cart", ConfigError).mapping()
    assert str(caught.value).isprintable()
    with pytest.raises(ConfigError, match="expected at most 200 printable characters") as caught:
        Plain(name, "cart", ConfigError).read(str)
    assert str(caught.value).isprintable()


def test_long_values_are_shown_shortened():
    with pytest.raises(ConfigError) as caught:
        cart({"spokes": "x" * 10**6, "offset": 1})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Cart("c", Wheel(0)), "cart, spokes: expected a positive integer, found 0"),
        (Cart("c", Wheel(1), Wheel(1, math.nan)), "cart, rear, radius: expected a positive number, found nan"),
        (Cart("c", Wheel(1), is_new=1), "cart, is_new: expected true or false, found 1"),
        (Cart(5, Wheel(1)), "cart, name: expected text, found 5"),
    ],
)
def test_values_made_in_python_are_held_against_the_same_bounds(value, message):
    with pytest.raises(ConfigError, match=message):
        check_fields(value, at=Plain(None, "cart", ConfigError))
