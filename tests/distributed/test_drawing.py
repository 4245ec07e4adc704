"""Images that a generator makes: Euler's steps along its flow, guided or not, in one process from a stored model."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.runtime.generation.drawing import image_of, make_item
from megatron.runtime.generation.whole_model import OpenedModel, StoredModel, empty_session
from multimodal.data.chat.text_settings import TextSettings
from multimodal.data.image_processing import cut_patches
from multimodal.model.initialization import initialize_parameters
from multimodal.model.latents import normalised_patches
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ImageInput, ModelGraph
from multimodal.values.units.unit import Flow


def graph_with(flow: Flow | None) -> ModelGraph:
    """The example's model, whose generator learns this flow."""
    graph = ModelGraph.from_file("examples/digits_generator/model.yaml")
    return replace(graph, units=(*graph.units[:-1], replace(graph.units[-1], flow=flow)))


@pytest.fixture(params=[Flow(condition_tokens=6), None], ids=["flow", "one pass"])
def model(request: pytest.FixtureRequest) -> Iterator[OpenedModel]:
    """With random weights, those behind a time's map, too, which start as zeros."""
    stored = StoredModel(graph_with(request.param), torch.float64, 384, TextSettings("ByteTokenizer"))
    with empty_session(stored) as session:
        for stage in session.stages.values():
            initialize_parameters(stage, seed=3)
            for name, parameter in stage.named_parameters():
                if name.endswith("modulation.weight"):
                    torch.nn.init.normal_(parameter, std=0.1, generator=torch.manual_seed(4))
        yield session, stored


def test_an_image_follows_the_flow_from_noise(model: OpenedModel) -> None:
    session, stored = model
    stage, seen = session.stages["painter", 0], []
    stage.register_forward_hook(lambda _, given, output: seen.append((given[1], output.predicted)))
    drawn = make_item(model, "draw 47", size=(16, 8), num_steps=3, guidance_scale=2.5, seed=5)
    assert drawn.size == (16, 8) and drawn.mode == "L"
    whole, *passes = seen  # the first pass runs the sample, and shows what the generator is given
    assert whole[0].positions.shape[0] == 8 + (5 if stored.graph.unit("painter").flow else 0)
    if stored.graph.unit("painter").flow is None:
        ((batch, patches),) = passes
        assert batch.path is None
    else:
        points = [value for batch, _ in passes for value in (float(batch.path.times[0]), float(batch.path.is_told[0]))]
        assert points == pytest.approx([1, 1, 1, 0, 2 / 3, 1, 2 / 3, 0, 1 / 3, 1, 1 / 3, 0])
        patches = passes[0][0].patches
        for (batch, told), (_, untold) in zip(passes[::2], passes[1::2], strict=True):
            torch.testing.assert_close(batch.patches, patches)
            patches = patches - (untold + 2.5 * (told - untold)) / 3
    expected = image_of(patches, whole[0].positions[-8:], stored.graph.unit("painter").image)
    assert np.array_equal(np.asarray(drawn), np.asarray(expected))
    again, other = (make_item(model, "draw 47", size=(16, 8), num_steps=3, guidance_scale=2.5, seed=seed) for seed in (5, 6))
    assert np.array_equal(np.asarray(drawn), np.asarray(again))
    assert np.array_equal(np.asarray(drawn), np.asarray(other)) == (stored.graph.unit("painter").flow is None)


def test_what_the_prompt_says_changes_the_image(model: OpenedModel) -> None:
    drawn, other = (np.asarray(make_item(model, prompt, num_steps=2)) for prompt in ("draw 4", "draw 7"))
    assert drawn.shape == (8, 8) and not np.array_equal(drawn, other)


def test_sizes_that_are_not_made_are_refused(model: OpenedModel) -> None:
    with pytest.raises(ConfigError, match=r"no images of 15x8 pixels: sides are multiples of 4, .* the nearest is 16x8"):
        make_item(model, "draw 4", size=(15, 8))
    with pytest.raises(ConfigError, match="areas 64 to 192"):
        make_item(model, "draw 4", size=(64, 64))


@pytest.mark.parametrize("channels", [1, 3])
def test_patches_become_the_image_that_they_were_cut_from(channels: int) -> None:
    unit = ImageInput(patch_size=2, merge_size=2, in_channels=channels, mean=(0.4,), std=(0.3,))
    pixels = np.random.default_rng(0).integers(256, size=(8, 12, channels), dtype=np.uint8)
    patches = normalised_patches(torch.from_numpy(cut_patches(pixels, patch_size=2, merge_size=2)), unit)
    order = np.arange(24).reshape(4, 6)
    places = cut_patches(np.kron(order, np.ones((2, 2)))[:, :, None].astype(np.float32), patch_size=2, merge_size=2)[:, 0]
    rows = torch.from_numpy(np.stack(np.divmod(places.astype(np.int64), 6), axis=1))
    assert np.array_equal(np.asarray(image_of(patches, rows, unit)).reshape(pixels.shape), pixels)


def test_a_model_without_a_generator_makes_no_image() -> None:
    stored = StoredModel(ModelGraph.from_file("examples/digits/model.yaml"), torch.float32, 384, TextSettings("ByteTokenizer"))
    with empty_session(stored) as session, pytest.raises(ConfigError, match="generators of images: none; name one"):
        make_item((session, stored), "draw 4")
