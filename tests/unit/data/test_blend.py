"""Metadatasets of Energon as the blend that --data-path would name, and what is refused in them."""

import math
from pathlib import Path

import pytest

from multimodal.data.blend import NamedData, read_mixture
from multimodal.values.errors import ConfigError

WEIGHED = "blend: [{weight: 6, path: a.jsonl}, {weight: 2, path: set, split_part: val}]"
REPEATED = "blend_epochized: [{repetitions: 0.5, path: a.jsonl}, {path: b.jsonl}]"
HALF = "subset: {range: [0%, 50%]}"


def write(folder: Path, train: str, name: str = "m.yaml", other: str = "path: o.jsonl") -> str:
    """Write a metadataset, beside a data set that Energon has prepared, and return its path."""
    (folder / "set" / ".nv-meta").mkdir(parents=True, exist_ok=True)
    text = f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {{train: {{{train}}}, other: {{{other}}}}}\n"
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    ("train", "words", "expected"),
    [
        (WEIGHED, "M", [("a.jsonl", 6), ("set/val", 2)]),
        (WEIGHED, "3 M 1 b", [("a.jsonl", 2.25), ("set/val", 0.75), ("b", 1)]),
        (REPEATED, "M", [("a.jsonl", None, 0.5), ("b.jsonl", None, 1)]),
        (REPEATED, "M b", [("a.jsonl", None, 0.5), ("b.jsonl", None, 1), ("b", None, 1)]),
        (f"path: set, subflavors: {{x: 1}}, {HALF}", "3 M/train 1 b", [("set/train", 3, 1, ((0.0, 0.5),)), ("b", 1)]),
        ("path: set, subset: {range: [9, end]}", "M", [("set/train", None, 1, ((9, math.inf),))]),
        ("path: set", "M/other", [("o.jsonl", None)]),
        (
            "blend: [{weight: 3, path: n.yaml, split_part: other, subset: {range: [50%, 100%]}}, {path: b.jsonl}]",
            "M",
            [("c.jsonl", 1, 1, ((0, 9), (0.5, 1.0))), ("d.jsonl", 2, 1, ((0.5, 1.0),)), ("b.jsonl", 1)],
        ),
    ],
)
def test_a_metadataset_is_the_blend_that_it_describes(tmp_path: Path, train: str, words: str, expected: list[tuple]) -> None:
    """Weights are shares of the entry that they are in; the inner range is taken first."""
    inner = "blend: [{path: c.jsonl, subset: {range: [0, 9]}}, {weight: 2, path: d.jsonl}]"
    write(tmp_path, "path: set", "n.yaml", other=inner)
    path = write(tmp_path, train)
    found = read_mixture([word.replace("M", path) for word in words.split()])
    places = [each[0] if "." not in each[0] and "/" not in each[0] else str(tmp_path / each[0]) for each in expected]
    assert found == tuple(NamedData(place, *each[1:]) for place, each in zip(places, expected, strict=True))


def test_ranges_are_taken_one_of_another() -> None:
    """As Energon does: numbers of the data set's samples first, then shares of these."""
    assert [*NamedData("a", ranges=((10, 20), (0.5, 1.0), (0.0, 0.5))).samples(100)] == [15, 16]
    assert [*NamedData("a", ranges=((0.25, 0.5),)).samples(10)] == [2, 3, 4]
    assert [*NamedData("a", ranges=((7, math.inf),)).samples(9)] == [7, 8]


def test_an_older_metadataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("__class__: Metadataset\nsplits: {}\n")
    with pytest.raises(ConfigError, match=r"m.yaml: is no Metadataset v2 of Energon"):
        read_mixture([str(tmp_path / "m.yaml")])
