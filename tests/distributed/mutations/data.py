"""Mutations of the data: an entry of the manifest, and an image."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from tests.distributed.mutations.files import rewrite
from tests.distributed.mutations.mutation import Inputs, Mutation, short
from tests.distributed.mutations.nested_documents import LEAVES, places, replaced
from tests.distributed.small_run import manifest_entries


def manifest_mutations() -> Iterator[Mutation]:
    """Change the third sample of the manifest."""
    entry = manifest_entries()[2]
    for path, value in places(entry):
        shown = ".".join(map(str, path))
        for leaf in LEAVES:
            if leaf != value:
                apply = partial(_write_entry, entry=replaced(entry, path, leaf))
                yield Mutation(f"manifest: {shown} = {short(leaf)}", apply, ("line 3",))
        yield Mutation(f"manifest: without {shown}", partial(_write_entry, entry=replaced(entry, path)), ("line 3",))
    for name, target in {
        "absolute": "/etc/hostname",
        "above": "../../../../etc/hostname",
        "its folder": ".",
        "a device": "/dev/zero",
    }.items():
        changed = replaced(entry, ("segments", 0, "path"), target)
        yield Mutation(f"manifest: path {name}", partial(_write_entry, entry=changed), ("line 3",), must_be_refused=True)


def _write_entry(inputs: Inputs, *, entry: Any) -> None:
    entries = manifest_entries()
    entries[2] = entry
    inputs.manifest.write_text("".join(json.dumps(each) + "\n" for each in entries))


def image_mutations() -> Iterator[Mutation]:
    """Change the image of the third sample."""
    find = _image_path
    changes: dict[str, Callable[[bytes], bytes]] = {
        "empty": lambda image: b"",
        "truncated": lambda image: image[: len(image) // 2],
        "text": lambda image: b"no image at all",
        "a script": lambda image: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 48\nshowpage\n",
        "flipped": lambda image: image[:60] + bytes([image[60] ^ 0xFF]) + image[61:],
    }
    for name, change in changes.items():
        yield Mutation(f"image: {name}", partial(rewrite, find=find, change=change), ("2.png",), must_be_refused=True)
    for mode in ("L", "P", "1", "RGBA", "I;16", "LA"):
        yield Mutation(f"image: mode {mode}", partial(_draw_image, mode=mode, size=(64, 48)), ("2.png",))
    for size in ((1, 1), (1, 5000), (12000, 12000), (64, 49)):
        yield Mutation(f"image: size {size}", partial(_draw_image, mode="L", size=size), ("2.png",), must_be_refused=True)


def _image_path(inputs: Inputs) -> Path:
    return inputs.folder / "data" / "2.png"


def _draw_image(inputs: Inputs, *, mode: str, size: tuple[int, int]) -> None:
    Image.new(mode, size).save(_image_path(inputs))
