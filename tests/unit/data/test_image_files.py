"""Image files: formats, sizes, kinds of pixels, and what is wrong with damaged ones."""

import io
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from multimodal.data.image_files import FORMATS, check_image_size, read_image, read_image_size
from multimodal.data.sample_source import DEFAULT_MAX_PIXELS
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ImageInput

TINY = ImageInput(patch_size=2, merge_size=2, in_channels=1, min_pixels=1, max_pixels=10**6)
COLOUR = ImageInput(patch_size=2, merge_size=2, in_channels=3, min_pixels=1)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("1", (4, 4), 1), (1.0, 1.0, 1.0)),
        (Image.new("L", (4, 4), 51), (-0.6, -0.6, -0.6)),
        (Image.new("RGB", (4, 4), (255, 0, 51)), (1.0, -1.0, -0.6)),
        (Image.new("RGBA", (4, 4), (0, 0, 0, 0)), (1.0, 1.0, 1.0)),  # transparent: the white behind it
        (Image.new("RGB", (4, 4), (255, 0, 51)).convert("P"), (1.0, -1.0, -0.6)),
        (Image.fromarray(np.full((4, 4), 51 * 256, dtype=np.uint16)), (-0.6, -0.6, -0.6)),
        (Image.new("LA", (4, 4), (0, 0)), (1.0, 1.0, 1.0)),
    ],
    ids=["bits", "grey", "rgb", "transparent", "palette", "16-bit", "transparent grey"],
)
def test_every_kind_of_image_becomes_rgb(tmp_path: Path, image: Image.Image, expected: tuple[float, ...]) -> None:
    """Each channel of the patch holds the colour one would see."""
    path = str(tmp_path / "image.png")
    image.save(path)
    patches = read_image(path, size=(4, 4), image_input=COLOUR, where="here").patches / 127.5 - 1
    np.testing.assert_allclose(patches.reshape(4, 3, 4).mean(axis=(0, 2)), expected, atol=1e-6)


def test_read_image_size_reads_the_header(tmp_path: Path) -> None:
    """Width first, as PIL has it."""
    Image.new("RGB", (7, 5)).save(tmp_path / "image.png")
    assert read_image_size(str(tmp_path / "image.png"), where="here") == (7, 5)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """Truncated, corrupt, missing and foreign files say who, where and what to do."""
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(good)
    damaged = bytearray(good.read_bytes())
    damaged[60:90] = bytes(30)
    for content in (good.read_bytes()[:2000], bytes(damaged), b"no image at all", b""):
        bad.write_bytes(content)
        message = rf"m\.jsonl, line 3: {re.escape(str(bad))} cannot be decoded .*; replace the file or remove that line"
        with pytest.raises(DataError, match=message):
            read_image(str(bad), size=(40, 40), image_input=TINY, where="m.jsonl, line 3")
    for read in (
        lambda: read_image(str(tmp_path / "gone.png"), size=(4, 4), image_input=TINY, where="line 3"),
        lambda: read_image_size(str(tmp_path / "gone.png"), where="line 3"),
    ):
        with pytest.raises(DataError, match=r"line 3: .*gone\.png does not exist; restore the file or remove that line"):
            read()


WHITE = Image.new("RGB", (8, 8), (255, 255, 255))


@pytest.mark.parametrize(("name", "image"), [*((name, WHITE) for name in FORMATS), ("JPEG", Image.new("CMYK", (8, 8), (0,) * 4))])
def test_the_documented_formats_are_read(tmp_path: Path, name: str, image: Image.Image) -> None:
    """Whatever the file is called; in printers' JPEG, no ink is white."""
    path = str(tmp_path / "image.dat")
    image.save(path, format=name)
    assert read_image_size(path, where="here") == (8, 8)
    np.testing.assert_allclose(read_image(path, size=(8, 8), image_input=COLOUR, where="here").patches, 255, atol=2)


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_shows_its_first_picture(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "image")
    pictures = [Image.new("RGB", (8, 8), colour) for colour in ((0, 0, 0), (255, 255, 255))]
    pictures[0].save(path, format=name, save_all=True, append_images=pictures[1:])
    np.testing.assert_allclose(read_image(path, size=(8, 8), image_input=COLOUR, where="here").patches, 0, atol=2)


def png_that_claims(width: int, height: int) -> bytes:
    """Nearly no data under a header of this size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is compared before its pixels are, and Pillow's own limit has a message, too."""
    path = tmp_path / "bomb.png"
    path.write_bytes(png_that_claims(12000, 12000))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("pixels are decoded"))
    with pytest.raises(DataError, match=r"line 3: .*bomb\.png is 12000x12000 pixels but the manifest says 8x8"):
        read_image(str(path), size=(8, 8), image_input=COLOUR, where="line 3")
    with pytest.raises(
        DataError, match=r"bomb\.png has 12,000 x 12,000 pixels, but no more than 89,478,485 are .*--max-image-pixels"
    ):
        check_image_size(
            str(path), size=read_image_size(str(path), where="line 3"), max_pixels=DEFAULT_MAX_PIXELS, where="line 3"
        )
    path.write_bytes(png_that_claims(2**31 - 1, 2**31 - 1))
    with pytest.raises(DataError, match=r"line 3: .*bomb\.png has more than 178,956,970 pixels, which Pillow refuses"):
        read_image_size(str(path), where="line 3")


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    image.save(content, format=kind)
    return content.getvalue()


NO_FORMAT = r"none of JPEG, PNG, WEBP, GIF, BMP, TIFF\); replace the file"


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        # Lengths come from the manifest, so a file of another size would break them.
        (saved(Image.new("RGB", (7, 5))), (5, 7), "is 7x5 pixels but the manifest says 5x7; correct width and height"),
        # Of floating-point numbers, black and white are not known.
        (saved(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), (4, 4), r"32-bit pixels .* convert it"),
        (saved(Image.new("LAB", (8, 8)), "TIFF"), (8, 8), "has pixels of mode LAB, expected grey, RGB or CMYK; convert it"),
        # Pillow hands PostScript to an interpreter; it must not come so far, whatever the file is called.
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", (8, 8), NO_FORMAT),
        (b"P6 8 8 255\n" + bytes(192), (8, 8), NO_FORMAT),
        (png_that_claims(0, 8), (0, 8), "cannot be decoded as an image"),
    ],
    ids=["another size", "unknown range", "Lab", "PostScript", "PPM", "no area"],
)
def test_what_is_no_image_as_promised_is_refused(tmp_path: Path, content: bytes, size: tuple[int, int], message: str) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"line 3: .*image\.png .*{message}"):
        read_image(str(path), size=size, image_input=COLOUR, where="line 3")


@pytest.mark.filterwarnings("ignore:")
@pytest.mark.parametrize("name", FORMATS)
def test_no_damage_is_anything_but_a_data_error(tmp_path: Path, name: str) -> None:
    """Files with bytes overwritten or cut off either still decode, or say which file and line it was."""
    path = tmp_path / "image"
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(path, format=name)
    good = path.read_bytes()
    for _ in range(60):
        damaged = np.frombuffer(good, dtype=np.uint8).copy()
        damaged[random.integers(0, len(good), random.integers(1, 8))] = random.integers(0, 256)
        path.write_bytes(damaged.tobytes()[: random.integers(1, len(good) + 1)])
        try:
            assert read_image(str(path), size=(24, 24), image_input=COLOUR, where="line 3").grid == (12, 12)
        except DataError as problem:
            assert f"line 3: {path}" in str(problem)
