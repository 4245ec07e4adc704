"""Bytes that become values on the device are those that became values where they were decoded."""

import numpy as np
import pytest
import torch

from multimodal.model.inputs.pixels import normalised_patches
from multimodal.values.model_graph import ImageInput

CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}


@pytest.mark.parametrize("constants", [{}, CLIP])
@pytest.mark.parametrize("num_frames", [1, 2])
def test_bytes_are_normalised_channel_by_channel(constants: dict[str, tuple[float, ...]], num_frames: int) -> None:
    image = ImageInput(patch_size=2, num_frames=num_frames, **constants)
    patches = np.arange(3 * 3 * 4 * num_frames, dtype=np.uint8).reshape(3, -1)
    mean, std = (np.array(each, np.float32).reshape(-1, 1) for each in (image.mean, image.std))
    expected = ((patches.reshape(3, 3, -1).astype(np.float32) / np.float32(255) - mean) / std).reshape(3, -1)
    np.testing.assert_array_equal(normalised_patches(torch.from_numpy(patches), image).numpy(), expected)


def test_no_bytes_become_no_values() -> None:
    """A context parallel rank of an encoder may have none of a small image's patches."""
    assert normalised_patches(torch.empty((0, 12), dtype=torch.uint8), ImageInput(patch_size=2)).shape == (0, 12)


def test_values_stay_as_they_are() -> None:
    patches = torch.randn(2, 12)
    assert normalised_patches(patches, None) is patches
