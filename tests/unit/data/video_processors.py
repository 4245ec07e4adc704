"""The video processors of transformers, of which all but resizing runs without torchvision."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

import torch
import transformers.processing_utils  # with what it finds installed, before a module stands in for torchvision
import transformers.video_processing_utils
from transformers.image_utils import SizeDict
from transformers.video_utils import VideoMetadata

from multimodal.values.units.items import VideoInput


def stand_in() -> dict[str, ModuleType]:
    names = "torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional"
    found = {name: ModuleType(name) for name in names}
    for name, module in found.items():
        module.__spec__ = ModuleSpec(name, None)
        setattr(found.get(name.rpartition(".")[0], module), name.rpartition(".")[2], module)
    return found


with patch.dict(sys.modules, stand_in()):
    modules = [
        importlib.import_module(f"transformers.models.{name}.video_processing_{name}") for name in ("qwen2_vl", "qwen3_vl")
    ]
PROCESSORS = {False: modules[0].Qwen2VLVideoProcessor, True: modules[1].Qwen3VLVideoProcessor}
"""Whether it writes timestamps -> class."""


def build_processor(video: VideoInput, *, patch_size: int) -> Any:
    """Return a processor with what `__init__`, which asks for torchvision, would set of it."""
    processor = object.__new__(PROCESSORS[video.has_timestamps])
    processor.num_frames = processor.fps = None
    processor.merge_size = processor.temporal_patch_size = 2
    processor.patch_size, processor.max_video_tokens = patch_size, video.max_tokens
    processor.size = SizeDict(shortest_edge=video.min_pixels, longest_edge=video.max_pixels)
    return processor


def sampled(processor: Any, metadata: VideoMetadata, **how: Any) -> list[int]:
    return [int(index) for index in processor.sample_frames(metadata, **how)]


def resized(processor: Any, *, num_frames: int, height: int, width: int) -> tuple[int, int]:
    """(height, width) to which frames are brought."""
    given = torch.empty(1, num_frames, 1, height, width)
    options = {"factor": 2 * processor.patch_size, "temporal_factor": 2, "resample": None}
    options["cap_pixels_per_frame"] = processor.max_video_tokens is not None
    base = transformers.video_processing_utils.BaseVideoProcessor
    with patch.object(base, "resize", lambda self, image, size, resample: (size.height, size.width)):
        found: tuple[int, int] = processor.resize(given, processor.size, **options)
    return found
