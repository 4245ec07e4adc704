"""Keys of samples that may be left out of training, and the error for all others, so that no content is lost without a word."""

from collections.abc import Collection, Mapping
from typing import Any

from multimodal.data.forms.segments import shown
from multimodal.values.errors import DataError

_DESCRIBING = """
    id idx index uid uuid hash source sources data_source dataset dataset_name subset split origin url license author avatarUrl
    version created timestamp title file_name filename views category type task task_type subject topic domain modality body_part
    tags lang language difficulty quality score scores model model_name generator custom_instruction skip_prompt_formatting
    channel width height width_list height_list seconds duration sample_rate num_tokens num_turns token_count alt_captions
    metadata meta extra
"""
METADATA = frozenset(_DESCRIBING.split())
"""Keys that describe a sample, a message or a file, and are no part of what a model is taught; so are those that end in _id."""
_REMEDIES: Mapping[str, str] = {
    **dict.fromkeys(
        ("video", "videos", "video_url"), "videos are not supported: give their frames as images, or remove the sample"
    ),
    **dict.fromkeys(("image", "images", "audio", "audios"), "name one file, at one place"),
}


def check_keys(entry: Mapping[str, Any], known: Collection[str], *, where: str) -> None:
    """Raise DataError for a key with a value that would be lost: one that is neither known nor METADATA.

    Keys that begin with an underscore are one's own. Empty values, which tables have in rows without any, lose nothing.
    """
    for key, value in entry.items():
        is_own = key in known or key in METADATA or key.startswith("_") or key.endswith("_id")
        if is_own or value is None or value in ([], {}, ""):
            continue
        remedy = _REMEDIES.get(key, "remove it, or put it under 'metadata' if it only describes the sample")
        raise DataError(f"{where}: unknown key {shown(key)}, which training would lose without a word; {remedy}")
