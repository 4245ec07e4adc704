"""Opens image files that others made: some formats, a bounded size, pixels of a known range; every fault is a DataError."""

import os
import warnings

from PIL import Image, UnidentifiedImageError

from multimodal.data.image_limits import PILLOW_MAX_PIXELS
from multimodal.data.image_processing import image_to_patches
from multimodal.data.sample_source import ItemPixels
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ImageInput

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What is opened, whatever a file is called; Pillow's other decoders, some of which start programs, never see a file."""
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "I;16", "I;16L", "I;16B", "I;16N")
"""Pixels whose black and white are known."""


warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # what is between Pillow's two limits, --max-image-pixels decides


def read_image_size(path: str, *, where: str) -> tuple[int, int]:
    """Return (width, height) from the file's header; raises DataError naming the file and `where` it is asked for."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            return image.size
    except Exception as problem:  # the decoders of damaged files raise errors of every kind
        raise _unreadable(path, where=where, problem=problem) from problem


def check_image_size(path: str, *, size: tuple[int, int], max_pixels: int, where: str) -> None:
    """Raise DataError for an image of more pixels than are decoded; `path`, `size` (width, height) and `where` name it."""
    width, height = size
    if width * height > max_pixels:
        raise DataError(
            f"{where}: {path} has {_shown(width)} x {_shown(height)} pixels, but no more than {max_pixels:,} are decoded; "
            f"scale it down, or raise --max-image-pixels (up to {PILLOW_MAX_PIXELS:,})"
        )


def read_image(path: str, *, size: tuple[int, int], image_input: ImageInput, where: str) -> ItemPixels:
    """Decode an image file into patches; of an animation or a file with several pages the first.

    `size` is the (width, height) that the lengths were computed from, `where` names the sample and its line in errors.
    Raises DataError when the file is missing, damaged, none of FORMATS, of another size (before it is decoded), or has pixels of
    unknown range.
    """
    try:
        with Image.open(path, formats=FORMATS) as image:
            found = image.size
            if found == size:
                image.load()
    except Exception as problem:  # as above
        raise _unreadable(path, where=where, problem=problem) from problem
    if found != size:
        raise DataError(
            f"{where}: {path} is {found[0]}x{found[1]} pixels but the manifest says {size[0]}x{size[1]}; "
            "correct width and height there, or replace the file"
        )
    if image.mode in ("I", "F"):
        raise DataError(
            f"{where}: {path} has 32-bit pixels (mode {image.mode}) of unknown range; convert it to 8 or 16 bits a channel"
        )
    if image.mode not in _MODES:
        raise DataError(f"{where}: {path} has pixels of mode {image.mode}, expected grey, RGB or CMYK; convert it to RGB")
    return image_to_patches(image, image_input=image_input)


def _unreadable(path: str, *, where: str, problem: Exception) -> DataError:
    if not os.path.isfile(path):
        return DataError(f"{where}: {path} does not exist; restore the file or remove that line")
    if isinstance(problem, Image.DecompressionBombError):
        return DataError(
            f"{where}: {path} has more than {PILLOW_MAX_PIXELS:,} pixels, which Pillow refuses to open; scale it down"
        )
    reason = " ".join(str(problem).split()) or type(problem).__name__
    if isinstance(problem, UnidentifiedImageError):
        reason = f"it is none of {', '.join(FORMATS)}"
    return DataError(f"{where}: {path} cannot be decoded as an image ({reason}); replace the file or remove that line")


def _shown(side: int) -> str:
    return f"{side:,}" if side < 10**15 else "more than 10^15"
