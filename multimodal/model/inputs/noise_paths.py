"""Noise and time of the items from which a generator learns a flow: a function of seed, sample and item, whatever the plan."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from multimodal.values.assignment import Microbatch
from multimodal.values.units.unit import Flow


class NoisePath(NamedTuple):
    """The straight lines from the items of a microbatch to noise, and a point on each (rectified flow)."""

    times: Tensor
    """[num_items], float32 in (0, 1): how far each item is from data (0) to noise (1)."""
    is_told: Tensor
    """[num_items], float32: 1 for items whose conditions are seen, 0 for those that are made without (guidance)."""
    items: Tensor
    """[num_tokens]: the item of each token."""
    noise: Tensor | None = None
    """[num_patches, patch_channels], float32, standard normal; on the first and the last stage."""

    def of_tokens(self, tokens: Tensor, patches: Tensor) -> "NoisePath":
        """Return the part for some of the tokens and patches; [num_tokens] and [num_patches], indices or a mask."""
        return self._replace(items=self.items[tokens], noise=None if self.noise is None else self.noise[patches])


def draw_path(
    items: Microbatch, flow: Flow, *, num_tokens: Sequence[int], num_patches: Sequence[int], num_values: int | None, seed: int
) -> NoisePath:
    """Draw the noise of each item, and its time from a logit-normal distribution (Stable Diffusion 3, section 3.1).

    items: their sample ids are positions in the run, so an item that returns in a later epoch gets new noise; num_tokens,
    num_patches: of each item; num_values: of a patch; None: no noise is needed here.
    """
    times, told, noise = [], [], [torch.empty(0, num_values or 0)]
    for atom, count in zip(items, num_patches, strict=True):
        draws = np.random.default_rng((seed, atom.sample_id, atom.item_index))
        times.append(float(draws.standard_normal()))
        told.append(float(draws.random() >= flow.condition_dropout))
        if num_values is not None:
            noise.append(torch.from_numpy(draws.standard_normal((count, num_values), dtype=np.float32)))
    return NoisePath(
        times=torch.tensor(times, dtype=torch.float32).sigmoid(),
        is_told=torch.tensor(told, dtype=torch.float32),
        items=torch.arange(len(items)).repeat_interleave(torch.tensor(num_tokens, dtype=torch.long)),
        noise=None if num_values is None else torch.cat(noise),
    )
