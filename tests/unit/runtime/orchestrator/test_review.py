"""A plan held against what was measured."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.runtime.orchestrator import review as module
from megatron.runtime.orchestrator.choose_plan import Choice
from megatron.runtime.orchestrator.review import PlanReview, Verdict
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.cost.seconds.layer_curves import LayerCurves, Quadratic
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.values.action import Action, ActionKind
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.timeline import Timeline, TimelineEvent

PLAN = Plan({"llm": UnitPlan((Replica((Stage((0,), ((0, 4),)),)),))})
CLUSTER = Cluster(1, 1.0, 8.0, NodeLink(1.0, 1.0), Network(1.0, 1.0, 1))
CHOICE = Choice(PlannedRun(PLAN), CLUSTER, 0.2, ("plan: this", "predicted: that", "why: so"), "units: {}\n")


def reviewed(**changes: Any) -> PlanReview:
    """Return a review of three steps, which has seen two that took twice what was profiled."""
    planned = SimpleNamespace(choice=CHOICE, request=None)
    made = PlanReview(planned, 3, **{"may_change": True, **changes})  # type: ignore[arg-type]
    made._costs = lambda step: SimpleNamespace(compute=lambda action: SimpleNamespace(seconds=0.05))  # type: ignore[method-assign]
    events = [
        TimelineEvent(Action(ActionKind.FORWARD, "llm", 0, 0, 0), 0, 0.0, 0.1),
        TimelineEvent(Action(ActionKind.FORWARD, "llm", 0, 0, 1), 0, 0.1, 0.2),
    ]
    for seconds in (0.5, 0.3):
        made.add(SimpleNamespace(), Timeline(((0,),), tuple(events)), seconds=seconds)  # type: ignore[arg-type]
    return made


def test_steps_up_to_the_review_are_measured_but_for_the_first() -> None:
    review = reviewed(first_step=10)
    assert [number for number in range(10, 16) if review.measures(number)] == [12, 13]
    assert [number for number in range(10, 16) if review.is_due(number)] == [13]
    alone = PlanReview(reviewed().planned, 1, may_change=False)
    assert alone.measures(1) and alone.is_due(1)


@pytest.mark.parametrize(
    ("seconds", "may_change", "said", "is_taken"),
    [
        (0.39, True, "no plan was found to be more than 5% better", False),
        (0.2, False, "plan: this would take 0.2 s a step, the current plan 0.4 s; --replan would go on under it", False),
        (0.2, True, "plan: this would take 0.2 s a step, the current plan 0.4 s; going on under it", True),
    ],
)
def test_a_better_plan_is_told_of_and_taken(
    monkeypatch: pytest.MonkeyPatch, seconds: float, may_change: bool, said: str, is_taken: bool
) -> None:
    review = reviewed(may_change=may_change)
    better = Choice(CHOICE.run, CLUSTER, seconds, CHOICE.lines, CHOICE.text)
    review._plan_again = lambda: (0.4, better)  # type: ignore[method-assign]
    review.planned.request = SimpleNamespace()  # type: ignore[misc]
    kept: list[Choice] = []
    monkeypatch.setattr(module, "keep_choice", lambda request, choice: kept.append(choice))
    verdict = review.conclude(3)
    assert said in verdict.line and verdict.line.startswith("plan review after step 3: a step takes 0.4 s, predicted 0.2 s")
    assert "computations take 2.00 times as long in llm" in verdict.line
    assert (verdict.choice == better) == is_taken == bool(kept)
    assert Verdict.from_text(verdict.to_text()) == verdict


def test_a_plan_that_was_taken_is_held_against_the_one_before() -> None:
    after = reviewed().after_change(reviewed().planned, number=3)
    assert after.is_due(6) and not after.may_change
    again = reviewed(seconds_before=after.seconds_before, may_change=False)
    assert again.conclude(6).line.endswith("; under the plan before it took 0.4 s")


def test_a_profile_is_scaled_unit_by_unit() -> None:
    curves = LayerCurves(Quadratic(1.0, 2.0), Quadratic(), Quadratic(0.0, 1.0))
    profile = LayerProfile("CPU", "float32", {("llm", "transformer", 1, 1): curves, ("vision", "transformer", 1, 1): curves})
    scaled = profile.times({"llm": 3.0}).curves
    assert scaled["llm", "transformer", 1, 1].forward == Quadratic(3.0, 6.0)
    assert scaled["vision", "transformer", 1, 1] == curves
