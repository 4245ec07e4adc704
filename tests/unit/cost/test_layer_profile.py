"""The costs file: its forms, its errors, and the fits that fill it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.cost.fit_quadratic import FitError, fit_error, fit_quadratic
from multimodal.cost.interpolated import Interpolated
from multimodal.cost.layer_curves import LayerCurves
from multimodal.cost.layer_profile import LayerProfile
from multimodal.cost.quadratic import Quadratic
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import LayerKind

SIZES = (64, 256, 1024, 4096, 16384)
POINTS = Interpolated((64.0, 256.0), (1.0, 2.0))
COEFFICIENTS = st.floats(0.0, 10.0)


@given(constant=COEFFICIENTS, linear=COEFFICIENTS, quadratic=COEFFICIENTS)
def test_an_exact_quadratic_is_found(constant: float, linear: float, quadratic: float) -> None:
    true = Quadratic(constant + 0.1, linear * 1e-2, quadratic * 1e-5)
    fitted = fit_quadratic(SIZES, [true.at(size, size**2) for size in SIZES])
    between = [size * 2 for size in SIZES]
    assert fit_error(fitted, between, [true.at(size, size**2) for size in between]).worst < 1e-6


def test_noise_does_not_make_coefficients_negative() -> None:
    noise = np.random.default_rng(1).uniform(0.9, 1.1, len(SIZES))
    fitted = fit_quadratic(SIZES, [size * 1e-3 * factor for size, factor in zip(SIZES, noise, strict=True)])
    assert min(fitted) >= 0
    assert fit_error(fitted, SIZES, [size * 1e-3 for size in SIZES]).worst < 0.1


def test_small_sizes_count_as_much_as_large_ones() -> None:
    # a constant that matters at the smallest size alone: least squares of absolute errors would lose it in 1 % of the largest
    seconds = [1e-4 + 1e-6 * size for size in SIZES]
    seconds[-1] *= 1.01
    assert fit_quadratic(SIZES, seconds).at(64, 64**2) == pytest.approx(seconds[0], rel=0.02)


def test_work_that_does_not_depend_on_the_cut_has_no_square() -> None:
    assert fit_quadratic(SIZES, [size**2 for size in SIZES], is_linear=True).quadratic == 0.0
    assert fit_quadratic(SIZES, [0.0] * len(SIZES)) == Quadratic()
    assert fit_error(Quadratic(), SIZES, [0.0] * len(SIZES)) == FitError(0.0, 0.0)


@pytest.mark.parametrize(
    ("tokens", "squared", "expected"),
    [
        (64, 64**2, 1.0),
        (160, 160**2, 1.5),
        (448, 448**2, 3.0),  # beyond: the last line goes on
        (32, 32**2, 5 / 6),
        (320, 2 * 160**2, 3.0),  # two sequences of 160
        (0, 0, 0.0),
    ],
)
def test_points_are_joined_by_straight_lines(tokens: int, squared: int, expected: float) -> None:
    assert POINTS.at(tokens, squared) == pytest.approx(expected)


def test_a_falling_first_line_does_not_end_below_zero() -> None:
    assert Interpolated((10.0, 20.0), (1.0, 3.0)).at(1, 1) == 0.0


@pytest.mark.parametrize("name", ["costs.yaml", "costs.json"])
def test_a_profile_is_read_back_as_written(tmp_path: Path, name: str) -> None:
    curves = LayerCurves(Quadratic(1e-5, 2e-7, 3e-12), POINTS, Quadratic(0.0, 1.0), Quadratic())
    profile = LayerProfile(
        "CPU", "float32", {("llm", LayerKind.TRANSFORMER, 2, 1): curves, ("llm", LayerKind.HEAD, 1, 1): curves}
    )
    profile.to_file(tmp_path / name)
    assert LayerProfile.from_file(tmp_path / name) == profile


ENTRY = {"forward": [1, 2, 3], "input_gradient": [0, 0, 0], "weight_gradient": [0, 0, 0]}


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ({}, "'units' must map"),
        ({"llm": []}, "unit 'llm': expected a mapping"),
        ({"llm": {"attention": [ENTRY]}}, "unit 'llm', attention: is no kind of layer"),
        ({"llm": {"head": ENTRY}}, "expected a list with one mapping"),
        ({"llm": {"head": [{"forward": [1, 2, 3]}]}}, "head, entry 0: 'input_gradient' is missing"),
        ({"llm": {"head": [{**ENTRY, "forward": [1, 2]}]}}, r"entry 0, forward: expected \[c0, c1, c2\] or"),
        ({"llm": {"head": [{**ENTRY, "forward": [1, 2, -3]}]}}, "expected numbers of at least 0, found -3"),
        ({"llm": {"head": [{**ENTRY, "forward": {"tokens": [2, 1], "seconds": [1, 2]}}]}}, "ascending tokens"),
        ({"llm": {"head": [{**ENTRY, "backward": [1, 2, 3]}]}}, "unknown key 'backward'"),
        ({"llm": {"head": [{**ENTRY, "tensor_parallel_size": 0}]}}, "tensor_parallel_size must be a positive integer, found 0"),
        ({"llm": {"head": [ENTRY, ENTRY]}}, "entry 1: tp 1, cp 1 is listed twice"),
    ],
)
def test_wrong_files_are_refused(units: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerProfile.from_dict({"units": units})
