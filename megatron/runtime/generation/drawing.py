"""Images and sound of a model's generators: the LLM runs once a request, then the generator, by one pass or along its flow."""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from scipy.io import wavfile
from torch import Tensor

from megatron.runtime.generation.answering import Answering, open_answering
from megatron.runtime.generation.whole_model import OpenedModel
from multimodal.data.audio import HOP, LOUDEST, SAMPLING_RATE, SILENCE, WINDOW, mel_filters, sound_grid
from multimodal.data.image_processing import image_grid
from multimodal.data.remote import data_path
from multimodal.model.latents import NUM_TIMES, NoisePath, decode_latents, join_patches, mix_weights
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.values.errors import ConfigError, require_package
from multimodal.values.model_graph import ImageInput, ModelGraph, Unit
from multimodal.values.units.unit import Flow


class Sound(NamedTuple):
    """Sound that a generator made."""

    samples: npt.NDArray[np.float32]
    """[num_samples] at 16 kHz, from -1 to 1."""

    @property
    def seconds(self) -> float:
        """The length of the clip."""
        return len(self.samples) / SAMPLING_RATE

    def save(self, file: str | Path | BinaryIO) -> None:
        """Write a WAV file of 16 bits."""
        wavfile.write(file, SAMPLING_RATE, (self.samples * (2**15 - 1)).astype(np.int16))


Made = Image.Image | Sound


def size_of(made: Made) -> str:
    """Return the size of what a generator made, as text."""
    return f"{made.seconds:.2f} s of sound" if isinstance(made, Sound) else f"an image of {made.width}x{made.height} pixels"


def make_item(
    model: OpenedModel,
    prompt: str,
    *,
    kind: Literal["image", "audio"] = "image",
    unit: str | None = None,
    images: Sequence[str | Path] = (),
    audio: Sequence[str | Path] = (),
    size: tuple[int, int] | None = None,
    seconds: float | None = None,
    **options: Any,
) -> Made:
    """Return the image or the sound that a model's generator makes of a user's text, after images and clips from files.

    unit: the generator, if several make this kind. size: width and height of an image in pixels; None: the smallest square that
    the model file allows. seconds: of sound; None: the shortest clip. options: as in `make_of_sample`. Raises BraidError if the
    model has no such generator, or it makes none of this size.
    """
    session, stored = model
    generator = generator_of(session.graph, kind=kind, unit=unit)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / ("place.png" if kind == "image" else "place.wav")  # of which only the size counts
        if kind == "image":
            Image.new("RGB", _image_size(generator, size)).save(place)
        else:
            assert generator.image is not None
            num_samples = max(1, round((seconds or 0) * SAMPLING_RATE))
            sound_grid(num_samples, image=generator.image)  # refuses a clip that is longer than the generator's
            Sound(np.zeros(num_samples, np.float32)).save(place)
        files = [("audio", path) for path in audio] + [("image", path) for path in images]
        segments: list[dict[str, Any]] = [{"type": each, "path": str(data_path(str(path)).absolute())} for each, path in files]
        segments.append({"type": "text", "role": "user", "text": prompt})
        segments.append({"type": kind, "role": "assistant", "path": str(place), "unit": generator.name})
        request = Path(folder) / "request.jsonl"
        request.write_text(json.dumps({"id": "request", "segments": segments}) + "\n")
        return make_of_sample(open_answering(session, stored, request), 0, generator.name, **options)


def generator_of(graph: ModelGraph, *, kind: str, unit: str | None = None) -> Unit:
    """Return the generator with this name, or the only one of this kind; raises ConfigError if there is none, or several."""
    found = [each for each in graph.generators if each.image is not None and each.makes_sound == (kind == "audio")]
    named = [each for each in found if unit in (None, each.name)]
    if len(named) != 1:
        what, own = "sound" if kind == "audio" else "images", ", ".join(each.name for each in found) or "none"
        raise ConfigError(f"the model's generators of {what}: {own}; name one of several (--unit), or ask for an answer in words")
    return named[0]


def _image_size(unit: Unit, size: tuple[int, int] | None) -> tuple[int, int]:
    """Return width and height; raises ConfigError for a size that is not made."""
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
    return made


def made_in(answering: Answering, index: int) -> list[str]:
    """Return the generators whose images or sound are in a sample, each once."""
    made = {unit.name for unit in answering.graph.generators if unit.image is not None}
    return [*dict.fromkeys(item.unit for item in answering.source.lengths(index).items if item.unit in made)]


@torch.no_grad()
def make_of_sample(
    answering: Answering, index: int, unit: str, *, num_steps: int = 50, guidance_scale: float = 1.0, seed: int = 0
) -> Made:
    """Return what a generator makes in place of its first item in a sample.

    num_steps: of Euler's method from noise to data for generators that learn a velocity, of DDIM for those that learn what DDPM
    asks for; others make it in one pass. guidance_scale g: what is followed is u + g (c - u), c with conditions and u without
    (classifier-free guidance); seed: of the noise.
    """
    image = answering.graph.unit(unit).image
    assert image is not None
    stage, (_, batch, conditions) = answering.inputs_of(unit, index)
    places = batch.positions if batch.target_rows is None else batch.positions[batch.target_rows]
    if batch.path is None:
        patches = stage(None, batch, conditions).predicted
    else:
        patches = _follow(stage, batch, conditions, num_steps=num_steps, guidance_scale=guidance_scale, seed=seed)
    starts = (places == 0).all(1).nonzero()[:, 0].tolist()  # every item begins with its first patch
    first = slice(0, starts[1] if len(starts) > 1 else None)
    made = image_of(patches[first], places[first], image)
    return made if image.num_mel_bins is None else sound_of(np.asarray(made))


def _follow(stage: UnitStage, batch: PackedInput, given: Tensor, *, num_steps: int, guidance_scale: float, seed: int) -> Tensor:
    """Return the patches at time 0 of the path that starts from noise at time 1: [num_patches, patch_channels]."""
    path, flow = batch.path, stage.unit.flow
    assert path is not None and path.noise is not None and flow is not None
    if (made := batch.items_made) is not None:
        batch = replace(batch, items_made=made._replace(are_pixels=False))  # what is followed are latents already
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(path.noise.shape, generator=generator, dtype=torch.float64).to(batch.positions.device)

    def predict(time: float, is_told: float) -> Tensor:
        times = torch.full_like(path.times, time)
        point = patches / mix_weights(flow, times.double())[0, :2].sum()  # it is both ends of what the generator mixes
        at = NoisePath(times, torch.full_like(path.is_told, is_told), path.items, point)
        predicted: Tensor = stage(None, replace(batch, patches=point, path=at), given).predicted
        return predicted.double()

    def guided(time: float) -> Tensor:
        told = predict(time, 1.0)
        if guidance_scale != 1:
            untold = predict(time, 0.0)
            told = untold + guidance_scale * (told - untold)
        return told

    if flow.prediction == "velocity":
        for now, then in pairwise(_euler_times(stage.unit, num_steps)):
            patches = patches + (then - now) * guided(now)
        return patches
    scheduler = ddim_scheduler(flow)
    scheduler.set_timesteps(num_steps)
    for step in scheduler.timesteps:
        patches = scheduler.step(guided(float(step) / NUM_TIMES), step, patches).prev_sample
    return patches


def _euler_times(unit: Unit, num_steps: int) -> list[float]:
    """Return times from 1 to 0: evenly spaced, or for a module in a pipeline of diffusers its scheduler's (SD3's shift)."""
    source = unit.module.directory if unit.module is not None else unit.weights
    folder = Path(source).parent / "scheduler" if source is not None else None
    if folder is None or not folder.is_dir():
        return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64).tolist()
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder, trust_remote_code=False)
    scheduler.set_timesteps(num_steps)
    times: list[float] = scheduler.sigmas.tolist()
    return times


def ddim_scheduler(flow: Flow) -> Any:
    """Return diffusers' DDIM for a generator that learns DDPM's noise or v; raises ConfigError without diffusers."""
    require_package("diffusers", extra="diffusion", needed_by="DDIM", error=ConfigError)
    from diffusers import DDIMScheduler

    betas = {"beta_start": flow.beta_start, "beta_end": flow.beta_end, "beta_schedule": flow.beta_schedule}
    kind = "epsilon" if flow.prediction == "epsilon" else "v_prediction"
    return DDIMScheduler(**betas, prediction_type=kind, clip_sample=False, set_alpha_to_one=False, steps_offset=1)


def image_of(patches: Tensor, places: Tensor, image: ImageInput) -> Image.Image:
    """Return patches, [num_patches, num_patch_values] of pixels or latents, as an image; places: (row, column) of each."""
    grid = int(places[:, 0].amax()) + 1, int(places[:, 1].amax()) + 1
    joined = join_patches(patches.double(), places, grid, channels=image.num_made_channels)
    pixels = (joined if image.latents is None else decode_latents(joined.to(patches.dtype), image.latents)).double().cpu()
    whole = pixels.permute(1, 2, 0).numpy()
    values = np.clip(255 * (whole * np.array(image.std) + np.array(image.mean)), 0, 255).round().astype(np.uint8)
    return Image.fromarray(values[:, :, 0] if image.in_channels == 1 else values)


_PHASE_STEPS = 32


def sound_of(pixels: npt.NDArray[np.uint8]) -> Sound:
    """Return the sound of a spectrogram, [num_mel_bins, num_frames] bytes as `sound_to_pixels` makes them.

    Energies of frequencies are the least squares fit to those of the bands; phases are found by Griffin and Lim's iteration.
    """
    values = torch.from_numpy(pixels.T / 255 * (LOUDEST - SILENCE) + SILENCE)
    filters = torch.from_numpy(mel_filters(len(pixels))).double()
    sizes = (10 ** (4 * values - 4) @ torch.linalg.pinv(filters)).clamp(min=0).sqrt().T
    form: dict[str, Any] = {"n_fft": WINDOW, "hop_length": HOP, "window": torch.hann_window(WINDOW, dtype=torch.float64)}
    turns = torch.rand(sizes.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spectrum = torch.polar(sizes, 2 * math.pi * turns)
    for _ in range(_PHASE_STEPS):
        heard = torch.stft(torch.istft(spectrum, **form), **form, return_complex=True)
        spectrum = torch.polar(sizes, heard.angle())
    return Sound(torch.istft(spectrum, **form).clamp(-1, 1).float().numpy())
