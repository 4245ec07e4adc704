"""Attention over 1 to 4 ranks equals attention of one process: outputs and all gradients, whoever holds which tokens."""

from dataclasses import dataclass

import megatron.core.tensor_parallel  # noqa: F401  # before ranks are forked: each would import it by itself
import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from multimodal.attention.attention_backend import load_backend
from multimodal.attention.attention_mask import AttentionMask
from multimodal.attention.block_attention import attend_densely
from multimodal.attention.context_parallel import ContextGroup, attend_across_ranks
from multimodal.attention.share_tokens import TokenDistribution, share_tokens
from tests.distributed.rank_pool import RankError, RankPool
from tests.unit.attention.mask_cases import MASKS, build_mask, draw_inputs, output_and_gradients

HEADS, GROUPS = 8, 4


@dataclass(frozen=True)
class Case:
    mask: str
    method: str = "lpt"
    groups_at_once: int | None = 1
    backend: str = "blocks"
    recompute: bool = False


def whole_mask(case: Case) -> AttentionMask:
    mode, samples = MASKS[case.mask]
    return build_mask(samples, mode=mode)


def attend_on_rank(case: Case) -> list[NDArray[np.generic]]:
    """This rank's token positions, and its rows of the output and of the gradients of query, key and value."""
    tokens = whole_mask(case).tokens
    assert dist.group.WORLD is not None
    shares = share_tokens(tokens, num_ranks=dist.get_world_size(), method=case.method, block_size=16)
    positions = torch.from_numpy(shares.positions_of(dist.get_rank()))
    mask = AttentionMask(tokens, block_size=16, query_blocks=shares.blocks_of(dist.get_rank()))
    context = ContextGroup(dist.group.WORLD, shares, torch.from_numpy(shares.gathered_rows), groups_at_once=case.groups_at_once)
    *leaves, gradient = (tensor[positions] for tensor in draw_inputs(whole_mask(case), heads=HEADS, groups=GROUPS))
    for leaf in leaves:
        leaf.requires_grad_()
    attend = load_backend(case.backend)
    output = attend_across_ranks(*leaves, context=context, mask=mask, attend=attend, recompute=case.recompute)
    found = output.detach(), *torch.autograd.grad(output, leaves, gradient)
    return [positions.numpy(), *(tensor.numpy() for tensor in found)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        *(Case("embedded", method) for method in TokenDistribution),
        Case("packed, empty modalities", groups_at_once=2),
        Case("prefix", groups_at_once=4, backend="dense"),
        Case("embedded", groups_at_once=2, recompute=True),
        Case("one token", groups_at_once=None),
    ],
    ids=lambda case: f"{case.mask}-{case.method}-{case.recompute}",
)
def test_equals_one_process(ranks: RankPool, case: Case, num_ranks: int) -> None:
    mask = whole_mask(case)
    expected = output_and_gradients(attend_densely, draw_inputs(mask, heads=HEADS, groups=GROUPS), mask)
    answers = ranks.run(attend_on_rank, case, world_size=num_ranks)
    assert sorted(position for positions, *_ in answers for position in positions.tolist()) == list(range(mask.num_keys))
    for positions, *found in answers:
        for tensor, whole in zip(found, expected, strict=True):
            assert torch.allclose(torch.from_numpy(tensor), whole[torch.from_numpy(positions)], rtol=0, atol=1e-13)


def test_heads_that_cannot_be_cut_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="4 key heads cannot be gathered 3 at a time; choose a divisor of them"):
        ranks.run(attend_on_rank, Case("causal", groups_at_once=3), world_size=1)
