import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import pytest

from multimodal.values.errors import ConfigError
from multimodal.values.typed_reader import Plain, check_fields


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
    value = {
        "spokes": 3,
        "rear": {"spokes": 4, "radius": 2},
        "colour": "blue",
        "size": "large",
        "is_new": True,
        "offset": 1e-5,
        "ranges": [[0, 4], [4, 9]],
        "tags": ["b"],
    }
    read = cart(value)
    assert read == Cart("first", Wheel(3), Wheel(4, 2.0), Colour.BLUE, "large", True, 1e-5, ((0, 4), (4, 9)), ("b",))
    assert isinstance(read.rear.radius, float) and cart({"spokes": 3, "rear": None}) == Cart("first", Wheel(3))
    check_fields(read, at=Plain(None, "cart", ConfigError))


@pytest.mark.parametrize(
    ("change", "message", "place"),
    [
        ({"spokes": "3"}, "cart, spokes: expected a positive integer, found '3'; write it without quotes", ("spokes",)),
        ({"spokes": True}, "cart, spokes: expected a positive integer, found True", ("spokes",)),
        ({"spokes": 3.0}, "cart, spokes: expected a positive integer, found 3.0", ("spokes",)),
        ({"spokes": None}, "cart, spokes: expected a positive integer, found None", ("spokes",)),
        ({"spokes": -1}, "cart, spokes: expected a positive integer, found -1", ("spokes",)),
        ({"spokes": 1000}, "cart, spokes: expected an integer of at most 100, found 1000", ("spokes",)),
        ({"spokes": 10**5000}, "cart, spokes: expected an integer of at most 100, found an integer of 16610 bits", ("spokes",)),
        ({"radius": 0}, "cart, radius: expected a positive number, found 0", ("radius",)),
        ({"radius": math.nan}, "cart, radius: expected a positive number, found nan", ("radius",)),
        ({"radius": 10**400}, "cart, radius: expected a number of at most .*, found an integer of", ("radius",)),
        ({"offset": math.inf}, "cart, offset: expected a number of at most .*, found inf", ("offset",)),
        ({"offset": [1.0]}, "cart, offset: expected a number of at least 0, found [1.0]", ("offset",)),
        ({"rear": {"spokes": 0}}, "cart, rear, spokes: expected a positive integer, found 0", ("rear", "spokes")),
        ({"rear": {"radius": 1}}, "cart, rear: 'spokes' is missing; add it", ("rear",)),
        ({"rear": [3]}, "cart, rear: expected a mapping with spokes, radius, found [3]", ("rear",)),
        ({"colour": "green"}, "cart, colour: expected one of red, blue, found 'green'", ("colour",)),
        ({"colour": ["red"]}, "cart, colour: expected one of red, blue, found ['red']", ("colour",)),
        ({"size": 1}, "cart, size: expected one of small, large, found 1", ("size",)),
        ({"is_new": "false"}, "cart, is_new: expected true or false, found 'false'; write it without quotes", ("is_new",)),
        ({"is_new": 0}, "cart, is_new: expected true or false, found 0", ("is_new",)),
        ({"ranges": [[0, 4.9]]}, "cart, ranges[0][1]: expected an integer of at least 0, found 4.9", ("ranges", 0, 1)),
        ({"ranges": [[0, 10**12]]}, "cart, ranges[0][1]: expected an integer of at most 9", ("ranges", 0, 1)),
        ({"ranges": [[0]]}, "cart, ranges[0]: expected a list of 2 entries, found [0]", ("ranges", 0)),
        ({"ranges": "0-4"}, "cart, ranges: expected a list, found '0-4'", ("ranges",)),
        ({"tags": []}, "cart, tags: expected a list with at least 1 entry, found []", ("tags",)),
        ({"tags": ["c"]}, "cart, tags[0]: expected one of a, b, found 'c'", ("tags", 0)),
        ({"name": "second"}, "cart: unknown key 'name'; known keys are spokes, radius, rear", ("name",)),
        ({"spoke": 3}, "did you mean 'spokes'?", ("spoke",)),
        ({7: 3}, "cart: key 7 is not text; put it in quotes", ()),
    ],
)
def test_what_does_not_fit_is_named(change, message, place):
    with pytest.raises(ConfigError) as caught:
        cart({"spokes": 3, **change})
    head, _, tail = message.partition(".*")
    assert head in str(caught.value) and tail in str(caught.value)
    assert caught.value.place == place


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
