"""Programs of a user's own that make samples (`--data-path FILE.py`); the example is examples/digits/handwritten_digits.py."""

import hashlib
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from multimodal.data.sample_source import SampleSource
from multimodal.data.tokenizer import Tokenizer
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph

DIGITS_PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "digits" / "handwritten_digits.py"
"""Makes the samples of `--data-path digits`; part of a checkout, not of an installed package."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The arguments of a program's `open_samples`, which returns the training and the validation samples (`SampleSource`).

    Every rank, and every process that loads ahead, must get the same samples from the same request.
    """

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


def program_digest(path: Path) -> str:
    """Return a digest of a program's text, which names its samples in checkpoints; raises OSError."""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
