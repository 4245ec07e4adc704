"""Latents: what the frozen autoencoder (VAE) of a latent diffusion model makes of images, and images of them again."""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimodal.model.inputs.pixels import normalised_patches
from multimodal.values.errors import ModelError
from multimodal.values.units.items import ImageInput, Latents


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
    """Return the latents of this rank's patches, [num_own_patches, num_patch_values].

    pixels: [num_patches, num_pixel_values], bytes or normalised; dtype: in which the autoencoder computes. Images are encoded one
    by one, since sizes differ.
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

        vae = AutoencoderKL.from_pretrained(
            described.directory, torch_dtype=dtype, low_cpu_mem_usage=False, local_files_only=True, trust_remote_code=False
        )
    except Exception as problem:  # a folder may cause any error
        raise ModelError(f"the autoencoder in {described.directory} cannot be read ({problem}); correct 'latents'") from problem
    return vae.to(device).eval().requires_grad_(False)
