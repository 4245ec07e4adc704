"""A small model with an encoder, an LLM and a generator, each of which may spread tokens over ranks, or whole items."""

from dataclasses import replace

from multimodal.attention.bitfield import MaskMode
from multimodal.attention.share_tokens import TokenDistribution
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, UnitPlan
from tests.distributed.dealt_case import described, unit_plan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.random_source import RandomSource, SampleShape

IMAGE = {"patch_size": 2, "in_channels": 1, "merge_size": 2}
SAMPLES = (
    SampleShape((("vision", 1, 2), ("vision", 2, 2), ("painter", 1, 3)), 9, 4),
    SampleShape((("vision", 2, 3),), 12, 5),
    SampleShape((("painter", 2, 3),), 5, 2),
    SampleShape((("vision", 1, 1),), 7, 3),
)
UNITS = {
    **described("vision", image=IMAGE),
    **described("llm"),
    **described("painter", image={**IMAGE, "merge_size": 1}, hidden_size=16),
}
GRAPH = ModelGraph.from_dict({"units": UNITS})
ASSIGNMENT = Assignment(
    {
        "vision": [[[(0, 0), (1, 0)], [(3, 0), (0, 1)]]],
        "llm": [[[(0, -1), (1, -1)], [(2, -1), (3, -1)]]],
        "painter": [[[(2, -1), (0, -1)]]],
    }
)


def build_case(**units: UnitPlan) -> GradientCase:
    """Two encoder microbatches, two packed microbatches of the LLM, one of the generator."""
    plan = Plan({"vision": unit_plan(0), "painter": unit_plan(0), **units})
    return GradientCase(
        GRAPH, plan, ASSIGNMENT, RandomSource(GRAPH, SAMPLES, 12), attention_mask=MaskMode.EMBEDDED, attention_backend="blocks"
    )


MIXED_SAMPLES = (
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
    assignment = Assignment(
        {
            "vision": [[SHORT, MIXED, ONE, TINY]],
            "llm": [[[(0, -1), (1, -1)], [(2, -1), (3, -1)]]],
            "painter": [[[(2, -1), (0, -1), (1, -1)]]],
        }
    )
    source = RandomSource(graph, MIXED_SAMPLES, 12)
    case = replace(build_case(**units), graph=graph, assignment=assignment, source=source, block_size=BLOCK_SIZE)
    return replace(case, distribution=TokenDistribution.BY_ITEM, attention_backend="auto")
