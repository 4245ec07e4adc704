"""Noise and time of the items from which a generator learns: a function of seed, sample and item, whatever the plan."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from multimodal.values.assignment import Microbatch
from multimodal.values.units.unit import Flow

NUM_TIMES = 1000
"""Steps of DDPM, whose times are 0 to 999 of so many; modules see all times scaled by it."""


def mix_weights(flow: Flow, times: Tensor) -> Tensor:
    """Return [num_items, 4]: of data and of noise in what a generator sees at these times, and in what it learns.

    A rectified flow: (1 - t) data + t noise, and noise - data. DDPM with the schedule of Stable Diffusion, a(k) at k = 1000 t:
    sqrt(a) data + sqrt(1 - a) noise, and the noise (epsilon), or sqrt(a) noise - sqrt(1 - a) data (v).
    """
    if flow.prediction == "velocity":
        return torch.stack((1 - times, times, -torch.ones_like(times), torch.ones_like(times)), 1)
    roots = torch.linspace(flow.beta_start**0.5, flow.beta_end**0.5, NUM_TIMES, dtype=torch.float64, device=times.device)
    kept = (1 - roots.square()).cumprod(0)[(times * NUM_TIMES).round().long()]
    signal, noise = kept.sqrt().to(times.dtype), (1 - kept).sqrt().to(times.dtype)
    learnt = (torch.zeros_like(noise), torch.ones_like(noise)) if flow.prediction == "epsilon" else (-noise, signal)
    return torch.stack((signal, noise, *learnt), 1)


class NoisePath(NamedTuple):
    """The lines from the items of a microbatch to noise, and a point on each."""

    times: Tensor
    """[num_items], float32 in [0, 1): how far each item is from data (0) to noise (1)."""
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
    """Draw the noise of each item, and its time: a logit-normal one (Stable Diffusion 3, section 3.1), or one of DDPM's steps.

    items: their sample ids are positions in the run, so an item that returns in a later epoch gets new noise; num_tokens,
    num_patches: of each item; num_values: of a patch; None: no noise is needed here.
    """
    times, told, noise = [], [], [torch.empty(0, num_values or 0)]
    for atom, count in zip(items, num_patches, strict=True):
        draws = np.random.default_rng((seed, atom.sample_id, atom.item_index))
        drawn = draws.standard_normal()
        is_flow = flow.prediction == "velocity"
        times.append(1 / (1 + math.exp(-drawn)) if is_flow else int(draws.integers(NUM_TIMES)) / NUM_TIMES)
        told.append(float(draws.random() >= flow.condition_dropout))
        if num_values is not None:
            noise.append(torch.from_numpy(draws.standard_normal((count, num_values), dtype=np.float32)))
    return NoisePath(
        times=torch.tensor(times, dtype=torch.float32),
        is_told=torch.tensor(told, dtype=torch.float32),
        items=torch.arange(len(items)).repeat_interleave(torch.tensor(num_tokens, dtype=torch.long)),
        noise=None if num_values is None else torch.cat(noise),
    )
