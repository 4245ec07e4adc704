"""Folders of diffusers' `AutoencoderKL`: whether one is what a model file says of it, and a digest to tell it from others."""

import hashlib
import importlib.util
import json
from pathlib import Path

from multimodal.values.errors import ModelError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.units.items import ImageInput, Latents

_CONFIG = "config.json"


def check_autoencoders(graph: ModelGraph) -> None:
    """Raise ModelError if generators of latents have no autoencoder that makes such latents, or diffusers is missing."""
    for unit in graph.generators:
        if unit.image is not None and unit.image.latents is not None:
            _check(unit, unit.image.latents)


def _check(unit: Unit, latents: Latents) -> None:
    where = f"unit '{unit.name}', latents"
    if importlib.util.find_spec("diffusers") is None:
        raise ModelError(f"{where}: needs the package 'diffusers'; install it with: pip install 'braid[diffusion]'")
    folder = Path(latents.directory)
    if not (folder / _CONFIG).is_file() or not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{where}, directory: {folder} has no {_CONFIG} and *.safetensors; give the folder `vae` of a model of diffusers"
        )
    config = read_mapping(folder / _CONFIG, error=ModelError)
    if config.get("_class_name") != "AutoencoderKL" or config.get("latents_mean") is not None:
        kind = "AutoencoderKL without latents_mean"
        raise ModelError(f"{where}, directory: {folder} holds a {config.get('_class_name')}, expected an {kind}; give another")
    found = {
        "channels": config.get("latent_channels"),
        "factor": 2 ** (len(config.get("block_out_channels", ())) - 1),
        "in_channels": config.get("in_channels"),
    }
    assert unit.image is not None
    for key, said in (("channels", latents.channels), ("factor", latents.factor), ("in_channels", unit.image.in_channels)):
        if found[key] != said:
            raise ModelError(f"{where}: {key} is {said}, but the autoencoder in {folder} has {found[key]}; set it to that")


def autoencoder_digest(image: ImageInput) -> str:
    """Return a digest of the weights and the scale of a generator's autoencoder; O(bytes of its files)."""
    assert image.latents is not None
    folder, found = Path(image.latents.directory), hashlib.blake2b(digest_size=16)
    config = json.loads((folder / _CONFIG).read_text())
    found.update(repr([config.get(key) for key in ("scaling_factor", "shift_factor")]).encode())
    for path in sorted(folder.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()
