"""Noise and time of the items from which a generator learns a flow: a function of seed, sample and item, whatever the plan."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from multimodal.model.stage_input import PackedInput
from multimodal.values.assignment import Microbatch


class Path(NamedTuple):
    """The straight lines from the items of a microbatch to noise, and a point on each."""

    noise: Tensor
    """[num_patches, patch_channels], float32, standard normal."""
    times: Tensor
    """[num_items], float32 in (0, 1)."""


def draw_path(items: Microbatch, num_patches: Sequence[int], *, num_values: int, seed: int) -> Path:
    """Draw the noise of each item, and its time from a logit-normal distribution (Stable Diffusion 3, section 3.1).

    items: their sample ids are positions in the run, so an item that returns in a later epoch gets new noise; num_values: of a
    patch.
    """
    noise, times = [torch.empty(0, num_values)], []
    for atom, count in zip(items, num_patches, strict=True):
        draws = np.random.default_rng((seed, atom.sample_id, atom.item_index))
        times.append(float(draws.standard_normal()))
        noise.append(torch.from_numpy(draws.standard_normal((count, num_values), dtype=np.float32)))
    return Path(torch.cat(noise), torch.tensor(times, dtype=torch.float32).sigmoid())


def put_on_path(packed: PackedInput, path: Path) -> PackedInput:
    """Return a generator's input with its noise, and the time of its item for every token."""
    times = path.times.repeat_interleave(torch.tensor(packed.lengths, dtype=torch.long))
    return replace(packed, noise=path.noise, times=times)
