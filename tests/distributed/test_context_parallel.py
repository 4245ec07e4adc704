"""Attention over 1 to 4 ranks equals attention of one process: outputs and all gradients, whoever holds which tokens."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import megatron.core.tensor_parallel  # noqa: F401  # before ranks are forked: each would import it by itself
import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from multimodal.attention.attention_backend import AttentionMask, load_backend
from multimodal.attention.block_attention import attend_densely
from multimodal.attention.context_parallel import ContextGroup, attend_across_ranks
from multimodal.attention.share_tokens import TokenDistribution, share_tokens
from multimodal.cost.token_shares import CUT, ItemDealer, RankShare
from multimodal.cost.unit_load import item_loads
from multimodal.data.sample_source import ItemPixels
from tests.distributed.gradient_case import GradientCase, build_session, plan_case
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import RandomSource
from tests.distributed.rank_pool import RankPool
from tests.distributed.schedule_rewrites import CutMicrobatches, SplitStages
from tests.distributed.spread_case import (
    BLOCK_SIZE,
    GRAPH,
    MIXED,
    MIXED_SAMPLES,
    ONE,
    SAMPLES,
    SHORT,
    TINY,
    build_case,
    unit_plan,
    whole_items_case,
)
from tests.unit.attention.mask_cases import MASKS, build_mask, draw_inputs, output_and_gradients

HEADS, GROUPS = 8, 4


@dataclass(frozen=True)
class Case:
    mask: str
    method: str = "lpt"
    groups_at_once: int = 1
    """0: all."""
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
    positions = torch.from_numpy(RankShare(shares, dist.get_rank()).positions)
    mask = AttentionMask(tokens, block_size=16, query_blocks=shares.blocks_of(dist.get_rank()))
    context = ContextGroup(dist.group.WORLD, shares, torch.from_numpy(shares.gathered_rows))
    *leaves, gradient = (tensor[positions] for tensor in draw_inputs(whole_mask(case), heads=HEADS, groups=GROUPS))
    for leaf in leaves:
        leaf.requires_grad_()
    attend = load_backend(case.backend)
    count = "multimodal.attention.context_parallel.count_groups_at_once"
    with patch(count, side_effect=lambda num_groups, **_: case.groups_at_once or num_groups):
        output = attend_across_ranks(*leaves, context=context, mask=mask, attend=attend, recompute=case.recompute)
        found = output.detach(), *torch.autograd.grad(output, leaves, gradient)
    return [positions.numpy(), *(tensor.numpy() for tensor in found)]


@pytest.mark.deep(when=lambda num_ranks: num_ranks == 2)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        *(Case("embedded", method) for method in TokenDistribution),
        Case("packed, empty modalities", groups_at_once=2),
        Case("prefix", groups_at_once=4, backend="dense"),
        Case("embedded", groups_at_once=2, recompute=True),
        Case("one token", groups_at_once=0),
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


SEED = 0
UNITS = {
    "LLM and encoder cross": {"vision": unit_plan(0, cp=2), "llm": unit_plan(0, tp=2)},
    "encoder in stages": {"vision": unit_plan(0, cp=2, pp=2), "llm": unit_plan(1, cp=3)},
    "generator and LLM": {"llm": unit_plan(0, cp=2, tp=2), "painter": unit_plan(2, cp=3)},
    "generator with tp": {"llm": unit_plan(0, cp=4), "painter": unit_plan(0, cp=2, tp=2)},
    "all": {"vision": unit_plan(0, cp=4), "llm": unit_plan(0, cp=4), "painter": unit_plan(0, cp=4)},
}
BY_ITEM = {
    "cp 3 before an LLM that shares its ranks": {"vision": unit_plan(0, cp=3), "llm": unit_plan(0, cp=3)},
    "cp 4, stages": {"vision": unit_plan(0, cp=2, pp=2), "llm": unit_plan(2, cp=2), "painter": unit_plan(0, cp=4)},
    "cp 2 beside tp 2": {"vision": unit_plan(0, cp=2, tp=2), "llm": unit_plan(4, tp=2), "painter": unit_plan(0, cp=2, tp=2)},
}


class BytesSource(RandomSource):
    """Images as files have them: bytes, which are normalised where they are embedded."""

    def item(self, index: int, item_index: int) -> ItemPixels:
        found = super().item(index, item_index)
        return replace(found, patches=(found.patches * 40 + 128).clip(0, 255).astype(np.uint8))


def with_frozen_encoder(case: GradientCase) -> GradientCase:
    vision = replace(case.graph.unit("vision"), freeze_module=True, freeze_projector=True)
    return replace(case, graph=replace(case.graph, units=(vision, *case.graph.units[1:])))


SHARED = whole_items_case(vision=unit_plan(0, cp=2), llm=unit_plan(0))
CASES = {
    **{
        f"tokens: {name}": replace(
            build_case(**units), sequence_parallel=any(unit.tensor_parallel_size > 1 for unit in units.values())
        )
        for name, units in UNITS.items()
    },
    **{
        f"tokens: {distribution}": replace(build_case(llm=unit_plan(0, cp=3)), distribution=distribution)
        for distribution in (TokenDistribution.BY_ITEM, TokenDistribution.ZIGZAG)  # the master test draws the others
    },
    "tokens: of samples that are decoded first": replace(build_case(**UNITS["generator and LLM"]), exchanges_samples=True),
    **{
        f"items: {name}": replace(
            whole_items_case(**units), sequence_parallel="tp" in name, attention_backend="blocks" if "stages" in name else "auto"
        )
        for name, units in BY_ITEM.items()
    },
    "items: of bytes, without patches on a rank": replace(SHARED, source=BytesSource(GRAPH, MIXED_SAMPLES, 12)),
    "items: recompute full, split": replace(
        whole_items_case(vision=unit_plan(0, cp=2), llm=unit_plan(0, cp=2)),
        recompute="full",
        passes=(SplitStages(1), CutMicrobatches(1)),
    ),
    "items: frozen encoder and projector": with_frozen_encoder(SHARED),
}


@pytest.mark.parametrize("name", CASES)
def test_every_distribution(ranks: RankPool, name: str) -> None:
    """Of tokens one by one, also with ranks that hold none, and of whole items and parts of long ones."""
    assert_matches(CASES[name], ranks)


def test_microbatches_of_items_are_of_each_kind() -> None:
    source = RandomSource(GRAPH, MIXED_SAMPLES, 12)
    dealer = ItemDealer(GRAPH, "vision", 2, BLOCK_SIZE)
    kinds = ([source.lengths(sample).items[item] for sample, item in kind] for kind in (SHORT, MIXED, ONE, TINY))
    owners = [dealer.deal(item_loads(GRAPH.unit("vision"), items)).owners.tolist() for items in kinds]
    assert owners == [[0, 1], [1, CUT, 1], [CUT], [0]]


def evaluate_on_rank(case: GradientCase) -> tuple[int, dict[int, bool]]:
    """What this rank says of a forward in which greedy decoding is compared with the targets."""
    step = plan_case(case, forward_only=True)
    result = build_session(case).executor.execute(step)
    return result.num_correct_tokens, dict(result.correct_samples)


def test_an_answer_is_right_if_all_ranks_that_share_it_say_so(ranks: RankPool) -> None:
    two_words = RandomSource(GRAPH, SAMPLES, vocab_size=2, seed=SEED)
    alone, spread = (replace(build_case(llm=llm), source=two_words) for llm in (unit_plan(0), unit_plan(0, cp=4, tp=2)))
    ((num_correct, right_answers),) = ranks.run(evaluate_on_rank, alone, world_size=1)
    assert set(right_answers.values()) == {True, False}, "choose another seed"
    found = ranks.run(evaluate_on_rank, spread, world_size=8)
    assert sum(count for count, _ in found) == num_correct
    said = [item for _, samples in found for item in samples.items()]
    assert len(said) == len(dict(said)) and dict(said) == right_answers
