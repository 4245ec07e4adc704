"""Global batches of lengths alone, for tools and benchmarks that train nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from multimodal.values.sample_lengths import SampleLengths


def draw_length_batches(
    samples: Sequence[SampleLengths], *, batch_size: int, num_batches: int, seed: int | None = None
) -> Iterator[tuple[SampleLengths, ...]]:
    """Yield consecutive global batches; when the samples run out they start over.

    seed: shuffle the samples anew in every pass; None keeps their order. Sample ids count from 0 over all batches.
    """
    stream = (replace(samples[index], sample_id=number) for number, index in enumerate(_indices(len(samples), seed)))
    for _ in range(num_batches):
        yield tuple(islice(stream, batch_size))


def _indices(count: int, seed: int | None) -> Iterator[int]:
    generator = np.random.default_rng(seed)
    while True:
        yield from range(count) if seed is None else generator.permutation(count).tolist()
