"""A step whose microbatches are spread over context parallel ranks: loss and gradients of one process."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from multimodal.attention.bitfield import MaskMode
from multimodal.attention.share_tokens import TokenDistribution
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, UnitPlan
from tests.distributed.corpus_source import CORPUS, read_documents
from tests.distributed.gradient_case import GradientCase, build_session, plan_case
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import RandomSource
from tests.distributed.rank_pool import RankPool
from tests.distributed.spread_case import GRAPH, SAMPLES, SHAPE, build_case, unit_plan

MAX_RANKS, SEED = 8, 0


@pytest.mark.parametrize(
    ("cp", "tp", "pp"), [sizes for sizes in itertools.product((1, 2, 4), (1, 2), (1, 2)) if math.prod(sizes) <= MAX_RANKS]
)
def test_the_llm_on_any_grid(ranks: RankPool, cp: int, tp: int, pp: int) -> None:
    case = build_case(llm=unit_plan(0, cp=cp, tp=tp, pp=pp))
    assert_matches(replace(case, sequence_parallel=tp > 1, builder="zb-h1" if pp > 1 else "1f1b"), ranks)


@pytest.mark.parametrize("distribution", TokenDistribution)
def test_every_distribution(ranks: RankPool, distribution: TokenDistribution) -> None:
    assert_matches(replace(build_case(llm=unit_plan(0, cp=3)), distribution=distribution), ranks)


@pytest.mark.parametrize("block_size", [4, 16, 128])
def test_blocks_of_any_size_even_if_some_ranks_hold_nothing(ranks: RankPool, block_size: int) -> None:
    plans = {"vision": unit_plan(0, cp=4), "llm": unit_plan(0, cp=4), "painter": unit_plan(0, cp=4)}
    assert_matches(replace(build_case(**plans), block_size=block_size), ranks)


UNITS = {
    "encoder": {"vision": unit_plan(0, cp=2), "llm": unit_plan(2)},
    "encoder with tp, apart": {"vision": unit_plan(0, cp=2, tp=2), "llm": unit_plan(4, cp=2, tp=2)},
    "encoder and LLM cross": {"vision": unit_plan(0, cp=1, tp=2), "llm": unit_plan(0, cp=2)},
    "LLM and encoder cross": {"vision": unit_plan(0, cp=2), "llm": unit_plan(0, tp=2)},
    "encoder in stages": {"vision": unit_plan(0, cp=2, pp=2), "llm": unit_plan(1, cp=3)},
    "generator": {"llm": unit_plan(0), "painter": unit_plan(1, cp=2)},
    "generator and LLM": {"llm": unit_plan(0, cp=2, tp=2), "painter": unit_plan(2, cp=3)},
    "generator with tp": {"llm": unit_plan(0, cp=4), "painter": unit_plan(0, cp=2, tp=2)},
}


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_unit_before_and_behind_every_other(ranks: RankPool, units: str, sequence_parallel: bool) -> None:
    assert_matches(replace(build_case(**UNITS[units]), sequence_parallel=sequence_parallel), ranks)


def test_samples_that_are_decoded_first_say_where_their_items_are(ranks: RankPool) -> None:
    """Each rank decodes a share of the batch, and hears from the others where items begin."""
    assert_matches(replace(build_case(**UNITS["generator and LLM"]), exchanges_samples=True), ranks)


def evaluate_on_rank(case: GradientCase) -> tuple[int, dict[int, bool]]:
    """What this rank says of a forward in which greedy decoding is compared with the targets."""
    step = plan_case(case, forward_only=True)
    result = build_session(case).executor.execute(step)
    return result.num_correct_tokens, dict(result.correct_samples)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_answer_is_right_if_all_ranks_that_share_it_say_so(ranks: RankPool, tp: int) -> None:
    two_words = RandomSource(GRAPH, SAMPLES, vocab_size=2, seed=SEED)
    alone, spread = (replace(build_case(llm=llm), source=two_words) for llm in (unit_plan(0), unit_plan(0, cp=4, tp=tp)))
    ((num_correct, right_answers),) = ranks.run(evaluate_on_rank, alone, world_size=1)
    assert set(right_answers.values()) == {True, False}, "choose another seed"
    found = ranks.run(evaluate_on_rank, spread, world_size=4 * tp)
    assert sum(count for count, _ in found) == num_correct
    said = [item for _, samples in found for item in samples.items()]
    assert len(said) == len(dict(said)) and dict(said) == right_answers


DOCUMENT_UNITS = {
    "vision": {**SHAPE, "role": "encoder", "image": {"patch_size": 14, "merge_size": 2, "in_channels": 3, "max_pixels": 50176}},
    "llm": {**SHAPE, "role": "backbone", "num_query_groups": 2},
}


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of real documents is not beside the repository")
@pytest.mark.parametrize("mode", [MaskMode.CAUSAL, MaskMode.EMBEDDED])
def test_packed_batches_of_real_documents(ranks: RankPool, tmp_path: Path, mode: MaskMode) -> None:
    """Documents with 0 to 3 images, whole and cut, packed into microbatches of two; blocks of 128 tokens as in a run."""
    graph = ModelGraph.from_dict({"units": DOCUMENT_UNITS})
    source = read_documents(tmp_path, graph=graph, image_counts=(1, 3, 2, 0), seq_length=1024)
    items = [(sample, item) for sample in range(len(source)) for item in range(len(source.lengths(sample).items))]
    assignment = Assignment.from_dict(
        {"vision": [[items[::2]], [items[1::2]]], "llm": [[[(1, -1), (0, -1)], [(2, -1), (3, -1)]]]}
    )
    vision = UnitPlan((unit_plan(0, cp=2).replicas[0], unit_plan(2, cp=2).replicas[0]), 1, 2)
    plan = Plan({"vision": vision, "llm": unit_plan(0, cp=2, tp=2, pp=2)})
    case = GradientCase(graph, plan, assignment, source, attention_mask=mode, sequence_parallel=True, block_size=128)  # type: ignore[arg-type]
    assert_matches(case, ranks)
