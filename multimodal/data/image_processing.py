"""Cuts a decoded image into patches at its native resolution, by Qwen2-VL's rule, or at one size for all images.

The size of the result follows from (width, height) alone, so token counts are known before any pixel is decoded. Pixels are
resized bicubically and stay bytes: the stage that takes them normalises them (`model/inputs/pixels.py`), which saves three
quarters of the memory and copies on the way there. Transparent images are put on white; an animation contributes its first frame.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from multimodal.data.sample_source import ItemPixels
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ImageInput
from multimodal.values.units.items import Grid

Pixel = TypeVar("Pixel", np.uint8, np.float32)

MAX_ASPECT_RATIO = 200
"""The longest image (long side / short side) that Qwen2-VL's rule accepts."""
MAX_SIDE = 2**31 - 1
"""The longest side that an image file can have (PNG's)."""


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int, num_frames: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Return the (height, width) to which an image is resized, as Qwen2-VL does (`smart_resize` in its image processor).

    num_frames: by which areas are multiplied where they are compared, and where they are scaled (Qwen3-VL's videos).

    Both become multiples of `factor` = patch_size x merge_size, the area lies within [min_pixels, max_pixels] and the aspect
    ratio changes as little as that allows. As in the original, rounding comes first: a side is never shorter than `factor`
    (a thin image may pass max_pixels), sizes shrunk to max_pixels are rounded down and sizes enlarged to min_pixels up, so
    bounds less than four times apart can be missed by part of a row and a column of tokens.

    Raises DataError for a side below 1 or above MAX_SIDE and for an aspect ratio above 200.
    """
    if min(height, width) < 1:
        raise DataError(f"an image of {width}x{height} pixels has no area; replace it")
    if max(height, width) > MAX_SIDE:
        raise DataError(f"an image with a side of more than {MAX_SIDE:,} pixels does not exist; correct its size")
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise DataError(
            f"an image of {width}x{height} pixels is more than {MAX_ASPECT_RATIO} times longer than it is thick; "
            "crop it or cut it into several images"
        )
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    area, (compared, scaled) = new_height * new_width, num_frames
    if compared * area > max_pixels:
        shrink = math.sqrt(scaled * height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif compared * area < min_pixels:
        grow = math.sqrt(min_pixels / (scaled * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def image_grid(*, width: int, height: int, image_input: ImageInput) -> tuple[int, int]:
    """Return the (rows, columns) of an image's patches, multiples of merge_size; raises DataError as `smart_resize`."""
    if image_input.image_size is not None:
        return image_input.grid_size, image_input.grid_size
    if image_input.longest_side is not None:
        # Pixtral's rule: scaled down to a longest side, then rounded up
        if min(height, width) < 1 or max(height, width) > MAX_SIDE:
            raise DataError(f"an image of {width}x{height} pixels does not exist; correct its size")
        ratio = max(height / image_input.longest_side, width / image_input.longest_side)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return max(1, -(-height // image_input.patch_size)), max(1, -(-width // image_input.patch_size))
    factor, bounds = image_input.patch_size * image_input.merge_size, (image_input.min_pixels, image_input.max_pixels)
    new_height, new_width = smart_resize(height, width, factor=factor, min_pixels=bounds[0], max_pixels=bounds[1])
    return new_height // image_input.patch_size, new_width // image_input.patch_size


def video_grid(
    *, width: int, height: int, num_frames: int, image_input: ImageInput, max_pixels: int | None = None
) -> tuple[int, int]:
    """Return the (rows, columns) of patches of every step of a video, as the video processors of Qwen's models do.

    num_frames: that are taken of it; max_pixels: a further bound, of one frame's. Raises DataError as `image_grid`.
    """
    video, factor = image_input.video, image_input.patch_size * image_input.merge_size
    if video is None:
        bound = min(image_input.max_pixels, max_pixels or image_input.max_pixels)
        bounded = replace(image_input, max_pixels=bound, min_pixels=min(image_input.min_pixels, bound))
        return image_grid(width=width, height=height, image_input=bounded)
    most, least = video.max_pixels, video.min_pixels
    if video.max_tokens is not None and video.has_timestamps:
        of_frame = min(video.max_tokens * factor**2, most // num_frames)
        most = max(of_frame, int(least * 1.05)) * num_frames
    elif video.max_tokens is not None:
        of_all = int(video.max_tokens * factor**2 * 0.9)
        most = max(min(most, of_all * image_input.num_frames // num_frames), int(least * 1.05))
    frames = num_frames if video.has_timestamps else 1
    most = min(most, max_pixels * frames) if max_pixels else most
    least = min(least, most)
    if video.has_timestamps and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    # as in the original, areas are compared with as many frames as there are in whole steps, and scaled by those that there are
    whole = round(frames / image_input.num_frames) * image_input.num_frames if video.has_timestamps else 1
    size = smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most, num_frames=(whole, frames))
    return size[0] // image_input.patch_size, size[1] // image_input.patch_size


@lru_cache(maxsize=2**16)
def tile_grid(*, width: int, height: int, image_input: ImageInput) -> tuple[int, int]:
    """Return the (columns, rows) of tiles whose aspect ratio is closest to an image's own (InternVL). O(max_tiles^2).

    Of equally close ones, the one with the fewest tiles, unless the image has more than half of the pixels of a later one.
    """
    most, size = image_input.max_tiles, image_input.image_size
    if most == 1 or size is None:
        return 1, 1
    grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    best, best_difference = (1, 1), math.inf
    for columns, rows in sorted(grids, key=math.prod):
        difference = abs(width / height - columns / rows)
        if difference < best_difference or (difference == best_difference and width * height > size**2 * columns * rows / 2):
            best, best_difference = (columns, rows), difference
    return best


def num_tiles(*, width: int, height: int, image_input: ImageInput) -> int:
    """Return the number of items that an image of this size becomes: its tiles and, if there are several, the whole image."""
    count = math.prod(tile_grid(width=width, height=height, image_input=image_input))
    return count + 1 if count > 1 else 1


def step_to_patches(frames: Sequence[Image.Image], *, image_input: ImageInput, grid: Grid, tile: int = 0) -> ItemPixels:
    """Cut one image, or the frames of a step of a video, which follow each other in every channel of a patch."""
    if len(frames) == 1:
        return image_to_patches(frames[0], image_input=image_input, tile=tile, grid=grid)
    alone = replace(image_input, num_frames=1)
    cut = [image_to_patches(frame, image_input=alone, grid=grid).patches for frame in frames]
    of_channels = np.stack([each.reshape(len(each), image_input.in_channels, -1) for each in cut], axis=2)
    return ItemPixels(of_channels.reshape(len(of_channels), -1).astype(np.uint8, copy=False), grid)


def image_to_patches(image: Image.Image, *, image_input: ImageInput, tile: int = 0, grid: Grid | None = None) -> ItemPixels:
    """Resize and cut one decoded image, as RGB or grey (in_channels 3 or 1); raises DataError as `smart_resize`.

    tile: index among the items that the image becomes (`num_tiles`). grid: to which it is brought; None: as `image_grid` says.
    """
    tiles = tile_grid(width=image.width, height=image.height, image_input=image_input)
    grid = grid or image_grid(width=image.width, height=image.height, image_input=image_input)
    rows, columns = grid[:2]
    size = (columns * image_input.patch_size, rows * image_input.patch_size)
    full = size if image_input.image_size is None else (image_input.image_size, image_input.image_size)
    if image.mode.startswith("I;16"):
        values, transparent = np.asarray(image), image.info.get("transparency")
        image = Image.fromarray(np.where(values == transparent, 255, values >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if image_input.in_channels == 1 else "RGB")
    if image_input.image_size is not None and image_input.fit == "crop":  # as CLIP's processor: a square out of the middle
        shorter_side = image_input.shorter_side or image_input.image_size
        shorter = min(image.size)
        width, height = (int(shorter_side * side / shorter) for side in image.size)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        left, top = (width - image_input.image_size) // 2, (height - image_input.image_size) // 2
        image = image.crop((left, top, left + image_input.image_size, top + image_input.image_size))
    if tile < math.prod(tiles):
        image = _cut_tile(image, tiles=tiles, tile=tile, size=full)
    if image.size != full:
        image = image.resize(full, Image.Resampling.BICUBIC)
    if full != size:  # as a convolution leaves out what is no whole patch
        image = image.crop((0, 0, *size))
    pixels = np.asarray(image, dtype=np.uint8).reshape(size[1], size[0], image_input.in_channels)
    patches = cut_patches(pixels, patch_size=image_input.patch_size, merge_size=image_input.merge_size)
    if image_input.num_frames > 1:
        channels = patches.reshape(len(patches), image_input.in_channels, 1, -1)
        patches = np.repeat(channels, image_input.num_frames, axis=2).reshape(len(patches), -1)
    return ItemPixels(patches, grid)


def _cut_tile(image: Image.Image, *, tiles: tuple[int, int], tile: int, size: tuple[int, int]) -> Image.Image:
    """Scale an image to the size of all of its tiles together, and return one tile; tiles count row by row."""
    if tiles == (1, 1):
        return image
    scaled = image.resize((tiles[0] * size[0], tiles[1] * size[1]), Image.Resampling.BICUBIC)
    left, top = tile % tiles[0] * size[0], tile // tiles[0] * size[1]
    return scaled.crop((left, top, left + size[0], top + size[1]))


def cut_patches(pixels: npt.NDArray[Pixel], *, patch_size: int, merge_size: int) -> npt.NDArray[Pixel]:
    """Cut [height, width, channels] into [num_patches, channels * patch_size * patch_size], in merge-window order.

    Windows of merge_size x merge_size patches follow each other row by row, and so do the patches inside a window; a patch
    lists its first channel's rows, then its second's. Both sides must be multiples of patch_size x merge_size.
    """
    height, width, channels = pixels.shape
    factor = patch_size * merge_size
    windows = pixels.reshape(height // factor, merge_size, patch_size, width // factor, merge_size, patch_size, channels)
    ordered = windows.transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(ordered.reshape(-1, channels * patch_size * patch_size))


def patch_positions(grid: Grid, *, merge_size: int) -> npt.NDArray[np.int64]:
    """Return [num_patches, 2]: the (row, column) of each patch of a grid, in merge-window order."""
    rows, columns = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij")
    windows = np.stack((rows, columns), axis=-1).reshape(grid[0] // merge_size, merge_size, grid[1] // merge_size, merge_size, 2)
    return windows.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int64, copy=False)
