"""A small model with an encoder, an LLM and a generator, each of which may spread tokens over ranks."""

from multimodal.attention.bitfield import MaskMode
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.random_source import RandomSource, SampleShape

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16, "init_method_std": 0.3}
IMAGE = {"patch_size": 2, "in_channels": 1, "merge_size": 2}
SAMPLES = (
    SampleShape((("vision", 1, 2), ("vision", 2, 2), ("painter", 1, 3)), 9, 4),
    SampleShape((("vision", 2, 3),), 12, 5),
    SampleShape((("painter", 2, 3),), 5, 2),
    SampleShape((("vision", 1, 1),), 7, 3),
)
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", "image": IMAGE, **SHAPE},
            "llm": {"role": "backbone", **SHAPE},
            "painter": {"role": "generator", "image": {**IMAGE, "merge_size": 1}, **SHAPE},
        }
    }
)
ASSIGNMENT = Assignment.from_dict(
    {
        "vision": [[[(0, 0), (1, 0)], [(3, 0), (0, 1)]]],
        "llm": [[[(0, -1), (1, -1)], [(2, -1), (3, -1)]]],
        "painter": [[[(2, -1), (0, -1)]]],
    }
)


def unit_plan(first: int, *, cp: int = 1, tp: int = 1, pp: int = 1) -> UnitPlan:
    """One replica on consecutive ranks."""
    cuts = {1: ((0, 4),), 2: ((0, 2), (2, 4))}[pp]
    size = cp * tp
    stages = (Stage(tuple(range(first + i * size, first + (i + 1) * size)), (cut,)) for i, cut in enumerate(cuts))
    return UnitPlan((Replica(tuple(stages)),), tp, cp)


def build_case(**units: UnitPlan) -> GradientCase:
    """Two encoder microbatches, two packed microbatches of the LLM, one of the generator."""
    plan = Plan({"vision": unit_plan(0), "painter": unit_plan(0), **units})
    return GradientCase(
        GRAPH, plan, ASSIGNMENT, RandomSource(GRAPH, SAMPLES, 12), attention_mask=MaskMode.EMBEDDED, attention_backend="blocks"
    )
