"""A module of transformers in costs and planners: counted by the shape that stands for it, and never cut."""

from dataclasses import replace

import pytest

from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.planners import PLANNERS
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import AudioInput, ImageInput, ModelGraph, Opaque
from multimodal.values.units.items import Waveform
from tests.unit.plan.planners.planning_cases import TWO, request

GRAPH = replace(
    TWO,
    units=tuple(
        replace(unit, image=ImageInput(image_size=28, patch_size=7, merge_size=1), module=Opaque("nowhere"))
        if unit in TWO.encoders
        else unit
        for unit in TWO.units
    ),
)
(ENCODER,) = GRAPH.encoders


def test_it_counts_as_the_layers_that_its_shape_describes() -> None:
    load = UnitLoad(32, 2 * 16**2, 32, 2)
    whole = describe_layer(GRAPH, ENCODER, "opaque", vocab_size=0)
    layer = describe_layer(GRAPH, ENCODER, "transformer", vocab_size=0)
    patches = describe_layer(GRAPH, ENCODER, "patch_embedding", vocab_size=0)
    count = ENCODER.transformer.num_layers
    assert whole.num_weights == count * layer.num_weights + patches.num_weights
    expected = count * sum(layer.forward_flops(load)) + sum(patches.forward_flops(load))
    assert sum(whole.forward_flops(load)) == pytest.approx(expected)


@pytest.mark.parametrize("planner", ["megatron", "megatron-balanced", "flops-ratio", "disttrain", "cornstarch", "optimus"])
def test_planners_leave_it_whole(planner: str) -> None:
    plan = PLANNERS[planner](request(GRAPH)).plan.units[ENCODER.name]
    assert (plan.tensor_parallel_size, plan.context_parallel_size, plan.num_virtual_stages) == (1, 1, 1)


def test_its_description_reads_back() -> None:
    module = Opaque("folder", "CLIPVisionModel", "vision_model", before_encoder="cut:into_tiles")
    units = (replace(ENCODER, module=module, weights="folder"), *GRAPH.units[1:])
    graph = replace(GRAPH, units=units)
    assert ModelGraph.from_dict(graph.to_dict()) == graph


def test_a_fixed_cut_is_refused() -> None:
    from multimodal.plan.planners.allowed_sizes import tensor_parallel_sizes
    from multimodal.plan.planners.planning_request import FixedSizes

    with pytest.raises(PlanError, match="tensor parallel size 2 is fixed, but it must divide"):
        tensor_parallel_sizes(request(GRAPH, fixed_sizes={ENCODER.name: FixedSizes(tensor_parallel_size=2)}), ENCODER.name)


SOUND = Waveform(widths=(10, 3, 2), steps=(5, 2, 2), channels=8)


def test_a_module_that_takes_samples_counts_its_convolutions() -> None:
    unit = replace(ENCODER, image=None, audio=AudioInput(waveform=SOUND))
    layer = describe_layer(GRAPH, unit, "opaque", vocab_size=0)
    transformer = describe_layer(GRAPH, unit, "transformer", vocab_size=0)
    count, hidden = unit.transformer.num_layers, unit.transformer.hidden_size
    load = UnitLoad(10, 60, 5, 2)
    # Of the first two convolutions there are four and two times as many places as tokens.
    convolutions = 4 * 10 * 8 + 2 * 3 * 8 * 8 + 2 * 8 * 8 + 8 * hidden
    assert layer.num_weights == 10 * 8 + 3 * 8 * 8 + 2 * 8 * 8 + 8 * hidden + count * transformer.num_weights
    expected = 2 * 10 * convolutions + count * sum(transformer.forward_flops(load))
    assert sum(layer.forward_flops(load)) == pytest.approx(expected)


def test_a_module_that_takes_spectrograms_takes_the_longest_one_for_each_clip() -> None:
    unit = replace(ENCODER, image=None, audio=AudioInput(num_mel_bins=4, max_tokens=12))
    layer = describe_layer(GRAPH, unit, "opaque", vocab_size=0)
    assert layer.forward_flops(UnitLoad(5, 13, 5, 2)) == layer.forward_flops(UnitLoad(24, 288, 5, 2))
