"""Latents of images, made ahead by tools/cache_latents.py, in place of the pixels that a generator's autoencoder would encode."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multimodal.data.forms.segments import EMBEDDED
from multimodal.data.image_processing import cut_patches
from multimodal.data.index.item_reader import ItemDecoder, WantedItem
from multimodal.data.index.sample_index import IndexedItem
from multimodal.data.sample_source import ItemPixels
from multimodal.values.errors import DataError
from multimodal.values.units.items import ImageInput

DIGEST = "autoencoder"
"""The entry of a file's metadata with the digest of the autoencoder that made its latents."""
_WRITE_AGAIN = "write it again with tools/cache_latents.py"


def latent_key(item: IndexedItem, image: ImageInput, *, data_path: str) -> str:
    """Return the name of an item's latents: its file, or its place in the data set, and its size in pixels once it is scaled."""
    height, width = (side * image.patch_size for side in item.grid)
    place = f"{Path(data_path).absolute()}:{item.path}" if item.path.startswith(EMBEDDED) else item.path
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
