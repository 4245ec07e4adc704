"""Interleaved documents, in which images stand between texts, all of which is learnt: OBELICS, MMC4."""

from collections.abc import Iterator
from typing import Any

from multimodal.data.conversation import TextSegment
from multimodal.data.forms.chat_rows import local_path, path_in
from multimodal.data.forms.segments import LOSS_WEIGHT, ImageSegment, Segment, SegmentedSample, check_keys, loss_weight, shown
from multimodal.values.errors import DataError

_OF_MMC4 = ("url", "similarity_matrix", "could_have_url_duplicate")


def parse_document_entry(entry: dict[str, Any], *, where: str) -> SegmentedSample | None:
    """Return the sample of a row of either data set, or None for one of neither.

    OBELICS: `texts` and `images` of one length, one of which is null at each place. MMC4: `text_list`, and `image_info` with the
    `image_name` of each image and the `matched_text_index` of the text that it stands before. Raises DataError for rows that are
    not so, and for addresses in place of paths: nothing is downloaded.
    """
    if isinstance(entry.get("text_list"), list):
        check_keys(entry, ("text_list", "image_info", LOSS_WEIGHT, *_OF_MMC4), where=where)
        places = _places_of_mmc4(entry, where=where)
    elif isinstance(texts := entry.get("texts"), list) and texts and all(isinstance(each, str | None) for each in texts):
        check_keys(entry, ("texts", "images", "general_metadata", LOSS_WEIGHT), where=where)
        places = _places_of_obelics(texts, entry.get("images"), where=where)
    else:
        return None
    segments: list[Segment] = []
    for text, image in places:
        if image is not None and not isinstance(path := path_in(image), str):
            raise DataError(f"{where}: image must be the path of a file, found {shown(image)}; correct it")
        segments.append(TextSegment("document", text) if image is None else ImageSegment(local_path(path, where=where)))
    if not any(isinstance(segment, TextSegment) for segment in segments):
        raise DataError(f"{where}: the document has no text, so there is nothing to learn; remove it")
    return SegmentedSample(where, tuple(segments), loss_weight(entry, where=where))


def _places_of_obelics(texts: list[str | None], images: Any, *, where: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(images, list) or len(images) != len(texts):
        raise DataError(f"{where}: 'texts' has {len(texts)} places, so 'images' must be a list of as many; correct it")
    for number, (text, image) in enumerate(zip(texts, images, strict=True)):
        if (text is None) == (image is None):
            raise DataError(f"{where}: place {number} must be either a text or an image, and the other null; correct it")
        yield text or "", image


def _places_of_mmc4(entry: dict[str, Any], *, where: str) -> Iterator[tuple[str, Any]]:
    texts, found = entry["text_list"], entry.get("image_info") or []
    before: list[list[Any]] = [[] for _ in texts]
    for number, image in enumerate(found if isinstance(found, list) else [found]):
        place = image.get("matched_text_index") if isinstance(image, dict) else None
        if not isinstance(place, int) or not 0 <= place < len(texts) or "image_name" not in image:
            raise DataError(
                f"{where}: image_info[{number}] must have an 'image_name' and a 'matched_text_index' below {len(texts)}, the "
                "number of texts; correct it"
            )
        before[place].append(image["image_name"])
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"{where}: text_list[{number}] must be a text, found {shown(text)}; correct it")
        yield from (("", image) for image in before[number])
        yield text, None
