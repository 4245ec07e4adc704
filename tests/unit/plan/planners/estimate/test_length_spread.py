"""Estimates in closed form: of steps with lengths that vary, and of chains of layer ranges."""

from dataclasses import replace

import numpy as np
import pytest

from multimodal.plan.planners.estimate.chain_estimate import ChainRange, chain_seconds, chunks_in_flight
from multimodal.plan.planners.estimate.grid import GridShape, chain_pieces, cut_grid
from multimodal.plan.planners.estimate.step_estimate import heaviest_seconds
from multimodal.plan.planners.estimate.step_estimate import slowdown as slowdown_of
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.plan.planners.search.layout_search import best_layouts
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.values.sample_lengths import SampleLengths
from tests.unit.plan.planners.planning_cases import LLM, TEXT_ONLY, request


def text_only(*lengths: int) -> PlanningRequest:
    return request(TEXT_ONLY, lengths=tuple(SampleLengths(index, (), tokens, 1) for index, tokens in enumerate(lengths)))


def slowdown(asked: PlanningRequest, **shape: int) -> float:
    return slowdown_of(asked, ["llm"], **shape)


def test_uniform_lengths_slow_no_pipeline():
    assert slowdown(text_only(512, 512, 512), num_stages=8, num_microbatches=32) == 1.0


@pytest.mark.parametrize("virtual_stages", [1, 4])
def test_the_slowdown_is_that_of_a_simulation(virtual_stages):
    lengths = (*[128] * 60, *[1024] * 4)
    seconds = []
    for asked in (text_only(*lengths), text_only(*[round(sum(lengths) / len(lengths))] * 64)):
        asked = replace(asked.changed(micro_batch_size=2), num_gpus=2, global_batch_size=64)
        num_pieces = len(chain_pieces(asked, StageSize(1)))
        grid = cut_grid(asked, GridShape(StageSize(1), 2, 1, num_pieces), virtual_stages=virtual_stages)
        run = replace(grid.to_run(asked, seconds=0.0), balance="llm-only", passes=())
        found = predict_run(run, asked)
        seconds.append((found.iteration_seconds - found.update_seconds, found.ideal_seconds))
    (varied, varied_ideal), (even, even_ideal) = seconds
    waits = slowdown(
        text_only(*lengths).changed(micro_batch_size=2), num_stages=2, num_microbatches=32, num_chunks=virtual_stages
    )
    assert waits == pytest.approx(varied / varied_ideal / (even / even_ideal), rel=0.1)


def test_the_heaviest_sample_takes_as_long_as_all_its_layers():
    asked = text_only(64, 2048)
    one = asked.layer_costs
    alone, shared = (heaviest_seconds(asked, "llm", StageSize(tensor)) for tensor in (1, 4))
    body = one.seconds("llm", LLM.layers[1], request_load(asked, 2048))
    assert alone > len(LLM.layers[1:-1]) * (body.forward + body.input_gradient + body.weight_gradient)
    assert shared < alone


def request_load(asked: PlanningRequest, tokens: int):
    return replace(asked, lengths=(SampleLengths(0, (), tokens, 1),)).loads.of_average("llm", 1)


@pytest.mark.parametrize("size", [1, 4])
def test_a_fixed_microbatch_size_is_kept(size):
    layouts = [layout for kind in best_layouts(request(micro_batch_size=size)) for layout in kind]
    assert {layout.to_run().micro_batch_size for layout in layouts} == {size}


def even(num_ranges):
    return [ChainRange(1.0, 2.0)] * num_ranges


def test_gathering_delays_the_first_forwards_and_reducing_follows_the_last_backwards():
    plain = chain_seconds(even(4), num_lanes=2, num_microbatches=4)
    first = [ChainRange(1.0, 2.0, gathering_seconds=5.0), *even(3)]
    assert chain_seconds(first, num_lanes=2, num_microbatches=4) == pytest.approx(plain + 5.0)
    # The first range's last backward ends the step; the last range's is long past, and hides its reduction.
    first = [ChainRange(1.0, 2.0, reducing_seconds=5.0), *even(3)]
    last = [*even(3), ChainRange(1.0, 2.0, reducing_seconds=1.0)]
    assert chain_seconds(first, num_lanes=2, num_microbatches=4) == pytest.approx(plain + 5.0)
    assert chain_seconds(last, num_lanes=2, num_microbatches=4) == pytest.approx(plain)


def test_lanes_keep_as_many_microbatches_as_the_order_of_interleaved_1f1b_says():
    states = chunks_in_flight(0, num_lanes=4, chunks=3, num_microbatches=16)
    assert states.sum(axis=1).max() == 2 * 3 + 2 * 4 + 1
    assert np.array_equal(states[-1], [0, 0, 0])
