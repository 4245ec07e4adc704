"""Weights of megatron-core's own models: checkpoints of its dist_checkpointing (torch_dist), of any parallelism.

Of GPTModel, dense or with experts, of LLaVAModel, and of MimoModel with such a language model and a CLIPViTModel. Layers are of
the same classes here, so that names differ, but no value does. One process reads and writes the whole model.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple
from unittest.mock import patch

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor

from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, model_tensors
from multimodal.model.adapter import is_adapter
from multimodal.values.errors import CheckpointError
from multimodal.values.model_graph import ModelGraph, Role, Unit

EMBEDDINGS = "embedding.word_embeddings.weight"
_TRACKER = "latest_checkpointed_iteration.txt"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_NOT_WEIGHTS = re.compile(r"(optimizer|opt_param_scheduler|rng_state|rerun_state)|.*_extra_state|.*rotary_pos_emb\.")
_ENDS = {"word_embeddings": "embedding.word_embeddings", "norm": "decoder.final_layernorm", "output_layer": "output_layer"}
"""Modules of the LLM's first and last layer -> Megatron's."""
_FIRST = {"weight": "conv1.weight", "bias": "conv1.bias", "class_token": "class_token", "positions": "position_embeddings.weight"}
"""Parameters of an encoder's first layer -> Megatron's."""
_IMAGES = ("vision_model.", "vision_projection.encoder.")
"""Prefixes of an encoder and of its projector in LLaVAModel."""


class Place(NamedTuple):
    """A parameter's place in a checkpoint: in one of its tensors, whose first dimensions may be layers, or layers and experts."""

    key: str
    part: tuple[int, ...] = ()


class Prefixes(NamedTuple):
    """The beginnings of the names of a checkpoint's parts."""

    language: str
    encoders: Mapping[str, tuple[str, str]]
    """Encoder -> prefixes of itself and of its projector."""


def find_folder(folder: Path) -> Path:
    """Return the folder of a checkpoint: the given one, or the newest of a run of Megatron; raises CheckpointError."""
    if (folder / _TRACKER).is_file():
        newest = (folder / _TRACKER).read_text().strip()
        folder /= newest if newest == "release" else f"iter_{int(newest):07d}"
    if (folder / "metadata.json").is_file():
        return folder
    is_old = any(folder.glob("mp_rank_*"))
    found = "is of the form 'torch'" if is_old else "holds no checkpoint of Megatron's dist_checkpointing (no metadata.json)"
    raise CheckpointError(
        f"{folder}: {found}; save it there as torch_dist (Megatron-LM: --ckpt-format torch_dist, or for an old checkpoint "
        "--ckpt-convert-format torch_dist --ckpt-convert-save DIR)"
    )


def read_shapes(folder: Path) -> dict[str, ShardedTensor]:
    """Return the descriptions of a checkpoint's weights, by their names."""
    found = dist_checkpointing.load_tensors_metadata(str(find_folder(folder)))
    return {key: tensor for key, tensor in found.items() if not _NOT_WEIGHTS.match(key)}


def embeddings_of(keys: Iterable[str], *, folder: Path) -> str:
    """Return the name of the word embeddings; raises CheckpointError if there are none."""
    found = next((key for key in keys if key.endswith(EMBEDDINGS)), None)
    if found is None:
        raise CheckpointError(f"{folder}: there is no {EMBEDDINGS}, so this is no GPTModel, LLaVAModel or MimoModel")
    return found


def load_megatron(folder: Path, *, session: Session) -> None:
    """Fill all parameters of this process, which has the whole model, from a checkpoint of Megatron.

    Biases of a projector that has none there are zero; rows of the vocabulary that are missing, too, and rows beyond it are left
    out. Raises CheckpointError if anything else is missing, left over, or of another shape.
    """
    shapes, graph = read_shapes(folder), session.graph
    prefixes = _find_prefixes(shapes, graph, folder=folder)
    by_key: dict[str, list[tuple[HeldTensor, Place]]] = {}
    known = {f"{prefixes.language}output_layer.weight"} if graph.backbone.ties_embeddings else set()
    for tensor in _weights(session):
        places = list(find_places(tensor.key, graph, prefixes))
        known |= {place.key for place in places}
        place = next((place for place in places if place.key in shapes), None)
        if place is None and _is_projector_bias(tensor.key, graph):
            _fill(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype))
            continue
        if place is None:
            names = " or ".join(place.key for place in places) or "nothing that Megatron's models have"
            raise CheckpointError(f"{folder}: {tensor.key} would be {names}, which is not there; correct the model file")
        by_key.setdefault(place.key, []).append((tensor, place))
    if unused := sorted(shapes.keys() - known):
        raise CheckpointError(
            f"{folder}: nothing of this model is made of {unused[0]} (and {len(unused) - 1} others); correct the model file"
        )
    for key, tensors in by_key.items():
        values = dist_checkpointing.load({"values": shapes[key]}, str(find_folder(folder)))["values"]
        for tensor, place in tensors:
            if any(index >= size for index, size in zip(place.part, values.shape, strict=False)):
                found = f"{key} has {values.shape[0]} layers, but there is {tensor.key}"
                raise CheckpointError(f"{folder}: {found}; correct the model file")
            whole = values[place.part]
            if key.endswith((EMBEDDINGS, "output_layer.weight")) and whole.shape[1:] == tensor.shape[1:]:
                rows = tensor.shape[0]
                whole = torch.cat([whole[:rows], whole.new_zeros(max(0, rows - len(whole)), *whole.shape[1:])])
            if whole.numel() != math.prod(tensor.shape):
                found = f"{key} has shape {list(whole.shape)}, but {tensor.key} has {list(tensor.shape)}"
                raise CheckpointError(f"{folder}: {found}; correct the model file")
            _fill(tensor, whole.reshape(tensor.shape))
    session.reload_optimizers()


def save_megatron(folder: Path, *, session: Session) -> None:
    """Write all parameters of this process, which has the whole model, as a release of Megatron's; raises CheckpointError."""
    graph = session.graph
    if len(graph.encoders) > 1 or graph.generators:
        raise CheckpointError("Megatron's models have one encoder of images and no generator; save to --save-hf instead")
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is not empty; give a new folder")
    prefixes = Prefixes("language_model." if graph.encoders else "", {unit.name: _IMAGES for unit in graph.encoders})
    parts: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for tensor in _weights(session):
        places = list(find_places(tensor.key, graph, prefixes))
        if not places:
            raise CheckpointError(f"{tensor.key}: nothing in Megatron's models is like it; save to --save-hf instead")
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for piece in tensor.pieces:
            tensor.box.part_of(whole, piece.box).copy_(piece.values)
        whole = whole.reshape(_shape_there(tensor, graph))
        for place in places[::2]:  # under both names of norms, which Transformer Engine's and local layers may call differently
            parts.setdefault(place.key, {})[place.part] = whole
    tensors: dict[str, ShardedTensor] = {}
    for key, found in parts.items():
        values = [found[index] for index in sorted(found)]
        sizes = [1 + max(numbers) for numbers in zip(*found, strict=True)]  # of the axes along which parts are stacked
        stacked = torch.stack(values).reshape(*sizes, *values[0].shape) if sizes else values[0]
        tensors[key] = ShardedTensor.from_rank_offsets(key, stacked)
    (folder / "release").mkdir(parents=True, exist_ok=True)
    with writing_without_psutil():
        dist_checkpointing.save({"model": tensors, "checkpoint_version": 3.0, "iteration": 0}, str(folder / "release"))
    (folder / _TRACKER).write_text("release")


def find_places(key: str, graph: ModelGraph, prefixes: Prefixes) -> Iterator[Place]:
    """Yield the places that a parameter (`model.<unit>.layers.<layer>. ...`) may have, the usual one first."""
    _, name, rest = key.split(".", 2)
    unit = graph.unit(name)
    match = _LAYER.fullmatch(rest)
    if match is None or unit.role is Role.GENERATOR:
        return
    layer, parameter = int(match[1]), match[2]
    own, projector = prefixes.encoders.get(name, (prefixes.language, ""))
    if 0 < layer < len(unit.layers) - 1:
        experts = _EXPERT.fullmatch(parameter)
        expert = (int(experts[1]),) if experts is not None else ()
        inside = f"mlp.experts.experts.{experts[2]}" if experts is not None else parameter
        for each in _names_in_layer(inside, has_experts=unit.transformer.experts is not None):
            yield Place(f"{own}decoder.layers.{each}", (layer - 1, *expert))
            yield Place(f"{own}decoder.layers.{layer - 1}.{each}", expert)
    elif unit.role is Role.BACKBONE:
        module, _, name = parameter.partition(".")
        if module in _ENDS:
            yield Place(f"{own}{_ENDS[module]}.{name}")
    elif layer == 0:
        if parameter in _FIRST:
            yield Place(own + _FIRST[parameter])
        elif parameter.startswith("norm."):
            yield Place(own + parameter.replace("norm.", "ln_pre.", 1))
    elif parameter.startswith("mlp."):
        yield Place(projector + parameter.removeprefix("mlp."))
    elif parameter.startswith("norm."):
        merged = projector + parameter.replace("norm.", "linear_fc1.layer_norm_", 1)
        yield Place(merged if unit.projector_norm == "merged" else own + parameter.replace("norm.", "ln_post.", 1))


def _names_in_layer(parameter: str, *, has_experts: bool) -> Iterable[str]:
    """Return the names of a parameter in a layer of Megatron: those of Transformer Engine's fused norms, and plain ones.

    Checkpoints of local layers have the former, too.
    """
    if parameter.startswith("input_layernorm."):
        return parameter.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_"), parameter
    if parameter.startswith("pre_mlp_layernorm."):
        fused = parameter.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        return (parameter, fused) if has_experts else (fused, parameter)
    return (parameter.replace("mlp.shared_expert.", "mlp.shared_experts."),)


def _find_prefixes(keys: Collection[str], graph: ModelGraph, *, folder: Path) -> Prefixes:
    language = embeddings_of(keys, folder=folder).removesuffix(EMBEDDINGS)
    own = [key.removesuffix("conv1.weight") for key in keys if key.endswith("conv1.weight")]
    projectors = [key.removesuffix("linear_fc1.weight") for key in keys if key.endswith("encoder.linear_fc1.weight")]
    if len(own) != len(graph.encoders) or len(projectors) != len(own):
        raise CheckpointError(
            f"{folder}: has {len(own)} encoders (conv1.weight) and {len(projectors)} projectors of two products, "
            f"and the model file has {len(graph.encoders)} encoders; correct the model file"
        )

    def of(unit: Unit, found: list[str]) -> str:
        return found[0] if len(found) == 1 else next((each for each in found if f".{unit.name}." in each), "")

    return Prefixes(language, {unit.name: (of(unit, own), of(unit, projectors)) for unit in graph.encoders})


def _weights(session: Session) -> Iterator[HeldTensor]:
    return (tensor for tensor in model_tensors(session.state) if not is_adapter(tensor.key))


def _is_projector_bias(key: str, graph: ModelGraph) -> bool:
    unit = graph.unit(key.split(".")[1])
    product = f"model.{unit.name}.layers.{len(unit.layers) - 1}.mlp."
    return unit.role is Role.ENCODER and key.startswith(product) and key.endswith("bias")


@torch.no_grad()
def _fill(tensor: HeldTensor, values: Tensor) -> None:
    for piece in tensor.pieces:
        piece.values.copy_(tensor.box.part_of(values, piece.box))


def _shape_there(tensor: HeldTensor, graph: ModelGraph) -> tuple[int, ...]:
    """Return the shape that a parameter has in Megatron's models."""
    unit = graph.unit(tensor.key.split(".")[1])
    if unit.image is not None and tensor.key.endswith(".layers.0.weight"):
        return (tensor.shape[0], unit.image.in_channels, unit.image.patch_size, unit.image.patch_size)
    return (1, 1, *tensor.shape) if tensor.key.endswith(".layers.0.class_token") else tensor.shape


@contextmanager
def writing_without_psutil() -> Iterator[None]:
    """Let megatron-core's writers, which log their memory, work where psutil is missing; else they would wait for ever.

    What they hand to their own process goes through a queue of it; for theirs they would start Python anew.
    """
    with ExitStack() as replaced:
        if not getattr(filesystem_async, "HAVE_PSUTIL", True):
            replaced.enter_context(patch.object(filesystem_async, "_process_memory", partial(int, 0)))
        if hasattr(filesystem_async, "_results_queue"):
            replaced.enter_context(patch.object(filesystem_async, "_results_queue", SimpleQueue()))
        yield
