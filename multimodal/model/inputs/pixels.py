"""Turns bytes of images into the normalised values that a model computes with."""

import torch
from torch import Tensor

from multimodal.values.model_graph import ImageInput


def normalised_patches(patches: Tensor, image: ImageInput | None) -> Tensor:
    """Return (x / 255 - mean) / std of every channel if patches are bytes; others are already normalised.

    patches: [num_tokens, in_channels * num_frames * patch_size^2]. Computed in float32; the constants are part of the kernels'
    arguments, so nothing is copied.
    """
    if patches.dtype != torch.uint8:
        return patches
    assert image is not None, "only images have bytes"
    values = (patches.float() / 255).unflatten(1, (image.in_channels, -1))  # a context parallel rank may have no patches
    means, deviations = (each * (image.in_channels // len(each)) for each in (image.mean, image.std))
    return torch.cat([(values[:, i] - means[i]) / deviations[i] for i in range(image.in_channels)], dim=1)
