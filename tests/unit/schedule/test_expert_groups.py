"""Replicas that share experts compute in one order, or are told that they cannot."""

from dataclasses import replace

import pytest

from multimodal.balance.placement import even_out_replicas
from multimodal.schedule.build_schedule import BuiltSchedule, build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.expert_groups import check_expert_groups
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.step_graph import StepGraph
from tests.unit.schedule.schedule_cases import build_case, build_graph

LLM = build_graph()


def llm_case(*groupings: list[list[int]], pp: int = 1) -> StepGraph:
    """Two replicas, or more, that share experts."""
    case = build_case(LLM, {"llm": (len(groupings), pp, 1)}, {"llm": list(groupings)})
    unit = replace(case.plan.units["llm"], expert_parallel_size=len(groupings))
    return replace(case, plan=Plan({**case.plan.units, "llm": unit}))


@pytest.mark.parametrize("builder", ["1f1b", "gpipe", "zb-h1"])
def test_replicas_with_as_many_microbatches_compute_together(builder: str) -> None:
    case = llm_case([[0], [1], [2]], [[3], [4], [5]], pp=2)
    built = BuiltSchedule(build_schedule(BUILDERS[builder], case))
    assert built.computes_together
    assert not BuiltSchedule(build_schedule(BUILDERS[builder], replace(case, plan=shared_by(case.plan, 1)))).computes_together


def shared_by(plan: Plan, size: int) -> Plan:
    return Plan({**plan.units, "llm": replace(plan.units["llm"], expert_parallel_size=size)})


def test_split_backwards_exchange_the_same() -> None:
    case = llm_case([[0], [1]], [[2], [3]], pp=2)
    check_expert_groups(build_schedule(BUILDERS["1f1b"], case, passes=(split_backward,)))


def test_replicas_with_fewer_microbatches_are_refused_until_they_get_empty_ones() -> None:
    case = llm_case([[0], [1], [2]], [[3]], pp=2)
    with pytest.raises(ScheduleError, match="stage 0 of replicas 0 and 1 computes in different orders"):
        check_expert_groups(build_schedule(BUILDERS["1f1b"], case))
    evened = even_out_replicas(case.assignment, plan=case.plan)
    assert [evened.num_microbatches("llm", replica) for replica in (0, 1)] == [3, 3]
    assert [list(each) for each in evened.units["llm"][1]] == [[Atom(3)], [], []]
    check_expert_groups(build_schedule(BUILDERS["1f1b"], replace(case, assignment=evened)))


def test_nothing_moves_where_no_experts_are_shared() -> None:
    case = llm_case([[0], [1], [2]], [[3]])
    assert even_out_replicas(case.assignment, plan=shared_by(case.plan, 1)) is case.assignment


def test_replicas_that_wait_for_each_other_in_a_circle_are_refused() -> None:
    """The first replica has only text, and behind it, on the same rank, the encoder of the other replica's image."""
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8}
    llm = {"role": "backbone", **shape, "experts": {"num_experts": 2}}
    graph = ModelGraph.from_dict({"units": {"vision": {"role": "encoder", **shape}, "llm": llm}})
    first, second = (Replica((Stage((rank,), ((0, 3),)),)) for rank in (0, 1))
    plan = Plan({"vision": UnitPlan((first,)), "llm": UnitPlan((first, second), expert_parallel_size=2)})
    assignment = Assignment({"vision": (((Atom(1, 0),),),), "llm": (((Atom(0),),), ((Atom(1),),))})
    schedule = build_schedule(BUILDERS["1f1b"], StepGraph(graph, plan, assignment))
    assert [action.unit for action in schedule.lanes[0].actions][:3] == ["llm", "llm", "vision"]
    with pytest.raises(ScheduleError, match="other units keep its replicas from computing together"):
        check_expert_groups(schedule)
