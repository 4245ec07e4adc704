"""What lengths that vary cost pipelines."""

from dataclasses import replace

import pytest

from multimodal.plan.planners.estimate.grid import GridShape, chain_pieces, cut_grid
from multimodal.plan.planners.estimate.memory_estimate import heaviest_share
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


def test_deep_pipelines_wait_longer_and_many_or_large_microbatches_less_for_heavy_samples():
    asked = text_only(*[128] * 15, 4096)
    found = [slowdown(asked, num_stages=stages, num_microbatches=64) for stages in (1, 2, 4, 16)]
    assert found[0] == 1.0 and found == sorted(found) and found[1] < found[-1]
    small, large = (slowdown(asked.changed(micro_batch_size=size), num_stages=4, num_microbatches=16) for size in (1, 16))
    assert 1 <= large < small
    few, many = (slowdown(asked.changed(micro_batch_size=4), num_stages=4, num_microbatches=count) for count in (12, 96))
    assert 1 < many < few


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


def test_the_heaviest_microbatches_together_weigh_more_the_fewer_they_are():
    asked = text_only(*[128] * 15, 4096).changed(micro_batch_size=2)
    shares = [heaviest_share(asked, "llm", count=count, of=32) for count in (1, 8, 32)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 2 and shares[-1] == pytest.approx(1.0)
    assert heaviest_share(text_only(512, 512), "llm", count=1, of=32) == 1.0


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
