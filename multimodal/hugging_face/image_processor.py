"""The image processor of a Hugging Face folder: size, mean and standard deviation of pixels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multimodal.hugging_face.architecture import require
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


_PATCHES = {"patch_size": "patch_size", "merge_size": "merge_size", "temporal_patch_size": "num_frames"}
"""What processor and encoder must agree in, where images keep their size: its name there -> here."""


def read_processor(folder: str | Path) -> Mapping[str, Any] | None:
    """Return what a folder says of its image processor; None where it says nothing."""
    for name in _NAMES:
        if (path := Path(folder) / name).is_file():
            found = read_mapping(path, error=ModelError)
            inner = found.get("image_processor", found)
            if isinstance(inner, dict) and "image_mean" in inner:
                return inner
    return None


def with_processor(plain: dict[str, Any], processor: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the plain form of a model graph in which images are treated as a processor does.

    Raises ModelError for a processor that does something else, such as padding.
    """
    if processor is None:
        return plain
    units = {name: _with_images(unit, processor) if unit.get("image") else unit for name, unit in plain["units"].items()}
    return {**plain, "units": units}


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
    else:
        require(processor, {key: (image[ours],) for key, ours in _PATCHES.items()}, where="the image processor's ")
        bounds = processor.get("min_pixels", sides.get("shortest_edge")), processor.get("max_pixels", sides.get("longest_edge"))
        values |= {key: bound for key, bound in zip(("min_pixels", "max_pixels"), bounds, strict=True) if bound is not None}
    return {**unit, "image": {**image, **values}}
