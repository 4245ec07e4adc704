import pytest
import torch
import torch.distributed as dist

from multimodal.model.layers import cross_entropy
from multimodal.model.layers.cross_entropy import vocab_parallel_cross_entropy
from tests.unit.model.live_bytes import LiveBytes


@pytest.mark.parametrize("chunk_entries", [2**24, 14, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_losses_and_gradients_equal_torch(
    world_of_one: dist.ProcessGroup, dtype: torch.dtype, tolerance: float, chunk_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ENTRIES", chunk_entries)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 7, generator=generator, dtype=torch.float64) * 30).to(dtype).requires_grad_()
    targets = torch.randint(7, (5,), generator=generator)
    weights = torch.rand(5, generator=generator, dtype=torch.float64).to(dtype)
    losses = vocab_parallel_cross_entropy(logits, targets, group=world_of_one)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), logits)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    assert losses.dtype == dtype
    assert torch.allclose(losses, expected, rtol=tolerance, atol=tolerance)
    assert torch.allclose(gradient, expected_gradient, rtol=tolerance, atol=tolerance)


def test_bfloat16_logits_give_float32_losses_and_bfloat16_gradients(world_of_one: dist.ProcessGroup) -> None:
    logits = torch.tensor([[1.0, 2.0, 300.0]], dtype=torch.bfloat16, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1]), group=world_of_one)
    loss.sum().backward()
    assert loss.dtype == torch.float32 and float(loss) == 298.0
    assert logits.grad is not None and logits.grad.tolist() == [[0.0, -1.0, 1.0]]


def test_no_targets_give_no_losses_but_a_graph(world_of_one: dist.ProcessGroup) -> None:
    logits = torch.zeros(0, 3, requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits, torch.zeros(0, dtype=torch.int64), group=world_of_one)
    assert losses.shape == (0,) and losses.requires_grad


def test_what_pads_the_vocabulary_has_no_part(world_of_one: dist.ProcessGroup) -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 2, 1])
    losses = vocab_parallel_cross_entropy(logits, targets, group=world_of_one, num_tokens_known=4)
    expected = torch.nn.functional.cross_entropy(logits[:, :4], targets, reduction="none")
    assert torch.allclose(losses, expected, rtol=0, atol=1e-14)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logits)
    assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-14) and not gradient[:, 4:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_more_than_four_bytes_a_logit_beside_the_logits(
    world_of_one: dist.ProcessGroup, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient, which takes as much as the logits, and a few rows."""
    monkeypatch.setattr(cross_entropy, "CHUNK_ENTRIES", 4 * 2048)
    monkeypatch.setattr(cross_entropy, "MOST_CHUNKS", 64)
    logits, targets = torch.randn(256, 2048).to(dtype).requires_grad_(), torch.randint(2048, (256,))
    with LiveBytes() as forward:
        losses = vocab_parallel_cross_entropy(logits, targets, group=world_of_one)
    with LiveBytes() as backward:
        losses.sum().backward()
    chunks = 3 * 4 * 2048 * 4
    assert forward.peak < chunks + 100 * 256
    assert logits.nbytes <= backward.peak < logits.nbytes + chunks + 100 * 256
