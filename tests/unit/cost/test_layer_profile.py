"""The costs file: its forms, its errors, the fits that fill it, and one measured step that sets the speed of computation."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published_setups.calibrate_compute import calibrate_compute
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.cost.measured_layers import MeasuredLayers, timed_computations
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.seconds.layer_curves import (
    FitError,
    Interpolated,
    LayerCurves,
    PackedSize,
    Quadratic,
    fit_error,
    fit_quadratic,
)
from multimodal.cost.seconds.layer_profile import LayerProfile, StepProfile
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Action, ActionKind
from multimodal.values.errors import ConfigError
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.timeline import TimelineEvent
from tests.unit.cost.cost_cases import EVEN_CLUSTER, graph_of

SIZES = tuple(PackedSize(tokens) for tokens in (64, 256, 1024, 4096, 16384))
PACKED = (*SIZES, *(PackedSize(size.num_tokens, 8) for size in SIZES), PackedSize(1024, 64))
POINTS = Interpolated((64.0, 256.0), (1.0, 2.0))
COEFFICIENTS = st.floats(0.0, 10.0)


def seconds_of(curve: Quadratic, sizes: Sequence[PackedSize]) -> list[float]:
    return [curve.at(size.num_tokens, size.num_squared, size.num_sequences) for size in sizes]


@given(constant=COEFFICIENTS, linear=COEFFICIENTS, quadratic=COEFFICIENTS, sequence=COEFFICIENTS)
def test_an_exact_quadratic_is_found(constant: float, linear: float, quadratic: float, sequence: float) -> None:
    true = Quadratic(constant + 0.1, linear * 1e-2, quadratic * 1e-5, sequence)
    for fitted_to in (SIZES, PACKED):
        between = [PackedSize(2 * size.num_tokens, size.num_sequences) for size in fitted_to]
        fitted = fit_quadratic(fitted_to, seconds_of(true, fitted_to))
        assert fit_error(fitted, between, seconds_of(true, between)).worst < 1e-6


def test_what_a_sequence_costs_is_told_apart_from_the_constant_only_where_their_numbers_differ() -> None:
    true = Quadratic(1.0, 1e-3, 1e-6, 0.25)
    assert fit_quadratic(PACKED, seconds_of(true, PACKED)) == pytest.approx(true)
    assert fit_quadratic(SIZES, seconds_of(true, SIZES)) == pytest.approx((1.25, 1e-3, 1e-6, 0.0))
    assert fit_quadratic(PACKED, seconds_of(true, PACKED), is_linear=True).sequence == 0.0


def test_noise_does_not_make_coefficients_negative() -> None:
    noise = np.random.default_rng(1).uniform(0.9, 1.1, len(SIZES))
    fitted = fit_quadratic(SIZES, [size.num_tokens * 1e-3 * factor for size, factor in zip(SIZES, noise, strict=True)])
    assert min(fitted) >= 0
    assert fit_error(fitted, SIZES, [size.num_tokens * 1e-3 for size in SIZES]).worst < 0.1


def test_small_sizes_count_as_much_as_large_ones() -> None:
    # a constant that matters at the smallest size alone: least squares of absolute errors would lose it in 1 % of the largest
    seconds = [1e-4 + 1e-6 * size.num_tokens for size in SIZES]
    seconds[-1] *= 1.01
    assert fit_quadratic(SIZES, seconds).at(64, 64**2) == pytest.approx(seconds[0], rel=0.02)


def test_work_that_does_not_depend_on_the_cut_has_no_square() -> None:
    assert fit_quadratic(SIZES, [size.num_squared for size in SIZES], is_linear=True).quadratic == 0.0
    assert fit_quadratic(SIZES, [0.0] * len(SIZES)) == Quadratic()
    assert fit_error(Quadratic(), SIZES, [0.0] * len(SIZES)) == FitError(0.0, 0.0)


@pytest.mark.parametrize(
    ("tokens", "squared", "expected"),
    [
        (64, 64**2, 1.0),
        (160, 160**2, 1.5),
        (448, 448**2, 3.0),  # beyond: the last line goes on
        (32, 32**2, 5 / 6),
        (320, 2 * 160**2, 3.0),  # two sequences of 160
        (0, 0, 0.0),
    ],
)
def test_points_are_joined_by_straight_lines(tokens: int, squared: int, expected: float) -> None:
    assert POINTS.at(tokens, squared) == pytest.approx(expected)


def test_a_falling_first_line_does_not_end_below_zero() -> None:
    assert Interpolated((10.0, 20.0), (1.0, 3.0)).at(1, 1) == 0.0


@pytest.mark.parametrize("name", ["costs.yaml", "costs.json"])
def test_a_profile_is_read_back_as_written(tmp_path: Path, name: str) -> None:
    curves = LayerCurves(Quadratic(1e-5, 2e-7, 3e-12, 4e-6), POINTS, Quadratic(0.0, 1.0), Quadratic())
    for step in (None, StepProfile(seconds=1.0, weight_update_seconds=1e-4)):
        profile = LayerProfile("CPU", "float32", {("llm", "transformer", 2, 1): curves, ("llm", "head", 1, 1): curves}, step)
        profile.to_file(tmp_path / name)
        assert LayerProfile.from_file(tmp_path / name) == profile and ("step" in profile.to_dict()) == (step is not None)


CLUSTER = Cluster(8, 100.0, 80.0, NodeLink(300.0, 4.0), Network(50.0, 8.0, 8), efficiency=0.5, half_efficiency_gflop=2.0)


def step_seconds(cluster: Cluster) -> float:
    """Two kinds of work of which the slower counts, and communication that no speed changes."""
    size, half = 5e9, cluster.half_efficiency_gflop * 1e9
    products = 2e13 / (cluster.flops_per_second * size / (size + half))
    return 0.3 + max(products, 0.1 + 0.5 * products)


@pytest.mark.parametrize(
    ("predict_seconds", "measured_seconds", "message"),
    [
        (step_seconds, 0.2, "communication alone"),
        (lambda cluster: 1 / cluster.efficiency, 0.9, "beyond the peak"),
        (lambda _: 2.0, 1.0, "closest found was 2 s"),
    ],
)
def test_a_measurement_that_no_speed_meets_is_refused(predict_seconds, measured_seconds: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calibrate_compute(CLUSTER, predict_seconds=predict_seconds, measured_seconds=measured_seconds)


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
