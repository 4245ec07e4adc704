"""A test of the master test: it passes what is right and fails each planted error, by a wrong number and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from multimodal.attention.bitfield import MaskMode
from multimodal.schedule.builders import BUILDERS
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.dealt_case import IMAGE, SHAPE, unit_plan
from tests.distributed.gradient_case import GradientCase, RankGradients, run_on_rank
from tests.distributed.gradient_comparison import MismatchError, assert_matches
from tests.distributed.planted_errors import ERRORS
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.schedule_rewrites import CutMicrobatches, SplitStages
from tests.distributed.spread_case import build_case, whole_items_case
from tests.distributed.test_inside_waits import PAIRS
from tests.distributed.test_inside_waits import build_case as build_inside
from tests.distributed.test_lora import OF_LLM, with_adapters
from tests.distributed.test_overlapped_linear import build_case as build_overlapped
from tests.distributed.training_case import EXPERTS, SHAPES, build_plan

SEED = 5
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", "image": IMAGE, **SHAPE},
            "llm": {"role": "backbone", "untie_embeddings_and_output_weights": False, **SHAPE},
        }
    }
)
DRAWING = ModelGraph.from_dict(
    {
        "units": {
            "llm": {"role": "backbone", **SHAPE},
            "painter": {"role": "generator", "image": {**IMAGE, "patch_size": 3}, **SHAPE},
        }
    }
)


def case_of_any_plan(*, tp: int = 1) -> GradientCase:
    """An encoder with DP 2 before an LLM with PP 2 (or TP 2) and DP 2 that shares two of its ranks; unequal samples."""
    plan = Plan({"vision": unit_plan(2, dp=2), "llm": unit_plan(0, dp=2, tp=tp, pp=2 // tp)})
    one, two = ("vision", 1, 2), ("vision", 2, 2)
    shapes = (
        SampleShape((one,), 4, 3),
        SampleShape((one, two), 5, 1),
        SampleShape((), 6, 2),
        SampleShape((two,), 3, 1),
        SampleShape((), 4, 4),
    )
    assignment = Assignment(
        {"vision": [[[(0, 0), (1, 0)], [(3, 0)]], [[(1, 1)]]], "llm": [[[(0, -1), (2, -1)], [(3, -1)]], [[(4, -1), (1, -1)]]]}
    )
    return GradientCase(GRAPH, plan, assignment, RandomSource(GRAPH, shapes, 12), "1f1b", sequence_parallel=tp > 1)


def case_of_cut_backwards() -> GradientCase:
    """The same, with half of the backwards split into two and one microbatch cut into two sample subsets."""
    case = replace(case_of_any_plan(), passes=(SplitStages(SEED), CutMicrobatches(SEED)))
    schedule = BUILDERS[case.builder](case.assignment.shape(case.graph, case.plan))
    for rewrite in case.passes:
        schedule = rewrite(schedule)
    cuts = schedule.shape.cuts
    assert 2 in cuts.num_subsets.values() and cuts.split, "choose another seed"
    return case


def case_of_unlike_replicas() -> GradientCase:
    """The same, with an LLM of one replica with TP 2 and one with PP 2, whose stages hold two layer ranges each."""
    case = case_of_any_plan()
    wide = Replica((Stage((0, 1), ((0, 4),), 2),))
    deep = Replica((Stage((2,), ((0, 1), (2, 3))), Stage((3,), ((1, 2), (3, 4)))))
    plan = Plan({**case.plan.units, "llm": UnitPlan((wide, deep))})
    return replace(case, plan=plan, builder="interleaved-1f1b", sequence_parallel=True)


def case_of_a_generator() -> GradientCase:
    """An LLM of two stages before a generator with DP 2; one microbatch makes three images for two samples."""
    small, large = ("painter", 1, 2), ("painter", 2, 2)
    shapes = (SampleShape((small, large), 5, 2), SampleShape((), 4, 3), SampleShape((small,), 6, 1), SampleShape((large,), 4, 2))
    assignment = Assignment({"llm": [[[(0, -1), (1, -1)], [(2, -1), (3, -1)]]], "painter": [[[(2, -1), (0, -1)]], [[(3, -1)]]]})
    return GradientCase(
        DRAWING, Plan({"llm": unit_plan(0, pp=2), "painter": unit_plan(2, dp=2)}), assignment, RandomSource(DRAWING, shapes, 12)
    )


def case_of_masks() -> GradientCase:
    """Items attend in both directions; the LLM has a third layer, for in its last one no target depends on how items attend."""
    case = case_of_any_plan()
    vision, llm = case.graph.units
    graph = replace(case.graph, units=(vision, replace(llm, transformer=replace(llm.transformer, num_layers=3))))
    layers = ((0, 2),), ((2, 5),)
    replicas = tuple(
        Replica(tuple(replace(stage, layer_ranges=ranges) for stage, ranges in zip(replica.stages, layers, strict=True)))
        for replica in case.plan.units["llm"].replicas
    )
    plan = Plan({**case.plan.units, "llm": UnitPlan(replicas)})
    return replace(case, graph=graph, plan=plan, attention_mask=MaskMode.EMBEDDED)


SHARED_BY_PAIRS, WIDE = (build_plan(EXPERTS, vision=(1, 1, 2), llm=llm, experts=2) for llm in ((1, 1, 4), (2, 1, 2)))
EXPERT_SOURCE = RandomSource(EXPERTS, SHAPES, 36)
SAMPLES = tuple(Atom(index) for index in range(len(SHAPES)))
ITEMS = tuple(Atom(index, item) for index, shape in enumerate(SHAPES) for item in range(len(shape.items)))


def case_of_experts(plan: Plan, *microbatches: tuple[Atom, ...], **options: Any) -> GradientCase:
    """The LLM's replicas have one microbatch each; the first of the encoder's has all items."""
    vision = ((ITEMS,), *(() for _ in plan.units["vision"].replicas[1:]))
    assignment = Assignment({"vision": vision, "llm": tuple((each,) for each in microbatches)})
    return GradientCase(EXPERTS, plan, assignment, EXPERT_SOURCE, **options)


QUARTERS = SAMPLES[:2], SAMPLES[2:3], SAMPLES[3:4], SAMPLES[4:]
SPREAD = case_of_experts(SHARED_BY_PAIRS, *QUARTERS)
SLICED = case_of_experts(WIDE, SAMPLES[:3], SAMPLES[3:], sequence_parallel=True)


@cache
def case_of(kind: str) -> GradientCase:
    return CASES[kind]()


CASES: dict[str, Callable[[], GradientCase]] = {
    "any plan": case_of_any_plan,
    "tensor parallel ranks": lambda: case_of_any_plan(tp=2),
    "cut backwards": case_of_cut_backwards,
    "sharded weights": lambda: replace(case_of_any_plan(tp=2), shards_weights=True),
    "copies of sharded weights": lambda: replace(case_of_any_plan(), shards_weights=True, num_state_copies=2),
    "gradients reduced once": lambda: replace(case_of_any_plan(), shards_weights=True, reduces_once=True),
    "unlike replicas": case_of_unlike_replicas,
    "a generator": case_of_a_generator,
    "context parallelism": lambda: build_case(
        vision=unit_plan(0, cp=2), llm=unit_plan(0, cp=2, pp=2), painter=unit_plan(0, cp=2)
    ),
    "cut items": lambda: whole_items_case(vision=unit_plan(0, cp=2), llm=unit_plan(0)),
    "masks": case_of_masks,
    "experts": lambda: SPREAD,
    "experts of slices": lambda: SLICED,
    "adapters": lambda: with_adapters(build_overlapped("tp 2 and 4", num_overlapped_parts=1), llm=OF_LLM),
    "overlapped products": lambda: build_overlapped("tp 2 and 4"),
    "inside waits": lambda: build_inside(2, PAIRS),
}


def run_with(kind: str, error: str, case: GradientCase) -> RankGradients:
    with ERRORS[kind][error]():
        return run_on_rank(case)


@pytest.mark.parametrize("kind", CASES)
def test_the_case_without_an_error_passes(ranks: RankPool, kind: str) -> None:
    assert_matches(case_of(kind), ranks)


@pytest.mark.parametrize(("kind", "error"), [(kind, error) for kind, errors in ERRORS.items() for error in errors])
def test_a_planted_error_is_seen(ranks: RankPool, kind: str, error: str) -> None:
    with pytest.raises(MismatchError, match=r"^(loss|gradient of) .* (instead of|is off by) "):
        assert_matches(case_of(kind), ranks, run=partial(run_with, kind, error))
