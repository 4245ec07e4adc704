"""The image processor and the feature extractor of a Hugging Face folder: how pixels and sound are treated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.hugging_face.architecture import require
from multimodal.hugging_face.whisper import with_features
from multimodal.values.errors import ModelError
from multimodal.values.file_form import read_mapping

_NAMES = ("preprocessor_config.json", "processor_config.json")
_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "do_pad": (False, None),
    "resample": (3, None),
    "do_resize": (True, None),
    "do_rescale": (True, None),
    "do_normalize": (True, None),
    "rescale_factor": (1 / 255, None),
}


_MAX_TILES = 12
"""What an image processor that cuts images means where it does not say."""
_PATCHES = {"patch_size": "patch_size", "merge_size": "merge_size", "temporal_patch_size": "num_frames"}
"""What processor and encoder must agree in, where images keep their size: its name there -> here."""


class Processors(NamedTuple):
    """What a folder says; None where it says nothing."""

    image: Mapping[str, Any] | None = None
    audio: Mapping[str, Any] | None = None


def read_processors(folder: str | Path) -> Processors:
    """Return what a folder says of its image processor and its feature extractor, in one file or in two."""
    files = [read_mapping(path, error=ModelError) for name in _NAMES if (path := Path(folder) / name).is_file()]
    return Processors(_find(files, "image_processor", "image_mean"), _find(files, "feature_extractor", "feature_size"))


def _find(files: list[dict[str, Any]], name: str, key: str) -> Mapping[str, Any] | None:
    """Return the first description with a key, which stands by itself or under a name."""
    inner = (found.get(name, found) for found in files)
    return next((each for each in inner if isinstance(each, dict) and key in each), None)


def with_processors(plain: dict[str, Any], processors: Processors) -> dict[str, Any]:
    """Return the plain form of a model graph in which images and sound are treated as processors do.

    Raises ModelError for processors that do something else, such as padding images.
    """

    def treated(unit: dict[str, Any]) -> dict[str, Any]:
        if unit.get("image") and processors.image is not None:
            return _with_images(unit, processors.image)
        return with_features(unit, processors.audio) if unit.get("audio") and processors.audio is not None else unit

    return {**plain, "units": {name: treated(unit) for name, unit in plain["units"].items()}}


def _with_images(unit: Mapping[str, Any], processor: Mapping[str, Any]) -> dict[str, Any]:
    require(processor, _COMPUTED, where="the image processor's ")
    image, size = unit["image"], processor.get("size")
    sides = size if isinstance(size, Mapping) else {"height": size}
    values = {"mean": processor["image_mean"], "std": processor["image_std"]}
    if image.get("image_size") is not None:
        found = sides.get("shortest_edge", sides.get("height"))
        if found not in (image["image_size"], None):
            raise ModelError(
                f"the image processor's size is {size}, but the encoder takes {image['image_size']} pixels; correct one of them"
            )
        values["fit"] = "crop" if processor.get("do_center_crop") else "stretch"
        if processor.get("crop_to_patches"):
            require(processor, {"min_patches": (1, None)}, where="the image processor's ")
            values["max_tiles"] = processor.get("max_patches") or _MAX_TILES
    else:
        require(processor, {key: (image[ours],) for key, ours in _PATCHES.items()}, where="the image processor's ")
        bounds = processor.get("min_pixels", sides.get("shortest_edge")), processor.get("max_pixels", sides.get("longest_edge"))
        values |= {key: bound for key, bound in zip(("min_pixels", "max_pixels"), bounds, strict=True) if bound is not None}
    return {**unit, "image": {**image, **values}}
