"""A test of the master test: it passes what is right and fails each planted error, by a wrong number and nothing else."""

from dataclasses import replace

import pytest

from multimodal.attention.bitfield import MaskMode
from multimodal.schedule.builders import BUILDERS
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import MismatchError, assert_matches
from tests.distributed.planted_errors.any_plan import PLANTED_ERRORS
from tests.distributed.planted_errors.context_parallelism import ERRORS_OF_CONTEXT_PARALLELISM
from tests.distributed.planted_errors.cut_backwards import ERRORS_IN_CUT_BACKWARDS
from tests.distributed.planted_errors.generators import ERRORS_OF_GENERATORS
from tests.distributed.planted_errors.masks import ERRORS_OF_MASKS
from tests.distributed.planted_errors.run_with_error import planted
from tests.distributed.planted_errors.sharded_weights import ERRORS_OF_SHARDED_WEIGHTS
from tests.distributed.planted_errors.unlike_replicas import ERRORS_OF_UNLIKE_REPLICAS
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.schedule_rewrites import CutMicrobatches, SplitStages
from tests.distributed.spread_case import build_case, unit_plan

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16, "init_method_std": 0.3}
SEED = 5
IMAGE = {"patch_size": 2, "in_channels": 1, "merge_size": 1}


@pytest.fixture(scope="module")
def case() -> GradientCase:
    """An encoder with DP 2 before an LLM with TP 2, PP 2 and DP 2 that shares two of its ranks; unequal samples."""
    graph = ModelGraph.from_dict(
        {
            "units": {
                "vision": {"role": "encoder", "image": IMAGE, **SHAPE},
                "llm": {"role": "backbone", "untie_embeddings_and_output_weights": False, **SHAPE},
            }
        }
    )
    plan = Plan.from_dict(
        {
            "units": {
                "vision": {"replicas": [{"stages": [{"ranks": [rank], "layers": [[0, 4]]}]} for rank in (4, 5)]},
                "llm": {
                    "tensor_parallel_size": 2,
                    "replicas": [
                        {"stages": [{"ranks": [a, a + 1], "layers": [[0, 2]]}, {"ranks": [b, b + 1], "layers": [[2, 4]]}]}
                        for a, b in ((0, 2), (4, 6))
                    ],
                },
            }
        }
    )
    one, two = ("vision", 1, 2), ("vision", 2, 2)
    shapes = (
        SampleShape((one,), 4, 3),
        SampleShape((one, two), 5, 1),
        SampleShape((), 6, 2),
        SampleShape((two,), 3, 1),
        SampleShape((), 4, 4),
    )
    assignment = Assignment.from_dict(
        {
            "vision": [[[(0, 0), (1, 0)], [(3, 0)]], [[(1, 1)]]],
            "llm": [[[(0, -1), (2, -1)], [(3, -1)]], [[(4, -1), (1, -1)]]],
        }
    )
    return GradientCase(graph, plan, assignment, RandomSource(graph, shapes, 12), "1f1b", sequence_parallel=True)


def test_the_case_without_an_error_passes(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(case, ranks)


@pytest.fixture(scope="module")
def cut_case(case: GradientCase) -> GradientCase:
    """The same, with half of the backwards split into two and one microbatch cut into two sample subsets."""
    return replace(case, passes=(SplitStages(SEED), CutMicrobatches(SEED)))


def test_the_cut_case_without_an_error_passes(ranks: RankPool, cut_case: GradientCase) -> None:
    schedule = BUILDERS[cut_case.builder](cut_case.assignment.shape(cut_case.graph, cut_case.plan))
    for rewrite in cut_case.passes:
        schedule = rewrite(schedule)
    cuts = schedule.shape.cuts
    assert 2 in cuts.num_subsets.values() and cuts.split, "choose another seed"
    assert_matches(cut_case, ranks)


@pytest.mark.parametrize("error", ERRORS_IN_CUT_BACKWARDS)
def test_a_planted_error_in_cut_backwards_is_seen(ranks: RankPool, cut_case: GradientCase, error: str) -> None:
    with pytest.raises(MismatchError, match=r"^gradient of .* is off by "):
        assert_matches(cut_case, ranks, run=planted(error))


@pytest.mark.parametrize("error", PLANTED_ERRORS)
def test_a_planted_error_is_seen(ranks: RankPool, case: GradientCase, error: str) -> None:
    with pytest.raises(MismatchError, match=r"^(loss|gradient of) .* (instead of|is off by) "):
        assert_matches(case, ranks, run=planted(error))


def test_the_case_with_sharded_weights_passes(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(replace(case, shards_weights=True), ranks)


@pytest.mark.parametrize("error", ERRORS_OF_SHARDED_WEIGHTS)
def test_a_planted_error_of_sharded_weights_is_seen(ranks: RankPool, case: GradientCase, error: str) -> None:
    with pytest.raises(MismatchError, match=r"^(loss|gradient of) .* (instead of|is off by) "):
        assert_matches(replace(case, shards_weights=True), ranks, run=planted(error))


@pytest.fixture(scope="module")
def unlike_case(case: GradientCase) -> GradientCase:
    """The same, with an LLM of one replica with TP 2 and one with PP 2, whose stages hold two layer ranges each."""
    wide = Replica((Stage((0, 1), ((0, 4),), 2),))
    deep = Replica((Stage((2,), ((0, 1), (2, 3))), Stage((3,), ((1, 2), (3, 4)))))
    return replace(case, plan=Plan({**case.plan.units, "llm": UnitPlan((wide, deep))}), builder="interleaved-1f1b")


def test_the_case_of_unlike_replicas_passes(ranks: RankPool, unlike_case: GradientCase) -> None:
    assert_matches(unlike_case, ranks)


@pytest.mark.parametrize("error", ERRORS_OF_UNLIKE_REPLICAS)
def test_a_planted_error_of_unlike_replicas_is_seen(ranks: RankPool, unlike_case: GradientCase, error: str) -> None:
    with pytest.raises(MismatchError, match=r"^gradient of .* is off by "):
        assert_matches(unlike_case, ranks, run=planted(error))


@pytest.fixture(scope="module")
def generator_case() -> GradientCase:
    """An LLM of two stages before a generator with DP 2; one microbatch makes three images for two samples."""
    image = {**IMAGE, "patch_size": 3}
    graph = ModelGraph.from_dict(
        {"units": {"llm": {"role": "backbone", **SHAPE}, "painter": {"role": "generator", "image": image, **SHAPE}}}
    )
    plan = Plan.from_dict(
        {
            "units": {
                "llm": {"replicas": [{"stages": [{"ranks": [0], "layers": [[0, 2]]}, {"ranks": [1], "layers": [[2, 4]]}]}]},
                "painter": {"replicas": [{"stages": [{"ranks": [rank], "layers": [[0, 4]]}]} for rank in (2, 3)]},
            }
        }
    )
    small, large = ("painter", 1, 2), ("painter", 2, 2)
    shapes = (SampleShape((small, large), 5, 2), SampleShape((), 4, 3), SampleShape((small,), 6, 1), SampleShape((large,), 4, 2))
    assignment = Assignment.from_dict(
        {
            "llm": [[[(0, -1), (1, -1)], [(2, -1), (3, -1)]]],
            "painter": [[[(2, -1), (0, -1)]], [[(3, -1)]]],
        }
    )
    return GradientCase(graph, plan, assignment, RandomSource(graph, shapes, 12))


def test_the_generator_case_without_an_error_passes(ranks: RankPool, generator_case: GradientCase) -> None:
    assert_matches(generator_case, ranks)


@pytest.mark.parametrize("error", ERRORS_OF_GENERATORS)
def test_a_planted_error_with_a_generator_is_seen(ranks: RankPool, generator_case: GradientCase, error: str) -> None:
    with pytest.raises(MismatchError, match=r"^(loss|gradient of) .* (instead of|is off by) "):
        assert_matches(generator_case, ranks, run=planted(error))


@pytest.fixture(scope="module")
def spread_case() -> GradientCase:
    """All three units with context parallelism; the LLM in two stages."""
    return build_case(vision=unit_plan(0, cp=2), llm=unit_plan(2, cp=2, pp=2), painter=unit_plan(0, cp=2))


def test_the_spread_case_without_an_error_passes(ranks: RankPool, spread_case: GradientCase) -> None:
    assert_matches(spread_case, ranks)


@pytest.mark.parametrize("error", ERRORS_OF_CONTEXT_PARALLELISM)
def test_a_planted_error_in_context_parallelism_is_seen(ranks: RankPool, spread_case: GradientCase, error: str) -> None:
    with pytest.raises(MismatchError, match=r"^(loss|gradient of) .* (instead of|is off by) "):
        assert_matches(spread_case, ranks, run=planted(error))


@pytest.fixture(scope="module")
def mask_case(case: GradientCase) -> GradientCase:
    """Items attend in both directions; the LLM has a third layer, for in its last one no target depends on how items attend."""
    backbone = case.graph.backbone
    llm = replace(backbone, transformer=replace(backbone.transformer, num_layers=3))
    units = tuple(llm if unit.name == llm.name else unit for unit in case.graph.units)
    layers = ((0, 2),), ((2, 5),)
    replicas = tuple(
        Replica(tuple(replace(stage, layer_ranges=ranges) for stage, ranges in zip(replica.stages, layers, strict=True)))
        for replica in case.plan.units[llm.name].replicas
    )
    plan = Plan({**case.plan.units, llm.name: replace(case.plan.units[llm.name], replicas=replicas)})
    return replace(case, graph=replace(case.graph, units=units), plan=plan, attention_mask=MaskMode.EMBEDDED)


def test_the_mask_case_without_an_error_passes(ranks: RankPool, mask_case: GradientCase) -> None:
    assert_matches(mask_case, ranks)


@pytest.mark.parametrize("error", ERRORS_OF_MASKS)
def test_a_planted_error_in_a_mask_is_seen(ranks: RankPool, mask_case: GradientCase, error: str) -> None:
    with pytest.raises(MismatchError, match=r"^(loss|gradient of) .* (instead of|is off by) "):
        assert_matches(mask_case, ranks, run=planted(error))
