"""The interface of every data set: lengths without decoding, texts, pixels and sound; and programs that make samples."""

import hashlib
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from multimodal.data.tokenizer import Tokenizer
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.units.items import Grid

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from multimodal.values.sample_lengths import SampleLengths

Overlong = Literal["truncate", "skip", "error"]
"""The ways to treat samples of more tokens than a sequence may have."""
BadSample = Literal["error", "skip"]
"""The ways to treat samples with items that cannot be read."""
NUM_FRAMES = 8
"""Frames that are taken of a video, unless another number is given."""
DEFAULT_MAX_PIXELS = 89_478_485
"""Default for the most pixels of an image file; beyond, Pillow warns of decompression bombs (256 MiB as RGB)."""
PILLOW_MAX_PIXELS = 2 * DEFAULT_MAX_PIXELS
"""Pillow opens no larger images."""


@dataclass(frozen=True, slots=True)
class SampleText:
    """One sample as the LLM sees it."""

    token_ids: "npt.NDArray[np.int64]"
    """[num_tokens]; with the placeholder id at the positions of items' outputs."""
    labels: "npt.NDArray[np.int64]"
    """[num_tokens], already shifted: `labels[i]` is the token after `i` (the last one has none and holds the pad id)."""
    is_target: "npt.NDArray[np.bool_]"
    """[num_tokens]; True where `labels[i]` counts in the loss."""
    item_starts: tuple[tuple[int, int, int], ...]
    """(item_index, start, num_output_tokens) of every item, `start` counted from the sample's first token; an image that a
    generator makes has no output tokens, and begins at the token whose hidden state that receives."""


@dataclass(frozen=True, slots=True)
class ItemPixels:
    """One image or step of a video, cut into patches, or one clip of sound: the input of an encoder, or a generator's target."""

    patches: "npt.NDArray[np.uint8] | npt.NDArray[np.float32]"
    """[num_patches, in_channels * num_frames * patch_size * patch_size]: bytes, or already normalised values, where the patches
    of one output token are adjacent (Qwen2-VL's order). For a clip: [num_tokens, FRAMES_PER_TOKEN * num_mel_bins]."""
    grid: Grid
    """Rows and columns of patches, or frames of a clip."""


class SampleSource(Protocol):
    """A data set addressed by index; everything but `item` is in memory."""

    def __len__(self) -> int:
        """Count the samples."""

    def lengths(self, index: int) -> "SampleLengths":
        """Return the lengths of one sample from metadata only; `sample_id` is the index, which callers replace."""

    def text(self, index: int) -> SampleText:
        """Tokens, labels and item positions of one sample."""

    def item(self, index: int, item_index: int) -> ItemPixels:
        """Decode one item of a sample; raises DataError if its file cannot be used."""

    def item_grid(self, index: int, item_index: int) -> Grid:
        """Return `ItemPixels.grid` of one item, from metadata only (stages past the first need positions, not pixels)."""


DIGITS_PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "digits" / "handwritten_digits.py"
"""Makes the samples of `--data-path digits`; part of a checkout, not of an installed package."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The arguments of a program's `open_samples`, which must return the same samples (train, valid) to every process."""

    graph: ModelGraph
    tokenizer: Tokenizer
    seq_length: int
    """Most LLM tokens of a sample."""
    seed: int
    num_train: int
    num_valid: int


def open_program(path: Path, request: SampleRequest) -> tuple[SampleSource, SampleSource]:
    """Run a program and return its training and validation samples; raises DataError if it is no such program."""
    if not path.is_file():
        raise DataError(f"--data-path {path}: there is no such program; correct the path (digits comes with a checkout of Braid)")
    spec = spec_from_file_location(f"braid sample program {path.stem}", path)  # no name that another module has
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    if not hasattr(module, "open_samples"):
        raise DataError(f"--data-path {path}: the program has no function `open_samples(request)`; see docs/data.md")
    train, valid = module.open_samples(request)
    return train, valid


def file_digest(path: Path) -> str:
    """Return a digest of a file, which names what follows from it in checkpoints and indices; raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
