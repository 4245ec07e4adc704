"""Stages of two tensor parallel ranks in ranges of segments: collectives at their ends, and the numbers of the whole stage."""

from tests.distributed.rank_pool import RankPool
from tests.distributed.segment_ranges import RangeCase, build_stage, compare, draw_bounds

GATED = {"activation": "swiglu", "normalization": "RMSNorm", "num_query_groups": 2}
PLAIN = {"activation": "gelu", "normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": True}


def compare_all() -> None:
    for transformer in (GATED, PLAIN):
        for sequence_parallel in (False, True):
            common = {"transformer": transformer, "sequence_parallel": sequence_parallel}
            for case in (
                RangeCase("vision", **common),
                RangeCase("vision", recompute="full", num_frozen=2, **common),
                RangeCase("vision", num_frozen=4, has_backward=False, **common),
                RangeCase("vision", first=1, last=3, recompute="selective", **common),
                RangeCase("llm", first=1, recompute="full", **common),
                RangeCase("llm", first=0, last=2, **common),
            ):
                every = list(range(1, build_stage(case).segments().num_segments))
                compare(case, [([], []), (every, every), *(draw_bounds(len(every) + 1, seed) for seed in range(3))])


def test_ranges_of_segments_of_tensor_parallel_stages_give_what_whole_stages_give(ranks: RankPool) -> None:
    ranks.run(compare_all, world_size=2)
