"""Tensor parallel collectives in parts beside products, in whole models: loss and gradients of one process."""

from dataclasses import replace
from typing import Any

import pytest

from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import build_plan

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 16, "init_method_std": 0.3}
BIASES = {"add_bias_linear": True, "add_qkv_bias": True}
IMAGE = {"patch_size": 2, "in_channels": 1, "merge_size": 1}
SAMPLES = (
    SampleShape((("vision", 1, 2),), 5, 3),
    SampleShape((("vision", 2, 2), ("vision", 1, 1)), 6, 1),
    SampleShape((("vision", 3, 1),), 4, 2),
    SampleShape((), 3, 2),
    SampleShape((), 6, 2),
    SampleShape((("vision", 1, 1),), 2, 2),
)
SAMPLE_GROUPS = [[(0, -1), (1, -1)], [(2, -1), (3, -1)], [(4, -1), (5, -1)]]
ITEM_GROUPS = [[(0, 0), (1, 0)], [(1, 1)], [(2, 0), (5, 0)]]
SIZES: dict[str, dict[str, Any]] = {
    "tp 2 and 4": {"vision": (2, 1, 1), "llm": (4, 1, 1)},
    "tp 4, pp 2": {"vision": (2, 1, 4), "llm": (4, 2, 1), "colocated": True},
    "tp 2, cp 2": {"vision": (2, 1, 1, 2), "llm": (2, 1, 1, 2)},
    "tp 2, two replicas": {"vision": (2, 1, 1), "llm": (2, 1, 2)},
}
"""Name -> (tp, pp, dp, cp) of each unit."""
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "zb-h1": {"builder": "zb-h1"},
    "zb-h1 with recomputation": {"builder": "zb-h1", "recompute": "full", "sequence_parallel": False},
    "split backward": {"passes": (split_backward,), "recompute": "selective"},
    "weights shared": {"shards_weights": True},
}


def build_case(sizes: str, **changes: Any) -> GradientCase:
    """Microbatches of one and two atoms, of lengths that three parts do not divide."""
    units = {
        "vision": {"role": "encoder", "image": IMAGE, **SHAPE, **BIASES},
        "llm": {"role": "backbone", **SHAPE, "activation": "swiglu"},
    }
    graph = ModelGraph.from_dict({"units": units})
    plan = build_plan(graph, **SIZES[sizes])
    groups = {"vision": ITEM_GROUPS, "llm": SAMPLE_GROUPS}
    counts = {name: unit.data_parallel_size for name, unit in plan.units.items()}
    assignment = Assignment.from_dict(
        {name: [groups[name][index::count] for index in range(count)] for name, count in counts.items()}
    )
    case = GradientCase(graph, plan, assignment, RandomSource(graph, SAMPLES, 12), sequence_parallel=True, num_overlapped_parts=3)
    return replace(case, **changes)


@pytest.mark.parametrize(
    ("sizes", "change"),
    [
        ("tp 2 and 4", "plain"),
        ("tp 4, pp 2", "zb-h1 with recomputation"),
        ("tp 2, cp 2", "split backward"),
        ("tp 2, two replicas", "weights shared"),
    ],
)
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, sizes: str, change: str) -> None:
    assert_matches(build_case(sizes, **CHANGES[change]), ranks)
