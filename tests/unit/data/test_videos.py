"""Steps of videos as Qwen's models see them: which frames, of which size, at which time, from headers alone."""

import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from multimodal.data.image_files import FramePlace, VideoLength, read_frames, read_sound, read_video_length
from multimodal.data.image_processing import video_grid
from multimodal.data.index.sample_indexer import choose_frames
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ImageInput, ModelGraph
from multimodal.values.units.items import VideoInput
from tests.unit.data.conftest import DataFolder

QWEN = ImageInput(patch_size=14, merge_size=2, num_frames=2, video=VideoInput(max_tokens=40_000))
RULES = {
    "qwen2-vl": replace(QWEN, video=VideoInput()),
    "qwen2-vl, all steps bounded": QWEN,
    "qwen3-vl": replace(QWEN, video=VideoInput(min_pixels=4096, max_pixels=25_165_824, has_timestamps=True)),
    "qwen3-vl, frames bounded": replace(
        QWEN, video=VideoInput(min_pixels=4096, max_pixels=25_165_824, has_timestamps=True, max_tokens=768)
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_frames_and_sizes_are_those_of_the_video_processor(name: str) -> None:
    """Of 500 headers, and frames of 400 of them by their rate."""
    from tests.unit.data import video_processors as theirs  # imports transformers

    image, draw = RULES[name], random.Random(0)
    assert image.video is not None
    processor = theirs.build_processor(image.video, patch_size=image.patch_size)
    for number in range(500):
        size, total, fps = (draw.randint(30, 3000), draw.randint(30, 3000)), draw.randint(4, 900), draw.choice([5.0, 24.0, 29.97])
        most, wanted = draw.randrange(4, 80, 2), draw.choice([0.5, 1.0, 2.0, 3.3]) if number % 5 else None
        length = VideoLength(size, total, 0.0, total / fps, fps, 0)
        found = choose_frames(length, image=image, most=most, fps=wanted)
        metadata = theirs.VideoMetadata(total_num_frames=total, fps=fps)
        processor.max_frames = most
        whole = total if image.video.has_timestamps else total // 2 * 2
        how = {"num_frames": min(most, whole)} if wanted is None else {"fps": wanted}
        expected = theirs.sampled(processor, metadata, **how)
        if total in expected:  # rounding makes theirs take a frame that is not there
            expected = expected[:-1]
        assert found == expected
        try:
            shape = video_grid(width=size[0], height=size[1], num_frames=len(found), image_input=image)
        except DataError:
            with pytest.raises(ValueError, match="aspect ratio"):
                theirs.resized(processor, num_frames=len(found), height=size[1], width=size[0])
            continue
        assert tuple(14 * side for side in shape) == theirs.resized(
            processor, num_frames=len(found), height=size[1], width=size[0]
        )


def test_a_flag_bounds_frames_further() -> None:
    grid = {
        name: video_grid(width=1280, height=720, num_frames=8, image_input=image, max_pixels=50_000)
        for name, image in RULES.items()
    }
    areas = {name: np.prod(found) * 14**2 for name, found in grid.items()}
    assert all(0.7 * 50_000 < area <= 50_000 for area in areas.values()), areas
    plain = replace(QWEN, video=None, num_frames=1)
    assert video_grid(width=1280, height=720, num_frames=8, image_input=plain, max_pixels=50_000) == grid["qwen2-vl"]


@pytest.mark.parametrize("total", [1, 2, 3, 5])
def test_short_videos_have_whole_steps(total: int) -> None:
    length = VideoLength((64, 48), total, 0.0, total / 10, 10.0, 0)
    for image in RULES.values():
        found = choose_frames(length, image=image, most=8, fps=None)
        assert found and max(found) < total and found == sorted(found)


def write_clip(path: Path, *, num_frames: int, fps: int, codec: str = "mpeg4", seconds_of_sound: float = 0.0) -> Path:
    """Frame i has the grey 2 * i but for a black quarter above on the left; sound is a tone of 200 Hz."""
    av = pytest.importorskip("av", reason="PyAV is not installed (pip install 'braid[video]')")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        sound = container.add_stream("pcm_s16le", rate=22050) if seconds_of_sound else None
        for index in range(num_frames):
            pixels = np.full((16, 32, 3), 2 * index % 256, np.uint8)
            pixels[:8, :16] = 0
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if sound is not None:
            times = np.arange(round(22050 * seconds_of_sound)) / 22050
            tone = (np.sin(2 * np.pi * 200 * times) * 2**14).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(tone[None], format="s16", layout="mono")
            frame.sample_rate = 22050
            container.mux([*sound.encode(frame), *sound.encode()])
    return path


def test_headers_say_what_decoding_finds(tmp_path: Path) -> None:
    """Of 300 clips in three containers, some with sound that lasts longer than the frames."""
    av, draw = pytest.importorskip("av"), random.Random(1)
    for number in range(300):
        kind, num_frames, fps = ("mp4", "mkv", "avi")[number % 3], draw.randint(1, 40), draw.choice([5, 10, 24, 25, 30])
        sound = num_frames / fps + draw.random() if kind == "mkv" and number % 2 else 0.0
        path = write_clip(tmp_path / f"clip.{kind}", num_frames=num_frames, fps=fps, seconds_of_sound=sound)
        found = read_video_length(str(path), where="here")
        with av.open(str(path)) as container:
            assert sum(1 for _ in container.decode(video=0)) == num_frames == found.num_frames, (kind, fps)
        assert (found.size, found.fps) == ((32, 16), fps)
        assert abs(found.num_samples / 16000 - sound) < 0.1


TURNS = {
    "messages": [{"role": "user", "content": "<video>what?"}, {"role": "assistant", "content": "grey"}],
    "videos": ["clip.mkv"],
}


def with_steps(graph: ModelGraph, **video: object) -> ModelGraph:
    vision, *others = graph.units
    assert vision.image is not None
    image = replace(vision.image, num_frames=2, video=VideoInput(64, 512, **video))  # type: ignore[arg-type]
    return replace(graph, units=(replace(vision, image=image), *others))


def test_a_video_is_heard_behind_its_steps(two_encoder_graph: ModelGraph, tmp_path: Path) -> None:
    vision, _, *others = two_encoder_graph.units
    graph = replace(two_encoder_graph, units=(vision, *others), edges=(("vision", "llm"), ("ear", "llm")))
    data = DataFolder(tmp_path, with_steps(graph, tokens_per_second=2))
    path = write_clip(tmp_path / "clip.mkv", num_frames=20, fps=10, seconds_of_sound=0.5)
    for options, units in (({}, ["vision"] * 3), ({"video_sound": True}, ["vision"] * 3 + ["ear"])):
        source = data.open(data.entries([TURNS]), num_frames=6, **options)
        assert [item.unit for item in source.lengths(0).items] == units
        assert [source.item_grid(0, item) for item in range(3)] == [(4, 8, 0), (4, 8, 1), (4, 8, 2)]  # 2/3 s apart
    assert source.item(0, 3).patches.shape[0] == source.lengths(0).items[3].num_tokens == 25
    tone = read_sound(str(path), num_samples=8000, where="here")
    assert np.abs(tone - np.sin(2 * np.pi * 200 * np.arange(8000) / 16000) / 2)[100:-100].max() < 0.02
    write_clip(tmp_path / "clip.mkv", num_frames=20, fps=10)
    assert len(data.open(data.entries([TURNS], "silent.jsonl"), num_frames=6, video_sound=True).lengths(0).items) == 3


def test_times_are_written_before_steps_that_stand_alone(data: DataFolder, tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mkv", num_frames=20, fps=10)
    source = data.open(data.entries([TURNS]), graph=with_steps(data.graph, has_timestamps=True), num_frames=4)
    begin, end, image = 262, 263, 264  # of bytes, with which there is no other token for videos
    text = source.text(0).token_ids.tolist()
    steps = [[*time.encode(), begin, *[image] * 2, end] for time in ("<0.3 seconds>", "<1.6 seconds>")]
    assert text[1 : 3 + sum(map(len, steps))] == [begin, *steps[0], *steps[1], end]
    assert [source.item_grid(0, item) for item in range(2)] == [(2, 4), (2, 4)]


def test_wrong_videos_are_named(data: DataFolder, tmp_path: Path) -> None:
    path, graph = write_clip(tmp_path / "clip.mkv", num_frames=200, fps=10), with_steps(data.graph)
    with pytest.raises(DataError, match=r"more than 10 tokens; raise --seq-length.*--num-frames, --video-max-pixels"):
        data.open(data.entries([TURNS]), graph=graph, seq_length=10, overlong="error")
    source = data.open(data.entries([TURNS]), graph=graph)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    source.item(0, 0)
    with pytest.raises(DataError, match=r"clip.mkv cannot be decoded as a video \(there is no frame at 15.1 seconds"):
        source.item(0, 3)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"clip.mkv cannot be decoded as a video"):
        data.open(data.entries([TURNS], "other.jsonl"), graph=graph)


@pytest.mark.parametrize(("turns", "is_mirrored"), [(turns, is_mirrored) for turns in range(4) for is_mirrored in (False, True)])
def test_frames_of_a_step_stand_upright_as_the_container_says(turns: int, is_mirrored: bool, tmp_path: Path) -> None:
    path = write_clip(tmp_path / "clip.mp4", num_frames=30, fps=10)
    (a, b), (c, d) = np.linalg.matrix_power([[0, 1], [-1, 0]], turns) * 2**16 * ([[-1], [1]] if is_mirrored else 1)
    whole, matrix = (struct.pack(">9i", *each, 0, 0, 2**30) for each in ((2**16, 0, 0, 0, 2**16, 0), (a, b, 0, c, d, 0)))
    path.write_bytes(matrix.join(path.read_bytes().rsplit(whole, 1)))
    frames = read_frames(FramePlace(str(path), (3, 21, 3), 30), where="here")
    assert [np.asarray(each).mean() for each in frames] == pytest.approx([4.5, 31.5, 4.5], abs=3)
    assert read_video_length(str(path), where="here").size == frames[1].size == ((16, 32) if turns % 2 else (32, 16))
    is_bright, shown = np.asarray(frames[1].convert("L")) > 20, np.array([[0, 1], [1, 1]])[:, :: 1 - 2 * is_mirrored]
    np.testing.assert_array_equal(is_bright, np.kron(np.rot90(shown, -turns), np.ones(np.array(is_bright.shape) // 2)))
