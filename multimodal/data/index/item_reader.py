"""Decodes single items, in any process, from what an index says of them, or takes their latents from where they were kept."""

import math
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from multimodal.data.audio import audio_to_patches, read_audio, sound_to_pixels
from multimodal.data.forms.sample_files import SampleFiles
from multimodal.data.forms.segments import EMBEDDED
from multimodal.data.image_files import SOUND, parse_frame_address, read_frames, read_image, read_sound
from multimodal.data.image_processing import cut_patches, step_to_patches
from multimodal.data.index.index_cache import FOLDER_NAME
from multimodal.data.index.sample_index import IndexedItem
from multimodal.data.remote import AT_ONCE
from multimodal.data.remote import data_path as path_of_data
from multimodal.data.sample_source import ItemPixels, SampleSource
from multimodal.values.errors import DataError
from multimodal.values.model_graph import AudioInput, ItemInput, ModelGraph
from multimodal.values.units.items import ImageInput

VIDEO_BLOCK = 2**20
"""Bytes of a remote video that are read at once, for its header or the frames around one."""


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

    def __init__(self, graph: ModelGraph, files: SampleFiles) -> None:
        """graph: its units take or make the items; files: the data set."""
        self._inputs, self._files = item_inputs(graph), files
        self._expect(())

    def expect(self, wanted: Sequence[WantedItem]) -> None:
        """Begin to read the remote ones, several at a time, in their order; others are decoded when they are read."""
        self._expect(each for each in wanted if self._files.is_remote(each.item.path))
        self._read_ahead()

    def read(self, wanted: WantedItem) -> ItemPixels:
        """Decode one item."""
        if self._process != os.getpid():
            self._expect(())  # a forked process has no threads
        coming = self._coming.pop(wanted, None)
        self._read_ahead()
        return coming.result() if coming else self._decode(wanted)

    def _expect(self, wanted: Iterable[WantedItem]) -> None:
        self._process, self._expected = os.getpid(), deque(dict.fromkeys(wanted))
        self._coming: dict[WantedItem, Future[ItemPixels]] = {}

    def _read_ahead(self) -> None:
        while self._expected and len(self._coming) < AT_ONCE:
            wanted = self._expected.popleft()
            self._coming[wanted] = _threads(self._process).submit(self._decode, wanted)

    def _decode(self, wanted: WantedItem) -> ItemPixels:
        item, where = wanted
        found = self._inputs[item.unit]
        frame = parse_frame_address(item.path)
        path = frame.path if frame else item.path.removesuffix(SOUND)
        content = self._files.open_item(path, block=VIDEO_BLOCK if path != item.path else 0, where=where)
        bands = None if isinstance(found, AudioInput) else found.num_mel_bins
        kind = "sound" if isinstance(found, AudioInput) or bands else "video" if frame else "image"
        name = f"its {kind}" if path.startswith(EMBEDDED) else path
        if isinstance(found, AudioInput) or bands is not None:
            read = read_audio if path == item.path else read_sound
            samples = read(name, content=content, num_samples=item.size[0], where=where)
            if isinstance(found, AudioInput):
                return audio_to_patches(samples, audio=found)
            assert bands is not None
            pixels = sound_to_pixels(samples, num_frames=item.grid[1] * found.patch_size, num_mel_bins=bands)
            cut = cut_patches(pixels[:, :, None], patch_size=found.patch_size, merge_size=found.merge_size)
            return ItemPixels(cut, item.grid)
        if frame is not None:
            images = read_frames(frame._replace(path=name), content=content, where=where)
            if (size := next((image.size for image in images if image.size != item.size), None)) is not None:
                raise DataError(
                    f"{where}: {name} has frames of {size[0]}x{size[1]} pixels, but {item.size[0]}x{item.size[1]} "
                    f"when the data was indexed; restore the file, or remove {FOLDER_NAME} if it is right"
                )
            return step_to_patches(images, image_input=found, grid=item.grid, tile=item.tile)
        return read_image(name, content=content, size=item.size, image_input=found, where=where, tile=item.tile)

    def is_shaped(self, wanted: WantedItem, pixels: ItemPixels) -> bool:
        """Return True if an item has the grid, the patches and the values that follow from its description."""
        found, grid = self._inputs[wanted.item.unit], wanted.item.grid
        if isinstance(found, AudioInput):
            shape = found.num_tokens(grid), found.num_patch_values
        else:
            shape = math.prod(grid[:2]), found.num_pixel_values
        return pixels.grid == grid and pixels.patches.shape == shape


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE)


def item_inputs(graph: ModelGraph) -> dict[str, ItemInput]:
    """Return unit -> description of its items, for units that have items."""
    return {unit.name: unit.item_input for unit in graph.units if unit.item_input is not None}


def expect_items(source: SampleSource, items: Sequence[tuple[int, int]]) -> None:
    """Announce the items that will be read next, by (index of the sample, index in it), to a data set that can use this."""
    if (expect := getattr(source, "expect_items", None)) is not None:
        expect(items)


DIGEST = "autoencoder"
"""The entry of a file's metadata with the digest of the autoencoder that made its latents."""
_WRITE_AGAIN = "write it again with tools/cache_latents.py"


def latent_key(item: IndexedItem, image: ImageInput, *, data_path: str) -> str:
    """Return the name of an item's latents: its file, or its place in the data set, and its size in pixels once it is scaled."""
    height, width = (side * image.patch_size for side in item.grid)
    place = f"{path_of_data(data_path).absolute()}:{item.path}" if item.path.startswith(EMBEDDED) else item.path
    return f"{place} {width}x{height}"


class CachedLatents:
    """An `ItemDecoder` that has what generators make from a cache, and all other items from another decoder."""

    def __init__(
        self, folder: Path, images: Mapping[str, ImageInput], digests: Mapping[str, str], *, data_path: str, decoder: ItemDecoder
    ) -> None:
        """images: of each generator whose latents are cached; digests: of their autoencoders.

        Raises DataError for a folder without latents, or with those of another autoencoder.
        """
        self._images, self._decoder, self._data_path, self._folder = images, decoder, data_path, folder
        self._files: dict[tuple[str, str], Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with _opened(path) as file:
                digest = (file.metadata() or {}).get(DIGEST, "")
                self._files |= dict.fromkeys(((digest, key) for key in file.keys()), path)  # noqa: SIM118
        found = {digest for digest, _ in self._files}
        for unit, image in images.items():
            assert image.latents is not None
            if not found:
                raise DataError(f"--latent-cache {folder} has no latents (*.safetensors); {_WRITE_AGAIN}")
            if digests[unit] not in found:
                raise DataError(
                    f"--latent-cache {folder} was written by another autoencoder than unit '{unit}' has in "
                    f"{image.latents.directory}; give that one's folder in the model file, or {_WRITE_AGAIN}"
                )
        self._digests = digests

    def expect(self, wanted: Sequence[WantedItem]) -> None:
        """Announce the items that are decoded."""
        self._decoder.expect([each for each in wanted if each.item.unit not in self._images])

    def read(self, wanted: WantedItem) -> ItemPixels:
        """Return latents, or decode; raises DataError if a generator's item is not in the cache."""
        item, image = wanted.item, self._images.get(wanted.item.unit)
        if image is None:
            return self._decoder.read(wanted)
        assert image.latents is not None
        name = latent_key(item, image, data_path=self._data_path)
        path = self._files.get((self._digests[item.unit], name))
        if path is None:
            raise DataError(f"{wanted.where}: --latent-cache {self._folder} has nothing for {name}; {_WRITE_AGAIN}")
        with _opened(path) as file:
            latents = file.get_tensor(name)
        size = image.patch_size // image.latents.factor
        return ItemPixels(cut_patches(latents.transpose(1, 2, 0), patch_size=size, merge_size=image.merge_size), item.grid)


def _opened(path: Path) -> Any:
    """Open a file without reading its tensors; raises DataError."""
    try:
        from safetensors import safe_open

        return safe_open(path, framework="np")
    except Exception as problem:  # a file may cause any error
        raise DataError(f"{path} cannot be read ({problem}); remove it, and {_WRITE_AGAIN}") from problem
