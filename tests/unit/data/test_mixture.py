"""What --data-path may say of several data sets."""

import pytest

from multimodal.data.mixture import NamedData, read_mixture
from multimodal.values.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        (["0.7", "a", "3e-1", "b"], [("a", 0.7), ("b", 0.3)]),
        (["2", "a"], [("a", 2.0)]),
    ],
)
def test_weights_stand_before_every_path_or_before_none(words: list[str], expected: list[tuple[str, float | None]]) -> None:
    assert read_mixture(words) == tuple(NamedData(*each) for each in expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["0.7", "a", "b"],
            r"--data-path 0.7 a b: expected a weight before every path \(0.7 a.jsonl 0.3 b.jsonl\) or before none",
        ),
        (["a", "0.7"], "expected a weight before every path"),
        (["1", "2"], "expected a weight before every path"),
        (["0.7"], "expected a weight before every path"),
        (["0", "a", "1", "b"], "--data-path 0 a: the weight must be above 0"),
        (["nan", "a", "1", "b"], "--data-path nan a: the weight must be above 0"),
        (["1", "a", "inf", "b"], "--data-path inf b: the weight must be above 0"),
        (["a", "b", "a"], "--data-path: a is there twice; give it once"),
    ],
)
def test_anything_else_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_mixture(words)
