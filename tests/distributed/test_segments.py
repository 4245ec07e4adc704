"""Stages of two tensor parallel ranks come to the waits that costs count."""

from itertools import product
from typing import Any

from multimodal.cost.layers.layer import Exchange
from multimodal.cost.pieces.tensor_parallel_waits import LayerNeed, computation_waits
from multimodal.cost.run_options import RunOptions
from multimodal.values.action import ActionKind
from multimodal.values.backward_need import BackwardNeed
from tests.distributed.rank_pool import RankPool
from tests.distributed.segment_ranges import RangeCase, collectives_waited_for

GATED = {"activation": "swiglu", "normalization": "RMSNorm", "num_query_groups": 2}
NAMES = {Exchange.GATHER: "gathering", Exchange.GATHER_AGAIN: "gathering", Exchange.SUM: "summing"}


WAITS = [
    RangeCase(unit, sequence_parallel=sequence_parallel, recompute=recompute, num_frozen=num_frozen, transformer=GATED)
    for unit, sequence_parallel, recompute, num_frozen in product(("vision", "llm"), (False, True), (None, "full"), (0, 3))
]


def waits_of_all() -> list[Any]:
    return [collectives_waited_for(case) for case in WAITS]


def layers_of(case: RangeCase) -> list[LayerNeed]:
    kinds = ("patch_embedding", "transformer", "transformer", "projector")
    if case.unit == "llm":
        kinds = ("token_embedding", "transformer", "transformer", "head")
    idle = BackwardNeed.INPUT_GRADIENT if case.unit == "llm" else BackwardNeed.NONE
    return [(kind, idle if index < case.num_frozen else BackwardNeed.FULL) for index, kind in enumerate(kinds)]


def test_layers_come_to_the_waits_that_costs_count(ranks: RankPool) -> None:
    for case, (forward, backward) in zip(WAITS, ranks.run(waits_of_all, world_size=2)[0], strict=True):
        options = RunOptions(transformer_impl="local", sequence_parallel=case.sequence_parallel, recompute=case.recompute)
        for kind, found in ((ActionKind.FORWARD, forward), (ActionKind.BACKWARD, backward)):
            counted = [NAMES[wait.exchange] for wait in computation_waits(kind, layers_of(case), options=options)]
            assert found == [f"{number} {name}" for number, name in enumerate(counted)], (case, kind)
