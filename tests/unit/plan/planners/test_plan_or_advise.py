"""The advice where nothing fits: held against planning with the number of GPUs that it names, and with one fewer."""

import re
from dataclasses import replace
from functools import partial

import pytest

from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.allowed_sizes import fewest_enough
from multimodal.plan.planners.plan_or_advise import plan_or_advise
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import plan_per_gpu, plan_to_fit
from multimodal.values.errors import PlanError
from tests.unit.plan.planners.planning_cases import GRAPHS, TWO, request, with_memory
from tests.unit.plan.planners.test_idle_units import without_items


def advised(name: str, asked: PlanningRequest) -> int:
    """Return the number of GPUs in the error."""
    with pytest.raises(PlanError) as caught:
        plan_or_advise(PLANNERS[name], asked)
    found = re.search(r"; (\d+) GPUs would be enough$", str(caught.value))
    assert found, caught.value
    return int(found[1])


def test_the_fewest_that_work_are_found_up_to_a_limit() -> None:
    search = partial(fewest_enough, too_few=0, first=1, most=64)
    assert [search(lambda number, least=least: number >= least) for least in range(1, 66)] == [*range(1, 65), None]


CASES = [(name, graph) for name in PLANNERS for graph in ("text-only", "two", "three") if (name, graph) != ("braid", "three")]
SOME = {
    ("braid", "text-only"),
    *((name, "two") for name in ("disttrain", "megatron", "optimus", "entrain")),
    ("disttrain", "three"),
}


@pytest.mark.deep(when=lambda name, graph: (name, graph) not in SOME)
@pytest.mark.parametrize(("name", "graph"), CASES)
def test_the_advised_number_is_enough_and_one_fewer_is_not(name: str, graph: str) -> None:
    asked = with_memory(request(GRAPHS[graph], num_gpus=1), 0.8)
    enough = advised(name, asked)
    assert enough > 1
    found = plan_to_fit(PLANNERS[name], replace(asked, num_gpus=enough))
    assert found.run.num_gpus <= enough and found.prediction.peak_memory_bytes <= asked.memory_bytes
    with pytest.raises(PlanError):
        plan_to_fit(PLANNERS[name], replace(asked, num_gpus=enough - 1))


@pytest.mark.parametrize("name", ["disttrain", "megatron"])
def test_recomputation_counts_where_nothing_else_fits(name: str) -> None:
    """The planner alone needs more GPUs than with whole layers recomputed, which is tried before it gives up."""
    asked = with_memory(request(TWO, num_gpus=1, micro_batch_size=8), 0.8)
    enough = replace(asked, num_gpus=advised(name, asked))
    assert plan_to_fit(PLANNERS[name], enough).run.recompute == "full"


def test_units_without_work_are_no_reason_for_more_gpus() -> None:
    idle = with_memory(without_items(GRAPHS["three"], "generator", num_gpus=1), 2.0)
    assert advised("disttrain", idle) == advised("disttrain", replace(idle, graph=TWO))


def test_fixed_sizes_that_need_more_gpus_say_how_many() -> None:
    fixed = FixedSizes(tensor_parallel_size=4, pipeline_parallel_size=2)
    assert advised("megatron", request(GRAPHS["text-only"], num_gpus=2, fixed_sizes={"llm": fixed})) == 8


def test_the_card_and_what_may_be_used_of_it_are_named() -> None:
    asked = with_memory(request(TWO, num_gpus=1, memory_headroom=0.25), 1.0)
    plain = partial(plan_to_fit, PLANNERS["disttrain"])
    for plan in (plain, PLANNERS["disttrain"].plan_best, partial(plan_per_gpu, plain)):
        with pytest.raises(PlanError, match=r"no plan on 1 GPU fits the 1 GB of each, of which 0.75 GB may be used .* be enough"):
            plan_or_advise(PLANNERS["disttrain"], asked, plan=plan)


@pytest.mark.deep(when=lambda name: name not in ("alpa", "disttrain", "megatron"))
@pytest.mark.parametrize("name", PLANNERS)
def test_what_never_fits_is_named(name: str) -> None:
    asked = with_memory(request(TWO), 0.002)
    with pytest.raises(PlanError, match=r"unit 'vision' does not fit at any tensor, pipeline or data parallel size"):
        plan_or_advise(PLANNERS[name], asked)


def test_a_contradiction_gets_no_advice() -> None:
    sizes = {"vision": FixedSizes(tensor_parallel_size=1), "llm": FixedSizes(tensor_parallel_size=2)}
    with pytest.raises(PlanError, match=r"gives vision and llm one tensor parallel size") as caught:
        plan_or_advise(PLANNERS["megatron-balanced"], request(TWO, fixed_sizes=sizes))
    assert "enough" not in str(caught.value)
