"""LLMs whose replicas share experts: loss and gradients of one process.

Steps and checkpoints are in test_plan_change.py and test_round_trips.py.
"""

from typing import Any

from hypothesis import HealthCheck, given, settings

from multimodal.values.assignment import Assignment, Atom
from multimodal.values.plan import Plan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.random_source import RandomSource
from tests.distributed.rank_pool import RankPool
from tests.distributed.strategies.cases import expert_cases
from tests.distributed.training_case import EXPERTS, SHAPES, build_plan


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(case=expert_cases())
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, case: GradientCase) -> None:
    assert_matches(case, ranks)


PAIRS, WIDE = (build_plan(EXPERTS, vision=(1, 1, 2), llm=llm, experts=2) for llm in ((1, 1, 4), (2, 1, 2)))
SOURCE = RandomSource(EXPERTS, SHAPES, 36)
SAMPLES = tuple(Atom(index) for index in range(len(SHAPES)))
ITEMS = tuple(Atom(index, item) for index, shape in enumerate(SHAPES) for item in range(len(shape.items)))


def case_of(plan: Plan, *microbatches: tuple[Atom, ...], **options: Any) -> GradientCase:
    """The LLM's replicas have one microbatch each; the first of the encoder's has all items."""
    vision = ((ITEMS,), *(() for _ in plan.units["vision"].replicas[1:]))
    assignment = Assignment({"vision": vision, "llm": tuple((each,) for each in microbatches)})
    return GradientCase(EXPERTS, plan, assignment, SOURCE, **options)


QUARTERS = SAMPLES[:2], SAMPLES[2:3], SAMPLES[3:4], SAMPLES[4:]
SPREAD = case_of(PAIRS, *QUARTERS)
SLICED = case_of(WIDE, SAMPLES[:3], SAMPLES[3:], sequence_parallel=True)
