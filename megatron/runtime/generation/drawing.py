"""Images of a model's generator: the LLM runs once a request, then the generator, by one pass or along its flow."""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from megatron.runtime.generation.answering import Answering, open_answering
from megatron.runtime.generation.whole_model import OpenedModel
from multimodal.data.image_processing import image_grid
from multimodal.model.latents import NUM_TIMES, NoisePath, decode_latents, join_patches, mix_weights
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.values.errors import ConfigError, require_package
from multimodal.values.model_graph import ImageInput, ModelGraph, Unit
from multimodal.values.units.unit import Flow


def draw_image(
    model: OpenedModel,
    prompt: str,
    *,
    images: Sequence[str | Path] = (),
    size: tuple[int, int] | None = None,
    num_steps: int = 50,
    guidance_scale: float = 1.0,
    seed: int = 0,
) -> Image.Image:
    """Return the image that a model's generator makes of a user's text, after images from files.

    size: width and height in pixels; None: the smallest square that the model file allows. num_steps, guidance_scale, seed: as in
    `draw_sample`. Raises BraidError if the model has no generator of images, or makes none of this size.
    """
    session, stored = model
    unit = generator_of(session.graph)
    assert unit.image is not None
    side = math.ceil(math.sqrt(unit.image.min_pixels))
    width, height = size or (side, side)
    rows, columns = image_grid(width=width, height=height, image_input=unit.image)
    made = columns * unit.image.patch_size, rows * unit.image.patch_size
    if size is not None and made != size:
        raise ConfigError(
            f"unit '{unit.name}' makes no images of {width}x{height} pixels: sides are multiples of "
            f"{unit.image.patch_size * unit.image.merge_size}, areas {unit.image.min_pixels} to {unit.image.max_pixels}; the "
            f"nearest is {made[0]}x{made[1]}"
        )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "place.png"  # of which only the size counts
        Image.new("RGB", made).save(place)
        segments: list[dict[str, Any]] = [{"type": "image", "path": str(Path(path).absolute())} for path in images]
        segments.append({"type": "text", "role": "user", "text": prompt})
        segments.append({"type": "image", "role": "assistant", "path": str(place)})
        request = Path(folder) / "request.jsonl"
        request.write_text(json.dumps({"id": "request", "segments": segments}) + "\n")
        answering = open_answering(session, stored, request)
        return draw_sample(answering, 0, num_steps=num_steps, guidance_scale=guidance_scale, seed=seed)


def generator_of(graph: ModelGraph) -> Unit:
    """Return the only generator of a model; raises ConfigError if it has none, several, or one of no images."""
    found = [unit for unit in graph.generators if unit.image is not None]
    if len(found) != 1:
        raise ConfigError(
            f"an image is made by a model with one generator of images, and this one has {len(found)}; ask for an answer in words"
        )
    return found[0]


def makes_image(answering: Answering, index: int) -> bool:
    """Return whether a sample's assistant answers with an image."""
    drawn = {unit.name for unit in answering.graph.generators if unit.image is not None}
    return any(item.unit in drawn for item in answering.lengths(index).items)


@torch.no_grad()
def draw_sample(
    answering: Answering, index: int, *, num_steps: int = 50, guidance_scale: float = 1.0, seed: int = 0
) -> Image.Image:
    """Return the image in place of the first one that a sample's assistant answers with.

    num_steps: of Euler's method from noise to data for generators that learn a velocity, of DDIM for those that learn what DDPM
    asks for; others make it in one pass. guidance_scale g: what is followed is u + g (c - u), c with conditions and u without
    (classifier-free guidance); seed: of the noise.
    """
    unit = generator_of(answering.graph)
    assert unit.image is not None
    stage, (_, batch, conditions) = answering.inputs_of(unit.name, index)
    places = batch.positions if batch.target_rows is None else batch.positions[batch.target_rows]
    if batch.path is None:
        patches = _predict(stage, batch, conditions)
    else:
        patches = _follow(stage, batch, conditions, num_steps=num_steps, guidance_scale=guidance_scale, seed=seed)
    starts = (places == 0).all(1).nonzero()[:, 0].tolist()  # every image begins with its first patch
    first = slice(0, starts[1] if len(starts) > 1 else None)
    return image_of(patches[first], places[first], unit.image)


def _follow(
    stage: UnitStage, batch: PackedInput, conditions: Tensor, *, num_steps: int, guidance_scale: float, seed: int
) -> Tensor:
    """Return the patches at time 0 of the path that starts from noise at time 1: [num_patches, patch_channels]."""
    path, flow = batch.path, stage.unit.flow
    assert path is not None and path.noise is not None and flow is not None
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(path.noise.shape, generator=generator, dtype=torch.float64).to(batch.positions.device)

    def predict(time: float, is_told: float) -> Tensor:
        times = torch.full_like(path.times, time)
        point = patches / mix_weights(flow, times.double())[0, :2].sum()  # it is both ends of what the generator mixes
        at = NoisePath(times, torch.full_like(path.is_told, is_told), path.items, point)
        return _predict(stage, replace(batch, patches=point, path=at), conditions).double()

    def guided(time: float) -> Tensor:
        told = predict(time, 1.0)
        if guidance_scale != 1:
            untold = predict(time, 0.0)
            told = untold + guidance_scale * (told - untold)
        return told

    if flow.prediction == "velocity":
        for now, then in pairwise(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64).tolist()):
            patches = patches + (then - now) * guided(now)
        return patches
    scheduler = ddim_scheduler(flow)
    scheduler.set_timesteps(num_steps)
    for step in scheduler.timesteps:
        patches = scheduler.step(guided(float(step) / NUM_TIMES), step, patches).prev_sample
    return patches


def ddim_scheduler(flow: Flow) -> Any:
    """Return diffusers' DDIM for a generator that learns DDPM's noise or v; raises ConfigError without diffusers."""
    require_package("diffusers", extra="diffusion", needed_by="DDIM", error=ConfigError)
    from diffusers import DDIMScheduler

    betas = {"beta_start": flow.beta_start, "beta_end": flow.beta_end, "beta_schedule": "scaled_linear"}
    kind = "epsilon" if flow.prediction == "epsilon" else "v_prediction"
    return DDIMScheduler(**betas, prediction_type=kind, clip_sample=False, set_alpha_to_one=False, steps_offset=1)


def _predict(stage: UnitStage, batch: PackedInput, conditions: Tensor) -> Tensor:
    return stage(None, batch, conditions).predicted


def image_of(patches: Tensor, places: Tensor, image: ImageInput) -> Image.Image:
    """Return patches as an image of bytes.

    patches: [num_patches, num_patch_values], normalised pixels, or latents, which are decoded; places: [num_patches, 2], row and
    column of each.
    """
    grid = int(places[:, 0].amax()) + 1, int(places[:, 1].amax()) + 1
    joined = join_patches(patches.double(), places, grid, channels=image.num_made_channels)
    pixels = (joined if image.latents is None else decode_latents(joined.to(patches.dtype), image.latents)).double().cpu()
    whole = pixels.permute(1, 2, 0).numpy()
    values = np.clip(255 * (whole * np.array(image.std) + np.array(image.mean)), 0, 255).round().astype(np.uint8)
    return Image.fromarray(values[:, :, 0] if image.in_channels == 1 else values)
