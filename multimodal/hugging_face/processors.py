"""The image processor and the feature extractor of a Hugging Face folder: the processing of pixels and sound."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.hugging_face.architecture import require
from multimodal.hugging_face.families import FAMILIES
from multimodal.values.errors import ModelError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ModelGraph

PROCESSOR_NAME, VIDEO_NAME = "preprocessor_config.json", "video_preprocessor_config.json"
_NAMES = (PROCESSOR_NAME, "processor_config.json")
_ALLOWED = FAMILIES["processors"]
_MAX_TOKENS = {False: 128000, True: 768}
"""Most tokens of a video, or (with timestamps) of a frame, where a processor that bounds them does not say."""
SAMPLING_RATE = 16000
"""Samples per second of the sound that encoders receive."""
_MAX_TILES = 12
"""Most tiles of an image, where an image processor that cuts images does not give their number."""
_PATCHES = {"patch_size": "patch_size", "merge_size": "merge_size", "temporal_patch_size": "num_frames"}
"""Keys in which processor and encoder must agree if images keep their size: the processor's name -> ours."""


class Processors(NamedTuple):
    """The image processor, the feature extractor and the video processor of a folder; None for one that it does not have."""

    image: Mapping[str, Any] | None = None
    audio: Mapping[str, Any] | None = None
    video: Mapping[str, Any] | None = None
    """As in transformers the image processor, if there is no other."""


def read_processors(folder: str | Path) -> Processors:
    """Return the processors of a folder, from one file or several."""
    files = [read_mapping(path, error=ModelError) for name in _NAMES if (path := Path(folder) / name).is_file()]
    of_video = Path(folder) / VIDEO_NAME
    return processors_of(*files, video=read_mapping(of_video, error=ModelError) if of_video.is_file() else None)


def processors_of(*files: Mapping[str, Any], video: Mapping[str, Any] | None = None) -> Processors:
    """Return the processors that these files' contents describe; video: the content of a file of its own."""
    image, nested = _find(files, "image_processor", "image_mean"), (each.get("video_processor") for each in files)
    video = next((each for each in nested if isinstance(each, Mapping)), video or image)
    return Processors(image, _find(files, "feature_extractor", "feature_size"), video)


def _find(files: Sequence[Mapping[str, Any]], name: str, key: str) -> Mapping[str, Any] | None:
    """Return the first description with this key, at the top level or under a name."""
    inner = (found.get(name, found) for found in files)
    return next((each for each in inner if isinstance(each, Mapping) and key in each), None)


def with_processors(plain: dict[str, Any], processors: Processors) -> dict[str, Any]:
    """Return a plain graph with the processing of images and sound that processors describe; raises ModelError for others."""

    def treated(unit: dict[str, Any]) -> dict[str, Any]:
        if unit.get("image") and processors.image is not None:
            return _with_images(unit, processors.image, processors.video or {})
        return _with_sound(unit, processors.audio) if unit.get("audio") and processors.audio is not None else unit

    return {**plain, "units": {name: treated(unit) for name, unit in plain["units"].items()}}


def _with_images(unit: Mapping[str, Any], processor: Mapping[str, Any], of_video: Mapping[str, Any]) -> dict[str, Any]:
    image, size = unit["image"], processor.get("size")
    longest = image.get("longest_side")
    pads = {} if longest is None else {"do_pad": (True, False, None)}  # what is padded is not looked at
    require(processor, {**_ALLOWED["images"], **pads}, where="the image processor's ")
    sides = size if isinstance(size, Mapping) else {"height": size}
    values = {"mean": processor["image_mean"], "std": processor["image_std"]}
    if image.get("image_size") is not None:
        values |= _one_size(unit, processor, side=sides.get("shortest_edge", sides.get("height")))
        if processor.get("crop_to_patches"):
            require(processor, {"min_patches": (1, None)}, where="the image processor's ")
            values["max_tiles"] = processor.get("max_patches") or _MAX_TILES
    elif longest is not None:
        patch = image["patch_size"]
        require(processor, {"patch_size": (patch, {"height": patch, "width": patch})}, where="the image processor's ")
        require(sides, {"width": (sides.get("height"),)}, where="the image processor's size: ")
        values["longest_side"] = sides.get("longest_edge") or sides.get("height") or longest
    else:
        require(processor, {key: (image[ours],) for key, ours in _PATCHES.items()}, where="the image processor's ")
        values |= _bounds(processor, size)
        if image.get("video") is not None:
            alike = {key: (processor[key],) for key in ("image_mean", "image_std", *_PATCHES) if key in processor}
            require(of_video, {**_ALLOWED["images"], **alike}, where="the video processor's ")
            values["video"] = {**image["video"], **_bounds(of_video, of_video.get("size"))}
            if of_video.get("cap_pixels_per_frame"):
                most = _MAX_TOKENS[bool(image["video"].get("has_timestamps"))]
                values["video"]["max_tokens"] = of_video.get("max_video_tokens") or most
    return {**unit, "image": {**image, **values}}


def _bounds(processor: Mapping[str, Any], size: Any) -> dict[str, Any]:
    """Return the bounds of pixels that a processor gives, under the names of its two versions."""
    sides = size if isinstance(size, Mapping) else {}
    found = {
        "min_pixels": processor.get("min_pixels", sides.get("shortest_edge")),
        "max_pixels": processor.get("max_pixels", sides.get("longest_edge")),
    }
    return {key: bound for key, bound in found.items() if bound is not None}


def _one_size(unit: Mapping[str, Any], processor: Mapping[str, Any], *, side: Any) -> dict[str, Any]:
    """Return the fields for images of one size; side: of the shorter side, or both. Raises ModelError for other sizes."""
    image, is_cut = unit["image"], bool(processor.get("do_center_crop"))
    crop = processor.get("crop_size") if is_cut else None
    found = (crop.get("height") if isinstance(crop, Mapping) else crop) or side
    values: dict[str, Any] = {"fit": "crop" if is_cut else "stretch"}
    if is_cut and side not in (found, None):
        values["shorter_side"] = side
    if found in (image["image_size"], None):
        return values
    if unit.get("module") is None and not unit.get("has_layer_scale"):
        raise ModelError(
            f"the image processor's size is {crop or processor['size']}, but the encoder takes {image['image_size']} pixels; "
            "correct one of them"
        )
    grid = {} if unit.get("module") is not None else {"position_grid": image["image_size"] // image["patch_size"]}
    return {**values, "image_size": found, **grid}


def _with_sound(unit: dict[str, Any], features: Mapping[str, Any]) -> dict[str, Any]:
    """Return an encoder with the sound processing of a feature extractor; raises ModelError for what is unsupported."""
    audio = unit["audio"]
    if audio.get("waveform") is not None:
        require(features, _ALLOWED["samples"], where="the feature extractor's ")
        waveform = {**audio["waveform"], "is_normalised": bool(features.get("do_normalize", True))}
        return {**unit, "audio": {**audio, "waveform": waveform}}
    require(features, {**_ALLOWED["spectra"], "feature_size": (audio["num_mel_bins"],)}, where="the feature extractor's ")
    seconds = features.get("chunk_length")
    if audio.get("chunk_tokens") is None or seconds is None:
        return unit
    if not isinstance(seconds, int) or seconds < 1:
        raise ModelError(f"the feature extractor's chunk_length is {seconds!r}, expected seconds; correct it")
    return {**unit, "audio": {**audio, "max_tokens": 50 * seconds}}


def write_image_processor(graph: ModelGraph, kind: str | None = None) -> dict[str, Any]:
    """Return the preprocessor_config.json of a graph's images; empty for sound. kind: its class, if none of the usual ones."""
    image = next((unit.image for unit in graph.encoders if unit.image is not None), None)
    if image is None:
        return {}
    switches = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
    values = {"mean": image.mean, "std": image.std}
    written: dict[str, Any] = {**switches, "rescale_factor": 1 / 255, "resample": 3}
    written |= {f"image_{key}": list(value) * (image.in_channels // len(value)) for key, value in values.items()}
    if image.longest_side is not None:
        patch = dict.fromkeys(("height", "width"), image.patch_size)
        written |= {"patch_size": patch, "size": {"longest_edge": image.longest_side}}
        return {**written, "image_processor_type": kind or "PixtralImageProcessor"}
    if image.image_size is None:
        sizes = {theirs: getattr(image, ours) for theirs, ours in _PATCHES.items()}
        bounds = {"min_pixels": image.min_pixels, "max_pixels": image.max_pixels}
        size = {"shortest_edge": image.min_pixels, "longest_edge": image.max_pixels}
        return {**written, **sizes, **bounds, "size": size, "image_processor_type": kind or "Qwen2VLImageProcessor"}
    square = dict.fromkeys(("height", "width"), image.image_size)
    if image.fit == "crop":
        shorter = {"shortest_edge": image.shorter_side or image.image_size}
        sizes = {"size": shorter, "crop_size": square, "do_center_crop": True}
        return {**written, **sizes, "image_processor_type": kind or "CLIPImageProcessor"}
    tiles = {"crop_to_patches": True, "min_patches": 1, "max_patches": image.max_tiles} if image.max_tiles > 1 else {}
    return {**written, **tiles, "size": square, "image_processor_type": kind or "SiglipImageProcessor"}


def write_video_processor(graph: ModelGraph) -> dict[str, Any]:
    """Return a video_preprocessor_config.json with the processing of videos in a graph's encoder; empty without steps of them."""
    video = next((unit.image.video for unit in graph.encoders if unit.image is not None), None)
    if video is None:
        return {}
    of_images = {"min_pixels", "max_pixels", "image_processor_type"}
    written = {key: value for key, value in write_image_processor(graph).items() if key not in of_images}
    written["size"] = {"shortest_edge": video.min_pixels, "longest_edge": video.max_pixels}
    if video.max_tokens is not None:
        written |= {"cap_pixels_per_frame": True, "max_video_tokens": video.max_tokens}
    return {**written, "video_processor_type": "Qwen3VLVideoProcessor" if video.has_timestamps else "Qwen2VLVideoProcessor"}


def write_feature_extractor(graph: ModelGraph) -> dict[str, Any]:
    """Return a preprocessor_config.json for a graph with sound."""
    audio = next(unit.audio for unit in graph.encoders if unit.audio is not None)
    written = {key: values[0] for key, values in _ALLOWED["spectra"].items() if key != "do_normalize"}
    seconds = audio.max_tokens // 50
    written |= {"feature_size": audio.num_mel_bins, "chunk_length": seconds}
    written |= {"n_samples": 16000 * seconds, "nb_max_frames": 100 * seconds}
    return {**written, "feature_extractor_type": "WhisperFeatureExtractor", "padding_side": "right", "padding_value": 0.0}
