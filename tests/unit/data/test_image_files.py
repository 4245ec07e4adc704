"""Image files: formats, sizes, kinds of pixels, and what is wrong with damaged ones."""

import io
import json
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from multimodal.data.image_files import (
    FORMATS,
    FramePlace,
    ManifestPaths,
    _size_of_jpeg,
    check_image_size,
    frame_address,
    parse_frame_address,
    read_frames,
    read_image,
    read_image_size,
    read_video_length,
)
from multimodal.data.image_processing import cut_patches, image_grid, image_to_patches, patch_positions
from multimodal.data.sample_source import DEFAULT_MAX_PIXELS
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ImageInput
from tests.unit.data.conftest import DataFolder, assert_same
from tests.unit.data.forms.test_sample_files import write_tar

TINY = ImageInput(patch_size=2, merge_size=2, in_channels=1, min_pixels=1, max_pixels=10**6)
COLOUR = ImageInput(patch_size=2, merge_size=2, in_channels=3, min_pixels=1)
DEEP = Image.fromarray(np.full((4, 4), 51 * 256, dtype=np.uint16))
DEEP.info["transparency"] = 7  # a grey that it does not have


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("1", (4, 4), 1), (1.0, 1.0, 1.0)),
        (Image.new("L", (4, 4), 51), (-0.6, -0.6, -0.6)),
        (Image.new("RGB", (4, 4), (255, 0, 51)), (1.0, -1.0, -0.6)),
        (Image.new("RGBA", (4, 4), (0, 0, 0, 0)), (1.0, 1.0, 1.0)),  # transparent: the white behind it
        (Image.new("RGB", (4, 4), (255, 0, 51)).convert("P"), (1.0, -1.0, -0.6)),
        (DEEP, (-0.6, -0.6, -0.6)),
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


def test_damaged_files_are_named(tmp_path: Path) -> None:
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
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DataError, match=r"line 3: .*pipe\.png is not a regular file; put a file there or remove that line"):
        ManifestPaths(tmp_path, allows_outside=False).resolve("pipe.png", where="line 3")


WHITE = Image.new("RGB", (8, 8), (255, 255, 255))


@pytest.mark.parametrize(("name", "image"), [*((name, WHITE) for name in FORMATS), ("JPEG", Image.new("CMYK", (8, 8), (0,) * 4))])
def test_the_documented_formats_are_read(tmp_path: Path, name: str, image: Image.Image) -> None:
    """Whatever the file is called; in printers' JPEG, no ink is white."""
    path = str(tmp_path / "image.dat")
    image.save(path, format=name)
    assert read_image_size(path, where="here") == (8, 8)
    np.testing.assert_allclose(read_image(path, size=(8, 8), image_input=COLOUR, where="here").patches, 255, atol=2)


def test_a_jpeg_has_the_size_that_pillow_reads() -> None:
    options = ({}, {"progressive": True}, {"comment": b"of any length"}, {"restart_marker_blocks": 1})
    for image in (Image.new("RGB", (30, 17)), Image.new("L", (1, 300)), Image.new("CMYK", (9, 8))):
        for chosen in options:
            content = saved(image, "JPEG", **chosen)
            assert _size_of_jpeg(io.BytesIO(content)) == image.size
            frame = content.index(b"\xff\xc2" if "progressive" in chosen else b"\xff\xc0")
            lossless = bytearray(content)
            lossless[frame + 1] = 0xC3
            assert _size_of_jpeg(io.BytesIO(lossless)) is None
            with pytest.raises(DataError, match="cannot be decoded"):
                read_image_size("image", content=io.BytesIO(content[: frame + 7]), where="line 3")


@pytest.mark.parametrize("name", ["JPEG", "WEBP", "PNG", "TIFF"])
def test_a_photo_is_set_upright_as_pillow_does(name: str) -> None:
    """Whatever lies in its EXIF; one that cannot be read, or an unknown orientation, turns nothing."""
    picture = Image.fromarray(np.arange(0, 240, 10, dtype=np.uint8).reshape(4, 6)).convert("RGB")
    told, damaged = [{"exif": Image.Exif()} for _ in range(10)], {"exif": b"Exif\0\0II*\0\xff\xff\xff\xff"}
    for orientation, options in enumerate(told):
        options["exif"].update({0x0112: orientation, 0x010E: "a word " * 3000})
    for options in (*told, *([] if name == "TIFF" else ({"xmp": b'<x tiff:Orientation="6"/>'}, damaged))):
        content = saved(picture, name, **options)
        opened = Image.open(io.BytesIO(content))
        upright = opened if options is damaged else ImageOps.exif_transpose(opened)
        size = read_image_size("image", content=io.BytesIO(content), where="here")
        found = read_image("image", size=size, image_input=COLOUR, where="here", content=io.BytesIO(content))
        expected = image_to_patches(upright, image_input=COLOUR)
        assert (size, found.grid, found.patches.tolist()) == (upright.size, expected.grid, expected.patches.tolist())


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_shows_its_first_picture(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "image")
    pictures = [Image.new("RGB", (8, 8), colour) for colour in ((0, 0, 0), (255, 255, 255))]
    pictures[0].save(path, format=name, save_all=True, append_images=pictures[1:])
    np.testing.assert_allclose(read_image(path, size=(8, 8), image_input=COLOUR, where="here").patches, 0, atol=2)


def png_that_claims(width: int, height: int) -> bytes:
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


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


NO_FORMAT = r"none of JPEG, PNG, WEBP, GIF, BMP, TIFF\); replace the file"


@pytest.mark.parametrize(
    ("content", "size", "message"),
    [
        # Lengths come from the manifest, so a file of another size would break them.
        (saved(Image.new("RGB", (7, 5))), (5, 7), "is 7x5 pixels but the manifest says 5x7; correct width and height"),
        # Of floating-point numbers, black and white are not known.
        (saved(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), (4, 4), "has pixels of mode F, expected grey, RGB"),
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


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (5, 2)])
def test_images_smaller_than_a_token_are_enlarged(size: tuple[int, int]) -> None:
    """An image of one pixel is still one token."""
    found = image_to_patches(Image.new("L", size, 255), image_input=TINY)
    assert found.grid == image_grid(width=size[0], height=size[1], image_input=TINY)
    assert min(found.grid) == 2 and len(found.patches) == found.grid[0] * found.grid[1]
    assert found.patches.dtype == np.uint8 and (found.patches == 255).all()


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


def write_video(path: Path, *, num_frames: int, height: int = 32) -> Path:
    """Write a video of ten frames a second; frame i has the grey 10 * i."""
    av = pytest.importorskip("av", reason="PyAV is not installed (pip install 'braid[video]')")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, height, "yuv420p"
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.full((height, 48, 3), 10 * index, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi"])
@pytest.mark.parametrize(("num_frames", "wanted", "shown"), [(20, 4, [2, 7, 12, 17]), (20, 1, [10]), (3, 3, [0, 1, 2])])
def test_frames_are_spread_over_the_time(num_frames: int, wanted: int, shown: list[int], kind: str, tmp_path: Path) -> None:
    path = write_video(tmp_path / f"clip.{kind}", num_frames=num_frames)
    length = read_video_length(str(path), where="here")
    assert (length.size, length.num_frames, length.seconds) == ((48, 32), num_frames, pytest.approx(num_frames / 10))
    for content in (None, path.read_bytes()):
        places = [FramePlace(str(path), (index,), wanted) for index in range(wanted)]
        opened = [content and io.BytesIO(content) for _ in places]
        frames = [read_frames(place, content=each, where="here")[0] for place, each in zip(places, opened, strict=True)]
        greys = [np.asarray(frame.convert("L")).mean() for frame in frames]
        assert greys == pytest.approx([10 * index for index in shown], abs=4)


@pytest.mark.parametrize("content", [b"", b"no video", b"#EXTM3U\n#EXTINF:1,\nother.mp4\n", None])
def test_what_is_no_video_is_said(content: bytes | None, tmp_path: Path) -> None:
    write_video(tmp_path / "other.mp4", num_frames=2)
    path = tmp_path / "clip.m3u8"
    if content is not None:
        path.write_bytes(content)
    for read in (
        lambda: read_video_length(str(path), where="here"),
        lambda: read_frames(FramePlace(str(path), (0,), 1), where="here"),
    ):
        with pytest.raises(DataError, match=r"here: .*clip.m3u8 cannot be decoded as a video .*; give another file"):
            read()


def test_addresses_of_frames_are_those_of_no_image() -> None:
    for path in ("clip.mp4", "\0[3, 1, 2]", "a\nb.mp4"):
        assert parse_frame_address(path) is None
        assert parse_frame_address(frame_address(FramePlace(path, (3, 5), 8))) == (path, (3, 5), 8)


@pytest.mark.parametrize(
    ("options", "shown"), [({}, 8), ({"num_frames": 3}, 3), ({"video_fps": 2.0}, 4), ({"num_frames": 3, "video_fps": 5.0}, 3)]
)
def test_a_sample_with_a_video_is_one_with_its_frames(options: dict[str, float], shown: int, data: DataFolder) -> None:
    path = write_video(data.path / "clip.mp4", num_frames=20)
    for index in range(shown):
        read_frames(FramePlace(str(path), (index,), shown), where="here")[0].save(data.path / f"{index}.png")
    turns = [{"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "grey"}]
    as_images = [{**turns[0], "content": "<image>" * shown + "what?"}, turns[1]]
    segments = [{"type": "text", "role": role, "text": text} for role, text in (("user", "what?"), ("assistant", "grey"))]
    expected = data.open(data.entries([{"messages": as_images, "images": [f"{index}.png" for index in range(shown)]}], "a.jsonl"))
    for found in (
        data.entries([{"messages": turns, "videos": ["clip.mp4"]}], "b.jsonl"),
        data.entries([{"id": 1, "segments": [{"type": "video", "path": "clip.mp4"}, *segments]}], "manifest.jsonl"),
        write_tar(data.path / "t.tar", {"x.mp4": path.read_bytes(), "x.json": json.dumps({"messages": turns})}),
    ):
        source = data.open(found, **options)
        assert len(source.lengths(0).items) == shown
        assert source.shows_single_frames and not expected.shows_single_frames
        assert_same(source, expected)


def test_a_video_of_another_size_than_indexed_is_named(data: DataFolder) -> None:
    write_video(data.path / "clip.mp4", num_frames=3)
    turns = [{"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "grey"}]
    source = data.open(data.entries([{"messages": turns, "videos": ["clip.mp4"]}]))
    write_video(data.path / "clip.mp4", num_frames=3, height=64)
    with pytest.raises(DataError, match=r"clip.mp4 has frames of 48x64 pixels, but 48x32 when the data was indexed"):
        source.item(0, 0)
