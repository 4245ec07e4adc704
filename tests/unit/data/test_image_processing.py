"""Sizes and the order of patches."""

import math
from fractions import Fraction
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from multimodal.data.image_processing import cut_patches, image_grid, image_to_patches, patch_positions, smart_resize
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ImageInput

SIDES = st.integers(1, 4000)
FACTORS = st.sampled_from([1, 4, 14, 28, 32])
TINY = ImageInput(patch_size=2, merge_size=2, in_channels=1, min_pixels=1, max_pixels=10**6)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((640, 426), (644, 420)),  # rounded to multiples of 28
        ((105, 105), (112, 112)),
        ((24, 24), (56, 56)),  # enlarged to 3,136 pixels
        ((4000, 3000), (1148, 840)),  # shrunk to 1,003,520 pixels
        ((1, 200), (28, 812)),  # the longest that is allowed
        ((42, 70), (56, 56)),  # 1.5 and 2.5 factors both round to the even 2
    ],
)
def test_known_sizes_of_qwen2_vl(size: tuple[int, int], expected: tuple[int, int]) -> None:
    """Sizes worked out by hand from the published rule."""
    assert smart_resize(*size, factor=28, min_pixels=3136, max_pixels=1003520) == expected


@given(SIDES, SIDES, FACTORS, st.integers(1, 10**5), st.integers(0, 10**6))
def test_smart_resize_agrees_with_exact_arithmetic(height: int, width: int, factor: int, min_pixels: int, extra: int) -> None:
    """An independent statement of the rule, in integers and fractions instead of floating-point square roots."""
    max_pixels = min_pixels + extra
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(DataError, match="more than 200 times longer"):
            smart_resize(height, width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
        return
    found = smart_resize(height, width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    rounded = tuple(round(Fraction(side, factor)) * factor for side in (height, width))
    if rounded[0] * rounded[1] > max_pixels:
        # floor(side * sqrt(max_pixels / area) / factor)
        scaled = [math.isqrt(side * side * max_pixels // (height * width * factor * factor)) for side in (height, width)]
        expected = tuple(max(1, count) * factor for count in scaled)
    elif rounded[0] * rounded[1] < min_pixels:
        squares = [Fraction(side * side * min_pixels, height * width * factor * factor) for side in (height, width)]
        expected = tuple((math.isqrt(math.ceil(square) - 1) + 1) * factor for square in squares)
    else:
        expected = rounded
    assert all(abs(side - exact) in (0, factor) for side, exact in zip(found, expected, strict=True))
    if found != expected:  # only where a side lies on a multiple of the factor, within rounding
        target = max_pixels if rounded[0] * rounded[1] > max_pixels else min_pixels
        scale = math.sqrt(target / (height * width))
        assert any(math.isclose(s * scale / factor, round(s * scale / factor), rel_tol=1e-12) for s in (height, width))


def test_patches_come_in_merge_window_order() -> None:
    """Pixels that encode their own place show which patch went where."""
    height, width, patch, merge = 8, 12, 2, 2
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    pixels = np.stack((rows * 100 + columns, -(rows * 100 + columns)), axis=-1).astype(np.float32)
    patches = cut_patches(pixels, patch_size=patch, merge_size=merge)
    positions = patch_positions((height // patch, width // patch), merge_size=merge)
    assert positions[:8].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert positions[12:16].tolist() == [[2, 0], [2, 1], [3, 0], [3, 1]]
    assert patches.shape == (24, 2 * patch * patch)
    for vector, (row, column) in zip(patches, positions, strict=True):
        expected = pixels[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        np.testing.assert_array_equal(vector, np.concatenate([expected[..., 0].ravel(), expected[..., 1].ravel()]))


def test_pixels_stay_bytes() -> None:
    """In their places."""
    pixels = np.zeros((4, 4), dtype=np.uint8)
    pixels[0, 0], pixels[0, 3] = 255, 51
    found = image_to_patches(Image.fromarray(pixels), image_input=TINY)
    assert found.grid == (2, 2) and found.patches.dtype == np.uint8
    assert found.patches.tolist() == [[255, 0, 0, 0], [0, 51, 0, 0], [0] * 4, [0] * 4]


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (5, 2)])
def test_images_smaller_than_a_token_are_enlarged(size: tuple[int, int]) -> None:
    """An image of one pixel is still one token."""
    found = image_to_patches(Image.new("L", size, 255), image_input=TINY)
    assert found.grid == image_grid(width=size[0], height=size[1], image_input=TINY)
    assert min(found.grid) == 2 and len(found.patches) == found.grid[0] * found.grid[1]
    assert (found.patches == 255).all()


@pytest.mark.parametrize("size", [(10**400, 10**400), (2**31, 2**31 - 1)])
def test_sides_that_no_file_has_are_refused(size: tuple[int, int]) -> None:
    """Too large even for a float, or just above what PNG can hold."""
    with pytest.raises(DataError, match=r"more than 2,147,483,647 pixels does not exist; correct its size"):
        image_grid(width=size[0], height=size[1], image_input=TINY)


@pytest.mark.parametrize("fit", ["stretch", "crop"])
def test_what_is_no_whole_patch_is_cut_off_as_by_a_convolution(fit: Literal["stretch", "crop"]) -> None:
    image = Image.effect_noise((30, 19), 80).convert("RGB")
    image_input = ImageInput(patch_size=4, merge_size=1, image_size=11, fit=fit)
    exact = ImageInput(patch_size=11, merge_size=1, image_size=11, fit=fit)
    whole = image_to_patches(image, image_input=exact).patches.reshape(3, 11, 11)
    found = image_to_patches(image, image_input=image_input)
    assert found.grid == (2, 2)
    expected = cut_patches(np.ascontiguousarray(whole[:, :8, :8].transpose(1, 2, 0)), patch_size=4, merge_size=1)
    assert np.array_equal(found.patches, expected)
