"""Steps of videos as Qwen's models see them: which frames, of which size, at which time, from headers alone."""

import random
from dataclasses import replace

import numpy as np
import pytest

from multimodal.data.image_files import VideoLength
from multimodal.data.image_processing import video_grid
from multimodal.data.index.sample_indexer import choose_frames
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ImageInput
from multimodal.values.units.items import VideoInput
from tests.unit.data import video_processors as theirs

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
