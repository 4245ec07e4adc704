"""Values of images before a layer sees them: normalised bytes, a frozen autoencoder's latents, and latents with noise.

Noise and time of an item from which a generator learns are a function of seed, sample and item, whatever the plan.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multimodal.values.assignment import Microbatch
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ImageInput
from multimodal.values.units.items import Latents
from multimodal.values.units.unit import Flow


def normalised_patches(patches: Tensor, image: ImageInput | None) -> Tensor:
    """Return (x / 255 - mean) / std of every channel, in float32, if patches are bytes; others are already normalised.

    patches: [num_tokens, in_channels * num_frames * patch_size^2]. Constants are arguments of kernels: nothing is copied.
    """
    if patches.dtype != torch.uint8:
        return patches
    assert image is not None, "only images have bytes"
    values = (patches.float() / 255).unflatten(1, (image.in_channels, -1))  # a context parallel rank may have no patches
    means, deviations = (each * (image.in_channels // len(each)) for each in (image.mean, image.std))
    return torch.cat([(values[:, i] - means[i]) / deviations[i] for i in range(image.in_channels)], dim=1)


class ItemsMade(NamedTuple):
    """All images of a microbatch, on every rank that has a part of them, where a module takes images as a whole."""

    grids: tuple[tuple[int, int], ...]
    """(rows, columns) of patches of each."""
    places: Tensor
    """[num_patches, 2]: row and column of every patch in its image."""
    rows: Tensor
    """[num_own_patches]: this rank's patches, among all."""
    are_pixels: bool = False
    """Patches of all images are here as pixels, of which the unit makes latents."""


@torch.no_grad()
def encode_images(pixels: Tensor, whole: ItemsMade, image: ImageInput, *, dtype: torch.dtype) -> Tensor:
    """Return the latents of this rank's patches, [num_own_patches, num_patch_values], image by image.

    pixels: [num_patches, num_pixel_values], bytes or normalised; dtype: in which the autoencoder computes.
    """
    lengths, patches = [math.prod(grid) for grid in whole.grids], normalised_patches(pixels, image).to(dtype)
    found = [torch.empty(0, image.num_patch_values, dtype=dtype, device=pixels.device)]
    for own, places, grid in zip(patches.split(lengths), whole.places.split(lengths), whole.grids, strict=True):
        latents = encode_image(join_patches(own, places, grid, channels=image.in_channels), image)
        found.append(cut_image(latents, places, grid))
    return torch.cat(found).index_select(0, whole.rows)


@torch.no_grad()
def encode_image(pixels: Tensor, image: ImageInput) -> Tensor:
    """Return the latents, [channels, rows, columns], of normalised pixels, [in_channels, height, width].

    They are (mode - shift_factor) scaling_factor: the mode of the image's distribution, so that equal images have equal latents.
    """
    assert image.latents is not None
    vae = open_autoencoder(image.latents, pixels.device, pixels.dtype)
    latents: Tensor = vae.encode(pixels[None]).latent_dist.mode()[0]
    return (latents - (vae.config.shift_factor or 0)) * vae.config.scaling_factor


@torch.no_grad()
def decode_latents(latents: Tensor, described: Latents) -> Tensor:
    """Return the normalised pixels, [in_channels, height, width], of an image's latents, [channels, rows, columns]."""
    vae = open_autoencoder(described, latents.device, latents.dtype)
    pixels: Tensor = vae.decode((latents / vae.config.scaling_factor + (vae.config.shift_factor or 0))[None]).sample[0]
    return pixels


def join_patches(patches: Tensor, places: Tensor, grid: tuple[int, int], *, channels: int) -> Tensor:
    """Return an image, [channels, height, width], of its patches, [num_patches, channels x size x size], at their places."""
    size = math.isqrt(patches.shape[1] // channels)
    canvas = patches.new_zeros(*grid, channels, size, size)
    canvas[places[:, 0], places[:, 1]] = patches.view(-1, channels, size, size)
    return canvas.permute(2, 0, 3, 1, 4).reshape(channels, grid[0] * size, grid[1] * size)


def cut_image(image: Tensor, places: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the patches at these places of an image, [channels, height, width], as `join_patches` takes them."""
    cut = image.unflatten(1, (grid[0], -1)).unflatten(3, (grid[1], -1)).permute(1, 3, 0, 2, 4)
    return cut[places[:, 0], places[:, 1]].flatten(1)


@cache
def open_autoencoder(described: Latents, device: torch.device, dtype: torch.dtype) -> Any:
    """Return diffusers' `AutoencoderKL`, once for all stages of a process; its weights are not the run's. Raises ModelError."""
    try:
        from diffusers import AutoencoderKL

        if not (Path(described.directory) / "config.json").is_file():
            raise FileNotFoundError("there is no config.json")  # diffusers would speak of a model hub
        vae = AutoencoderKL.from_pretrained(
            described.directory, torch_dtype=dtype, low_cpu_mem_usage=False, local_files_only=True, trust_remote_code=False
        )
    except Exception as problem:  # a folder may cause any error
        raise ModelError(f"the autoencoder in {described.directory} cannot be read ({problem}); correct 'latents'") from problem
    return vae.to(device).eval().requires_grad_(False)


NUM_TIMES = 1000
"""Steps of DDPM, whose times are 0 to 999 of so many; modules see all times scaled by it."""


def mix_weights(flow: Flow, times: Tensor) -> Tensor:
    """Return [num_items, 4]: of data and of noise in what a generator sees at these times, and in what it learns.

    A rectified flow: (1 - t) data + t noise, and noise - data. DDPM, a(k) at k = 1000 t:
    sqrt(a) data + sqrt(1 - a) noise, and the noise (epsilon), or sqrt(a) noise - sqrt(1 - a) data (v).
    """
    if flow.prediction == "velocity":
        return torch.stack((1 - times, times, -torch.ones_like(times), torch.ones_like(times)), 1)
    power = 2 if flow.beta_schedule == "scaled_linear" else 1
    ends = flow.beta_start ** (1 / power), flow.beta_end ** (1 / power)
    betas = torch.linspace(*ends, NUM_TIMES, dtype=torch.float64, device=times.device) ** power
    kept = (1 - betas).cumprod(0)[(times * NUM_TIMES).round().long()]
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
