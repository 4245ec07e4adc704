"""What lengths that vary cost pipelines."""

from dataclasses import replace

import pytest

from multimodal.plan.planners.estimate.step_estimate import LengthSpread
from multimodal.plan.planners.estimate.unit_layout import even_layout
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.layout_search import best_layouts
from multimodal.values.sample_lengths import SampleLengths
from tests.unit.plan.planners.planning_cases import LLM, TEXT_ONLY, request


def text_only(*lengths: int) -> PlanningRequest:
    return request(TEXT_ONLY, lengths=tuple(SampleLengths(index, (), tokens, 1) for index, tokens in enumerate(lengths)))


def test_uniform_lengths_slow_no_pipeline():
    spread = LengthSpread(text_only(512, 512, 512))
    assert spread.slowdown("llm", micro_batch_size=1, num_stages=8) == 1.0


def test_deeper_pipelines_wait_for_heavier_microbatches():
    spread = LengthSpread(text_only(*[128] * 15, 4096))
    found = [spread.slowdown("llm", micro_batch_size=1, num_stages=stages) for stages in (1, 2, 4, 16)]
    assert found[0] == 1.0 and found == sorted(found) and found[1] < found[-1]


def test_microbatches_of_more_samples_differ_less():
    spread = LengthSpread(text_only(*range(100, 1100, 50)))
    small, large = (spread.slowdown("llm", micro_batch_size=size, num_stages=4) for size in (1, 16))
    assert 1 < large < small


def test_the_heaviest_sample_takes_as_long_as_all_its_layers():
    asked = text_only(64, 2048)
    one = asked.layer_costs
    alone, shared = (LengthSpread(asked).heaviest_seconds("llm", even_layout(LLM, tensor, 1, 2)) for tensor in (1, 4))
    body = one.seconds("llm", LLM.layers[1], request_load(asked, 2048))
    assert alone > len(LLM.layers[1:-1]) * (body.forward + body.input_gradient + body.weight_gradient)
    assert shared < alone


def request_load(asked: PlanningRequest, tokens: int):
    return replace(asked, lengths=(SampleLengths(0, (), tokens, 1),)).load("llm", 1)


@pytest.mark.parametrize("size", [1, 4])
def test_a_fixed_microbatch_size_is_kept(size):
    layouts = [layout for kind in best_layouts(request(micro_batch_size=size)) for layout in kind]
    assert {layout.to_run().micro_batch_size for layout in layouts} == {size}
