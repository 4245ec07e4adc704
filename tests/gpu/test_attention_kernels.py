"""The kernels compiled for the GPU at hand: attention against the dense reference in float64, the loss against torch's."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from multimodal.attention.attention_backend import AttentionMask, load_backend
from multimodal.attention.block_attention import attend_densely
from tests.distributed.test_vocabulary_loss import assert_equal_torch, losses_and_gradient
from tests.distributed.test_vocabulary_loss import draw as draw_loss
from tests.unit.attention.mask_cases import build_mask, item, largest_error, output_and_gradients, text

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SAMPLES = [[text(300), item(400, 0), text(37), item(150, 1, "audio"), text(100)], [text(1)], [item(256, 0), text(140)]]


def draw(mask: AttentionMask, *, channels: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = (mask.num_queries, 4), (mask.num_keys, 2), (mask.num_keys, 2), (mask.num_queries, 4)
    drawn = (torch.randn(*shape, channels, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return tuple(tensor.double() for tensor in drawn)


@pytest.mark.parametrize("channels", [64, 80, 128, 256])
@pytest.mark.parametrize("max_blocks_per_item", [None, 2, 16])
def test_kernels_on_the_gpu(channels: int, max_blocks_per_item: int | None) -> None:
    pytest.importorskip("triton")
    from multimodal.attention.triton_kernels.options import choose_options

    mask = build_mask(SAMPLES, mode="embedded", block_size=128)
    inputs = draw(mask, channels=channels)
    expected = output_and_gradients(attend_densely, inputs, mask)
    for dtype, tolerance in ((torch.bfloat16, 6e-2), (torch.float16, 1e-2), (torch.float32, 1e-4)):
        chosen = choose_options(channels, dtype=dtype, block_size=mask.block_size)
        options = dataclasses.replace(chosen, max_blocks_per_item=max_blocks_per_item)
        found = output_and_gradients(partial(load_backend("triton"), options=options), inputs, mask, dtype)
        assert largest_error(found, expected) < tolerance


@pytest.mark.parametrize("name", ["blocks", "flex"])
def test_other_backends_on_the_gpu(name: str) -> None:
    mask = build_mask(SAMPLES, mode="embedded", block_size=128)
    inputs = draw(mask, channels=64)
    expected = output_and_gradients(attend_densely, inputs, mask)
    assert largest_error(output_and_gradients(load_backend(name), inputs, mask, torch.bfloat16), expected) < 6e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_over_a_large_vocabulary(dtype: torch.dtype) -> None:
    """A row takes more than one tile."""
    pytest.importorskip("triton")
    drawn = draw_loss(40_000, device="cuda")
    alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    assert_equal_torch([losses_and_gradient(drawn, dtype, True, alone)], drawn, dtype)
