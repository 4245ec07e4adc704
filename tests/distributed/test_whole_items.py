"""Context parallel ranks that have whole items, and parts of long ones: loss and gradients of one process."""

from dataclasses import replace

import numpy as np
import pytest

from multimodal.attention.share_tokens import TokenDistribution
from multimodal.cost.token_shares import CUT, ItemDealer
from multimodal.data.sample_source import ItemPixels
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import UnitPlan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.schedule_rewrites import CutMicrobatches, SplitStages
from tests.distributed.spread_case import GRAPH, build_case, unit_plan

SAMPLES = (
    SampleShape((("vision", 1, 1), ("vision", 1, 2), ("painter", 1, 3), ("vision", 2, 2)), 6, 4),
    SampleShape((("vision", 4, 5), ("painter", 1, 1)), 4, 3),
    SampleShape((("vision", 1, 2), ("vision", 1, 3), ("painter", 3, 3)), 5, 2),
    SampleShape((("vision", 1, 1),), 7, 3),
)
SHORT, MIXED, ONE, TINY = ((0, 1), (2, 0)), ((0, 0), (1, 0), (2, 1)), ((0, 3),), ((3, 0),)
"""Images of 8 and 8 patches; of 4, 80 and 12; of 16; and of 4, which is one block."""
BLOCK_SIZE = 4


def whole_items_case(*, graph: ModelGraph = GRAPH, **units: UnitPlan) -> GradientCase:
    """A microbatch of each kind; the generator makes images of 12, 4 and 36 patches in one."""
    assignment = Assignment.from_dict(
        {
            "vision": [[SHORT, MIXED, ONE, TINY]],
            "llm": [[[(0, -1), (1, -1)], [(2, -1), (3, -1)]]],
            "painter": [[[(2, -1), (0, -1), (1, -1)]]],
        }
    )
    source = RandomSource(graph, SAMPLES, 12)
    case = replace(build_case(**units), graph=graph, assignment=assignment, source=source, block_size=BLOCK_SIZE)
    return replace(case, distribution=TokenDistribution.BY_ITEM, attention_backend="auto")


def test_the_microbatches_are_of_each_kind() -> None:
    source = RandomSource(GRAPH, SAMPLES, 12)
    dealer = ItemDealer(GRAPH, "vision", 2, BLOCK_SIZE)
    kinds = ([source.lengths(sample).items[item] for sample, item in kind] for kind in (SHORT, MIXED, ONE, TINY))
    owners = [dealer.deal(dealer.loads_of(items)).owners.tolist() for items in kinds]
    assert owners == [[0, 1], [1, CUT, 1], [CUT], [0]]


PLANS = {
    "cp 2": {"vision": unit_plan(0, cp=2), "llm": unit_plan(2)},
    "cp 3 before an LLM that shares its ranks": {"vision": unit_plan(0, cp=3), "llm": unit_plan(0, cp=3)},
    "cp 4, stages": {"vision": unit_plan(0, cp=2, pp=2), "llm": unit_plan(2, cp=2), "painter": unit_plan(0, cp=4)},
    "cp 2 beside tp 2": {"vision": unit_plan(0, cp=2, tp=2), "llm": unit_plan(4, tp=2), "painter": unit_plan(0, cp=2, tp=2)},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backend", ["auto", "blocks"])
def test_any_grid(ranks: RankPool, plan: str, backend: str) -> None:
    assert_matches(replace(whole_items_case(**PLANS[plan]), sequence_parallel="tp" in plan, attention_backend=backend), ranks)


class BytesSource(RandomSource):
    """Images as files have them: bytes, which are normalised where they are embedded."""

    def item(self, index: int, item_index: int) -> ItemPixels:
        found = super().item(index, item_index)
        return replace(found, patches=(found.patches * 40 + 128).clip(0, 255).astype(np.uint8))


def test_one_small_image_file_leaves_a_rank_without_patches(ranks: RankPool) -> None:
    case = whole_items_case(vision=unit_plan(0, cp=2), llm=unit_plan(0))
    assert_matches(replace(case, source=BytesSource(GRAPH, SAMPLES, 12)), ranks)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_and_cut_backwards(ranks: RankPool, recompute: str) -> None:
    case = whole_items_case(vision=unit_plan(0, cp=2), llm=unit_plan(0, cp=2))
    assert_matches(replace(case, recompute=recompute, passes=(SplitStages(1), CutMicrobatches(1))), ranks)


@pytest.mark.parametrize("trains_projector", [True, False])
def test_frozen_encoders(ranks: RankPool, trains_projector: bool) -> None:
    vision = replace(GRAPH.unit("vision"), freeze_module=True, freeze_projector=not trains_projector)
    graph = replace(GRAPH, units=(vision, *GRAPH.units[1:]))
    assert_matches(whole_items_case(graph=graph, vision=unit_plan(0, cp=2), llm=unit_plan(0)), ranks)
