"""What the image processor of a Hugging Face folder does to pixels, as far as images of one size go."""

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
    """Return the plain form of a model graph in which images of one size are treated as a processor does.

    Raises ModelError for a processor that does something else, such as padding.
    """
    if processor is None:
        return plain
    units = {name: _with_images(unit, processor) if _has_one_size(unit) else unit for name, unit in plain["units"].items()}
    return {**plain, "units": units}


def _has_one_size(unit: Mapping[str, Any]) -> bool:
    return (unit.get("image") or {}).get("image_size") is not None


def _with_images(unit: Mapping[str, Any], processor: Mapping[str, Any]) -> dict[str, Any]:
    require(processor, _COMPUTED, where="the image processor's ")
    crops = bool(processor.get("do_center_crop"))
    side, size = unit["image"]["image_size"], processor.get("size")
    found = size.get("shortest_edge", size.get("height")) if isinstance(size, Mapping) else size
    if found not in (side, None):
        raise ModelError(f"the image processor's size is {size}, but the encoder takes {side} pixels; correct one of them")
    image = {
        **unit["image"],
        "mean": processor["image_mean"],
        "std": processor["image_std"],
        "fit": "crop" if crops else "stretch",
    }
    return {**unit, "image": image}
