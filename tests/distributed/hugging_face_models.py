"""Tiny models of transformers, of every family that is read, and what those with items are called with beside token ids."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
import yaml

from multimodal.data.image_processing import patch_positions
from tests.distributed.hugging_face_comparison import VOCABULARY, PaddedSource
from tests.distributed.random_source import SampleShape

AUDIO_TOKEN, AUDIO_START, AUDIO_END = 54, 55, 56
VIDEO_TOKEN, VISION_END, VISION_START, IMAGE_TOKEN = 57, 58, 59, 60
"""From NUM_TEXT_TOKENS on, below which texts are drawn."""
PATCH, GRID = 2, 4
"""Pixels of a patch's side, patches of an image's where all images have one size."""
LARGER = 12
"""Pixels of images for which a DINOv2 has a position each."""
MAX_TOKENS = 20
"""Of the longest clip."""


def build(name: str, **config: Any) -> Any:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config))


def tiny(name: str, **config: Any) -> Callable[..., Any]:
    return partial(build, name, **config)


WRITTEN = yaml.safe_load((Path(__file__).parent / "tiny_models.yaml").read_text())


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the bases that it names, and those of its parts, filled in."""
    found: dict[str, Any] = {}
    for base in config.get("base", ()):
        found |= filled(WRITTEN["bases"][base])
    return found | {key: filled(part) if isinstance(part, dict) else part for key, part in config.items() if key != "base"}


def written(kind: str) -> Mapping[str, Callable[..., Any]]:
    """Return the models of a kind; what they are called with changes their configuration."""
    configs = {name: filled(config) for name, config in WRITTEN[kind].items()}
    return {name: tiny(config.pop("class"), **config) for name, config in configs.items()}


PLAIN, SHAPE, MROPE_TEXT, QWEN2_5_EYE = (
    filled(WRITTEN["bases"][name]) for name in ("plain", "shape", "mrope text", "qwen2.5 eye")
)
KINDS = ("texts", "texts with experts", "images of one size", "towers")
TEXT_MODELS, MODELS_WITH_EXPERTS, LLAVAS, TOWERS = map(written, KINDS)
llama, mixtral = TEXT_MODELS["llama"], MODELS_WITH_EXPERTS["mixtral"]
pixtral, qwen2_vl, qwen2_5_vl, qwen3_vl = written("images of any size").values()
EAR = {"num_mel_bins": 4, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 20, "d_model": 16}
EAR["initializer_range"] = 0.3


def qwen2_audio(*, vocab_size: int = VOCABULARY, audio_token_index: int = AUDIO_TOKEN, max_tokens: int = MAX_TOKENS) -> Any:
    return build(
        "Qwen2AudioForConditionalGeneration",
        audio_config={**EAR, "max_source_positions": max_tokens},
        text_config={**PLAIN, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": vocab_size},
        audio_token_index=audio_token_index,
    )


def omni_thinker(*, vocab_size: int = VOCABULARY, **changes: Any) -> Any:
    ids = {"audio_token_index": AUDIO_TOKEN, "audio_start_token_id": AUDIO_START, "audio_end_token_id": AUDIO_END}
    ids |= {"image_token_index": IMAGE_TOKEN, "video_token_index": VIDEO_TOKEN}
    ids |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    return build(
        "Qwen2_5OmniThinkerForConditionalGeneration",
        vision_config={**QWEN2_5_EYE, "depth": 2},
        audio_config={**EAR, "n_window": 3, "output_dim": 24},
        text_config={**MROPE_TEXT, "vocab_size": vocab_size},
        **ids | changes,
    )


TEXTS = tuple(SampleShape((), length, targets) for length, targets in ((9, 4), (5, 5), (12, 3), (7, 2), (3, 1), (6, 6)))


def samples_of_one_size(merge_size: int) -> tuple[SampleShape, ...]:
    item = ("vision", GRID // merge_size, GRID // merge_size)
    return tuple(SampleShape((item,) * count, *rest) for count, *rest in ((2, 9, 4), (0, 5, 5), (1, 7, 3), (3, 8, 2)))


def pixels_of(patches: npt.NDArray[np.float32], merge_size: int) -> torch.Tensor:
    """[3, height, width] from patches in merge-window order, which list a channel after the other."""
    image = torch.empty(3, GRID, PATCH, GRID, PATCH, dtype=torch.float64)
    for (row, column), patch in zip(patch_positions((GRID, GRID), merge_size=merge_size), patches, strict=True):
        image[:, row, :, column] = torch.from_numpy(patch).double().reshape(3, PATCH, PATCH)
    return image.reshape(3, GRID * PATCH, GRID * PATCH)


def images_of_one_size(source: PaddedSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    image = source.graph.unit("vision").image
    assert image is not None
    items = mark(source, index, token_ids, IMAGE_TOKEN)
    images = [pixels_of(source.item(index, item).patches, image.merge_size) for item in items]
    return {"pixel_values": torch.stack(images) if images else None}


def images_in_rows(source: PaddedSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    """Padded to one size, as Pixtral's image processor does; tokens behind rows keep the ids that were drawn for them."""
    images, sizes = [], []
    for item, start, length in source.text(index).item_starts:
        rows, columns = source.item_grid(index, item)
        token_ids[start : start + length].view(rows, columns + 1)[:, :-1] = IMAGE_TOKEN
        patches = torch.from_numpy(source.item(index, item).patches).double().view(rows, columns, 3, PATCH, PATCH)
        image = patches.permute(2, 0, 3, 1, 4).reshape(3, rows * PATCH, columns * PATCH)
        sizes.append(tuple(image.shape[1:]))
        images.append(torch.nn.functional.pad(image, (0, 20 - image.shape[2], 0, 20 - image.shape[1]), value=7.0))
    return {"pixel_values": torch.stack(images), "image_sizes": torch.tensor(sizes)} if images else {}


def images_in_patches(source: PaddedSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    given = _patches_of(source, index, token_ids)
    return {"mm_token_type_ids": ((token_ids == IMAGE_TOKEN) + 2 * (token_ids == VIDEO_TOKEN))[None], **given}


def clips_and_images(source: PaddedSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    """Spectrograms, in which anything may follow two frames of silence: padded to the longest clip; images in patches."""
    given = {"attention_mask": torch.ones_like(token_ids)[None]}
    if clips := mark(source, index, token_ids, AUDIO_TOKEN, unit="audio"):
        frames = torch.stack([torch.from_numpy(source.frames(index, item)).double() for item in clips])
        lengths = torch.tensor([source.item_grid(index, item)[0] for item in clips])
        given["input_features"] = frames.transpose(1, 2)
        given["feature_attention_mask"] = (torch.arange(frames.shape[1]) < lengths[:, None]).long()
    return given | _patches_of(source, index, token_ids)


def mark(source: PaddedSource, index: int, token_ids: torch.Tensor, token: int, *, unit: str = "vision") -> list[int]:
    """Give the places of a sample's items for a unit their token; returns these items."""
    items = [(item, *place) for item, *place in source.text(index).item_starts if source.shapes[index].items[item][0] == unit]
    for _, start, length in items:
        token_ids[start : start + length] = token
    return [item for item, _, _ in items]


def _patches_of(source: PaddedSource, index: int, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Images, and videos: steps with times, of which a first one has the time 0."""
    given, kinds = {}, {"": [[item] for item in mark(source, index, token_ids, IMAGE_TOKEN)], "_videos": []}
    for (item,) in [each for each in kinds[""] if source.item_grid(index, each[0])[2:]]:
        kinds[""].remove([item])
        kinds["_videos"] += [[item]] if source.item_grid(index, item)[2:] == (0,) else []
        kinds["_videos"][-1] += [item] if item not in kinds["_videos"][-1] else []
        _, start, length = source.text(index).item_starts[item]
        token_ids[start : start + length] = VIDEO_TOKEN
    for kind, found in kinds.items():
        if not found:
            continue
        patches = [torch.from_numpy(source.item(index, item).patches).double() for items in found for item in items]
        grids = [(len(items), *source.item_grid(index, items[0])[:2]) for items in found]
        name = "video_grid_thw" if kind else "image_grid_thw"
        given |= {f"pixel_values{kind}": torch.cat(patches), name: torch.tensor(grids)}
    image = source.graph.unit("vision").image if kinds["_videos"] else None
    if image is not None and image.video is not None and image.video.tokens_per_second is not None:
        between = [source.item_grid(index, items[1])[2] / image.video.tokens_per_second for items in kinds["_videos"]]
        name = "video_second_per_grid" if image.video.ends_at_last_time else "second_per_grid_ts"
        given[name] = torch.tensor(between, dtype=torch.float32)
    return given
