"""What a stage's inputs are made of: pixels, parts of a sequence, and each rank's share."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multimodal.model.collectives import sequence_parts
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear
from multimodal.model.latents import normalised_patches
from multimodal.values.model_graph import ImageInput, ModelGraph
from tests.unit.model.rank_groups import build_stage, groups_of

CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}


@pytest.mark.parametrize("constants", [{}, CLIP])
@pytest.mark.parametrize("num_frames", [1, 2])
def test_bytes_are_normalised_channel_by_channel(constants: dict[str, tuple[float, ...]], num_frames: int) -> None:
    image = ImageInput(patch_size=2, num_frames=num_frames, **constants)
    patches = np.arange(3 * 3 * 4 * num_frames, dtype=np.uint8).reshape(3, -1)
    mean, std = (np.array(each, np.float32).reshape(-1, 1) for each in (image.mean, image.std))
    expected = ((patches.reshape(3, 3, -1).astype(np.float32) / np.float32(255) - mean) / std).reshape(3, -1)
    np.testing.assert_array_equal(normalised_patches(torch.from_numpy(patches), image).numpy(), expected)


@given(st.integers(0, 200), st.integers(1, 20))
def test_parts_are_consecutive_and_alike_the_larger_ones_last(num_rows: int, num_parts: int) -> None:
    parts = sequence_parts(num_rows, num_parts=num_parts)
    sizes = [part.stop - part.start for part in parts]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
    assert len(parts) == max(1, min(num_parts, num_rows))
    assert sizes[0] == min(sizes) and max(sizes) - min(sizes) <= 1


SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", "image": {"patch_size": 2, "in_channels": 1}, **SHAPE},
            "llm": {"role": "backbone", **SHAPE},
        }
    }
)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("unit", ["vision", "llm"])
def test_the_four_products_of_a_transformer_layer_overlap(unit: str, num_parts: int) -> None:
    stage = build_stage(GRAPH, unit, groups=groups_of(2), sequence_parallel=True, num_overlapped_parts=num_parts)
    found = {
        name: module.num_overlapped_parts
        for name, module in stage.named_modules()
        if isinstance(module, DeferrableColumnParallelLinear | DeferrableRowParallelLinear)
    }
    overlapped = {name for name, parts in found.items() if parts > 1}
    expected = {
        f"layers.1.{name}"
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    assert overlapped == (expected if num_parts > 1 else set())
    assert all(found[name] == num_parts for name in expected)
