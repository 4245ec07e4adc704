"""Decodes single items, in any process, from the description that the index of a data set has of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from multimodal.data.audio.audio_files import read_audio
from multimodal.data.audio.audio_processing import audio_to_patches
from multimodal.data.forms.segments import EMBEDDED
from multimodal.data.image_files import read_image
from multimodal.data.image_processing import image_to_patches
from multimodal.data.index.index_cache import FOLDER_NAME
from multimodal.data.index.sample_index import IndexedItem
from multimodal.data.sample_source import ItemPixels, SampleSource
from multimodal.data.video_frames import parse_frame_address, read_frame
from multimodal.values.errors import DataError
from multimodal.values.model_graph import AudioInput, ItemInput, ModelGraph


class WantedItem(NamedTuple):
    """An item to decode."""

    item: IndexedItem
    where: str
    """The origin of the item's sample, for messages."""


class ItemDecoder(Protocol):
    """Decodes items of one data set."""

    def expect(self, wanted: Sequence[WantedItem]) -> None:
        """Announce the items that will be read next; earlier announcements are void."""

    def read(self, wanted: WantedItem) -> ItemPixels:
        """Decode one item; raises DataError if its file is damaged or not of the indexed size."""


class ItemReader:
    """Decodes items in this process, on request."""

    def __init__(self, inputs: Mapping[str, ItemInput], *, embedded: Callable[[str], bytes]) -> None:
        """inputs: unit -> description of its items; embedded: returns the bytes of an item in a data set, by its path."""
        self._inputs, self._embedded = inputs, embedded

    def expect(self, wanted: Sequence[WantedItem]) -> None:
        """Do nothing: an item is decoded when it is read."""

    def read(self, wanted: WantedItem) -> ItemPixels:
        """Decode one item."""
        item, where = wanted
        found = self._inputs[item.unit]
        frame = parse_frame_address(item.path)
        path = frame.path if frame else item.path
        content = self._embedded(path) if path.startswith(EMBEDDED) else None
        kind = "sound" if isinstance(found, AudioInput) else "video" if frame else "image"
        name = path if content is None else f"its {kind}"
        if isinstance(found, AudioInput):
            return audio_to_patches(read_audio(name, content=content, num_samples=item.size[0], where=where), audio=found)
        if frame is not None:
            image = read_frame(frame._replace(path=name), content=content, where=where)
            if image.size != item.size:
                raise DataError(
                    f"{where}: {name} has frames of {image.size[0]}x{image.size[1]} pixels, but {item.size[0]}x{item.size[1]} "
                    f"when the data was indexed; restore the file, or remove {FOLDER_NAME} if it is right"
                )
            return image_to_patches(image, image_input=found, tile=item.tile)
        return read_image(name, content=content, size=item.size, image_input=found, where=where, tile=item.tile)

    def is_shaped(self, wanted: WantedItem, pixels: ItemPixels) -> bool:
        """Return True if an item has the grid, the patches and the values that follow from its description."""
        found, grid = self._inputs[wanted.item.unit], wanted.item.grid
        if isinstance(found, AudioInput):
            shape = found.num_tokens(grid), found.num_patch_values
        else:
            shape = math.prod(grid), found.num_pixel_values
        return pixels.grid == grid and pixels.patches.shape == shape


def item_inputs(graph: ModelGraph) -> dict[str, ItemInput]:
    """Return unit -> description of its items, for units that have items."""
    return {unit.name: unit.item_input for unit in graph.units if unit.item_input is not None}


@runtime_checkable
class ExpectsItems(Protocol):
    """A data set that benefits from knowing the items that will be read next."""

    def expect_items(self, items: Sequence[tuple[int, int]]) -> None:
        """items: (index of the sample, index of the item in it)."""


def expect_items(source: SampleSource, items: Sequence[tuple[int, int]]) -> None:
    """Announce the items that will be read next to a data set, if it can use this."""
    if isinstance(source, ExpectsItems):
        source.expect_items(items)
