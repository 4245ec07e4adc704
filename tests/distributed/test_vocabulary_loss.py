"""The loss over a vocabulary that tensor parallel ranks share, by torch and by Triton's kernels in its interpreter."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from multimodal.model.layers import backbone_ends

COLUMNS = 16
"""Of a tile."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}


def draw(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits that bfloat16 can have, targets (one is ignored, and one in each half is the last token), and their weights."""
    generator = torch.Generator().manual_seed(width)
    logits = (torch.randn(6, 2 * width, generator=generator) * 30).bfloat16().double()
    targets = torch.tensor([0, width - 1, width, 2 * width - 4, -100, 1])
    return logits, targets, torch.rand(6, generator=generator).masked_fill_(targets < 0, 0.0).double()


def losses_and_gradient(drawn: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, by_kernels: bool, group: Any) -> list[Tensor]:
    """Of this rank's share of the columns, of which the last three of all pad the vocabulary."""
    logits, targets, weights = drawn
    mine = logits.chunk(group.size(), dim=1)[group.rank()].to(dtype).requires_grad_()
    with patch.object(backbone_ends, "takes_kernels", lambda _: by_kernels):
        known = logits.shape[1] - 3
        losses = backbone_ends.vocab_parallel_cross_entropy(mine, targets, group=group, num_tokens_known=known)
        losses = losses * weights
        losses.sum().backward(retain_graph=True)
        if by_kernels:
            assert mine.grad is not None and mine.grad.data_ptr() == mine.data_ptr(), "it takes no memory"
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                losses.sum().backward()
    return [losses.detach(), mine.grad]  # type: ignore[list-item]


def on_rank(drawn: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, by_kernels: bool) -> list[Tensor]:
    from multimodal.model.layers import cross_entropy_kernels

    chunked = patch.object(backbone_ends, "CHUNK_ENTRIES", 3 * COLUMNS)  # in chunks of one row to six
    with patch.object(cross_entropy_kernels, "MOST_COLUMNS", COLUMNS), chunked:
        return losses_and_gradient(drawn, dtype, by_kernels, dist.group.WORLD)


def assert_equal_torch(found: list[list[Tensor]], drawn: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> None:
    """What ranks have found is what torch finds in float64."""
    logits, targets, weights = drawn
    known = logits[:, :-3].clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(known, targets, reduction="none") * weights
    expected.sum().backward()
    gradient = torch.cat([each for _, each in found], dim=1)
    assert gradient.dtype == dtype and not gradient[:, -3:].any()
    assert torch.allclose(gradient[:, :-3].double(), known.grad, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])  # type: ignore[arg-type]
    for losses, _ in found:
        tolerance = TOLERANCE[torch.promote_types(dtype, torch.float32)]
        assert torch.allclose(losses.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.deep(when=lambda width, dtype: width != COLUMNS + 5 and dtype != torch.float32)
@pytest.mark.parametrize("width", [7, COLUMNS, COLUMNS + 5])
@pytest.mark.parametrize("dtype, by_kernels", [(torch.float64, False), (torch.float32, True), (torch.bfloat16, True)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_and_gradients_equal_torch(ranks, world_size, dtype, by_kernels, width):
    pytest.importorskip("triton", reason="Triton is not installed (pip install 'braid[triton]')")
    if torch.cuda.is_available() and by_kernels:
        pytest.skip("with a GPU the kernels are compiled: tests/gpu has them")
    drawn = draw(width)
    assert_equal_torch(ranks.run(on_rank, drawn, dtype, by_kernels, world_size=world_size), drawn, dtype)
