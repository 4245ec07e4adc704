"""Layers' seconds fitted to what a run measures: computations whose true seconds are known are predicted from then on."""

from dataclasses import replace
from random import Random

import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.measured_layers import MeasuredLayers, timed_computations
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.seconds.layer_curves import LayerCurves, Quadratic
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Action, ActionKind
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.timeline import TimelineEvent
from tests.unit.cost.cost_cases import EVEN_CLUSTER, graph_of

SLOW = LayerCurves(
    Quadratic(3e-3, 2e-5, 4e-8, 1e-4),
    Quadratic(2e-3, 5e-5, 9e-8, 2e-4),
    Quadratic(4e-3, 3e-5),
    Quadratic(quadratic=4e-8, sequence=1e-4),
)
"""Nothing like what follows from the cluster."""


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("builder", ["1f1b", "zb-h1"])
def test_measured_computations_are_predicted(builder, recompute):
    graph, options = graph_of(num_layers=4), RunOptions(recompute=recompute)
    sizes = {"vision": UnitSizes(data_parallel_size=2), "llm": UnitSizes(pipeline_parallel_size=2)}
    plan = plan_disaggregated(graph, sizes=sizes, world_size=4)
    schedules, steps, checked = ScheduleCache(graph, plan, BUILDERS[builder]), [], []
    curves = {
        (unit.name, kind, 1, 1): SLOW.times(1 + number)
        for number, unit in enumerate(graph.units)
        for kind in sorted(set(unit.layers))
    }
    true = LayerProfile("", "", curves)
    for seed in range(4):
        random = Random(seed)
        sizes = [[random.choice([16, 64, 640])] * random.randint(0, 2) for _ in range(24)]
        items = [tuple(ItemLengths("vision", size, size // 4) for size in each) for each in sizes]
        lengths = [SampleLengths(index, each, random.randint(5, 400), 5) for index, each in enumerate(items)]
        assignment = BALANCERS["none"](lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=3))
        described = ModelCosts(schedules.shape(assignment), assignment, lengths, EVEN_CLUSTER, 128, options)
        actual = replace(described, profile=true)
        timeline = simulate_schedule(schedules.schedule(assignment), actual).timeline
        steps.append((described, timeline.events))
        checked.append((actual, timeline.events))
    layers = MeasuredLayers(steps[0][0].layer_costs, plan)
    of_lanes = [
        layers.sums([(costs, [event for event in events if event.lane == lane]) for costs, events in steps])
        for lane in range(len(plan.lanes))
    ]
    fitted = LayerProfile.from_dict(layers.fit(sum(of_lanes)).to_dict())
    for actual, events in checked:
        predicted = replace(actual, profile=fitted)
        for action in {event.action for event in events if event.action.kind in "FBIW"}:
            assert predicted.compute(action).seconds == pytest.approx(actual.compute(action).seconds, rel=0.02)


def test_computations_inside_others_and_between_actions_are_told_apart():
    def event(microbatch, start, end):
        return TimelineEvent(Action(ActionKind.FORWARD, "llm", 0, 0, microbatch), 0, start, end)

    found, between = timed_computations([event(0, 1.0, 5.0), event(2, 7.0, 8.0), event(1, 2.0, 3.0)])
    assert [(each.action.microbatch, each.seconds) for each in found] == [(0, 3.0), (2, 1.0)]
    assert between == 2 * 1.0  # none before the first, two before the last
