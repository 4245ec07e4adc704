"""Weights and optimizer state of megatron-core's own models: checkpoints of its dist_checkpointing, of any parallelism.

Of GPTModel, dense or with experts, of LLaVAModel, and of MimoModel with such a language model and CLIPViTModels. Layers are of
the same classes here, so that names differ, but no value does. Every rank reads and writes the pieces that it holds.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.mimo.submodules.base import ModalitySubmodules

from megatron.runtime.checkpoint.checkpoint import LoadedCheckpoint
from megatron.runtime.checkpoint.distributed_folder import read_folder, write_folder
from megatron.runtime.checkpoint.storage import MAKE_ROOM, failing_together, on_all_ranks, on_first_rank, on_this_rank
from megatron.runtime.session import Session
from megatron.runtime.state import held_tensors
from megatron.runtime.state.held_tensors import HeldTensor, Piece, model_tensors, optimizer_tensors
from multimodal.model.adapter import Adapter, is_adapter
from multimodal.values.errors import CheckpointError
from multimodal.values.model_graph import ModelGraph, Role, Unit

EMBEDDINGS = "embedding.word_embeddings.weight"
_TRACKER = "latest_checkpointed_iteration.txt"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_NOT_WEIGHTS = re.compile(r"(.*\.)?optimizer\.|(opt_param_scheduler|rng_state|rerun_state)|.*_extra_state|.*rotary_pos_emb\.")
_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "main", "param": "main"}
"""Megatron's kinds of state -> those here."""
_STATE = re.compile(rf"(?:.*\.)?optimizer\.state\.({'|'.join(_KINDS)})\.(.+)")
"""Names of the optimizer's state: of what, and of which weight."""
_RATES = {"lr": "max_lr", "min_lr": "min_lr", "weight_decay": "end_wd"}
"""Values of an optimizer's configuration -> those of a scheduler's state."""
_ENDS = {"word_embeddings": "embedding.word_embeddings", "norm": "decoder.final_layernorm", "output_layer": "output_layer"}
"""Modules of the LLM's first and last layer -> Megatron's."""
_FIRST = {"weight": "conv1.weight", "bias": "conv1.bias", "class_token": "class_token", "positions": "position_embeddings.weight"}
"""Parameters of an encoder's first layer -> Megatron's."""
_IMAGES = ("vision_model.", "vision_projection.encoder.")
"""Prefixes of an encoder and of its projector in LLaVAModel."""


_STACKS_IN_MIMO = hasattr(ModalitySubmodules, "sharded_state_dict")
"""True where MimoModel's encoders have one tensor for all layers, as in newer versions of megatron-core."""


class Place(NamedTuple):
    """A parameter's place in a checkpoint: in one of its tensors, whose first dimensions may be layers, or layers and experts."""

    key: str
    part: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    """The numbers of layers and experts that the tensor has."""


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


def load_megatron(folder: Path, *, session: Session, load_optimizer: bool = False) -> LoadedCheckpoint:
    """Fill all parameters, and on wish the optimizer's state, from a checkpoint of Megatron; collective.

    A release has no optimizer's state and starts at step 0. Missing biases of projectors and rows of the vocabulary are zero,
    rows beyond it are left out; raises CheckpointError on every rank for any other difference.
    """
    what, graph = f"loading {folder}", session.graph
    with failing_together(what=what):
        path = find_folder(folder)
        shapes = read_shapes(path)
        prefixes = _find_prefixes(shapes, graph, folder=folder)
        common = dist_checkpointing.load_common_state_dict(str(path))
        step = int(common.get("iteration", 0)) if path.name != "release" else 0
        states = {} if path.name == "release" or not load_optimizer else _find_states(path, session, shapes)
    tensors = [tensor for tensor in model_tensors(session.state) if not is_adapter(tensor.key)]
    chosen = _choose_places(tensors, shapes, prefixes, graph=graph, folder=folder)

    def fill(held: Iterable[HeldTensor]) -> None:
        wanted = []
        for tensor in held:
            kind, _, rest = tensor.key.partition(".")
            place = chosen[f"model.{rest}"]
            for piece in tensor.pieces:
                piece.values.detach().zero_()
            if place is not None:
                key = place.key if kind == "model" else states[kind, place.key]
                wanted.append(_placed(tensor, place._replace(key=key), tuple(shapes[place.key].global_shape), folder=folder))
        with torch.no_grad():
            read_folder(path, wanted)

    def fill_states(held: Sequence[HeldTensor]) -> None:
        count = _find_value(common, "step", "common_step")
        for tensor in held:
            if tensor.key.startswith("step."):
                tensor.pieces[0].values.fill_(float(step if count is None else count))
        fill(tensor for tensor in held if not tensor.key.startswith("step."))

    on_this_rank(lambda: fill(tensors), what=what)
    session.reload_optimizers()
    fresh_units: list[set[str]] = []
    if states:
        named = {key.removeprefix("model."): place.key for key, place in chosen.items() if place is not None}
        saved = {f"{kind}.{rest}" for rest, name in named.items() for kind in _KINDS.values() if (kind, name) in states}
        saved |= {f"step.{key.partition('.')[2]}" for key in saved}
        fresh_units = on_all_ranks(lambda: held_tensors.fill_optimizers(session.state, saved=saved, fill=fill_states), what=what)
    rates = {key: _find_value(common.get("optimizer"), key) for key in ("max_lr", "min_lr")} if states else {}
    return LoadedCheckpoint(step, {"rates": rates}, {}, path, tuple(sorted(set().union(*fresh_units))))


def _choose_places(
    tensors: Iterable[HeldTensor], shapes: Mapping[str, ShardedTensor], prefixes: Prefixes, *, graph: ModelGraph, folder: Path
) -> dict[str, Place | None]:
    """Return the place of each parameter, None for biases that are zero; collective. Raises CheckpointError on every rank."""
    chosen: dict[str, Place | None] = {}
    known = {f"{prefixes.language}output_layer.weight"} if graph.backbone.ties_embeddings else set[str]()
    with failing_together(what=f"loading {folder}"):
        for tensor in tensors:
            places = list(find_places(tensor.key, graph, prefixes))
            known |= {place.key for place in places}
            place = chosen[tensor.key] = next((place for place in places if place.key in shapes), None)
            unit = graph.unit(tensor.key.split(".")[1])
            product = f"model.{unit.name}.layers.{len(unit.layers) - 1}.mlp."
            is_bias = unit.role is Role.ENCODER and tensor.key.startswith(product) and tensor.key.endswith("bias")
            if place is None and not is_bias:
                names = " or ".join(place.key for place in places) or "nothing that Megatron's models have"
                raise CheckpointError(f"{folder}: {tensor.key} would be {names}, which is not there; correct the model file")
    known = set().union(*on_all_ranks(lambda: known, what=f"loading {folder}"))
    if unused := sorted(shapes.keys() - known):
        raise CheckpointError(
            f"{folder}: nothing of this model is made of {unused[0]} (and {len(unused) - 1} others); correct the model file"
        )
    return chosen


def has_state(folder: Path) -> bool:
    """Return True if a checkpoint has an optimizer's state that a run could go on with; raises CheckpointError."""
    path = find_folder(folder)
    return path.name != "release" and any(map(_STATE.fullmatch, dist_checkpointing.load_tensors_metadata(str(path))))


def _find_states(path: Path, session: Session, shapes: Mapping[str, ShardedTensor]) -> dict[tuple[str, str], str]:
    """Return (kind, weight there) -> name of the optimizer's state; raises CheckpointError if a run cannot go on with it."""
    names = dist_checkpointing.load_tensors_metadata(str(path))
    found = {(_KINDS[match[1]], match[2]): name for name in names if (match := _STATE.fullmatch(name))}
    weights_alone = "--finetune starts from the weights alone, --no-load-optim goes on with a fresh optimizer"
    if not found:
        by_ranks = any("optimizer.distributed." in name for name in names)
        form = "'s optimizer state is of one grid of ranks; save it there with --dist-ckpt-optim-fully-reshardable"
        raise CheckpointError(f"{path}{form if by_ranks else ' has no optimizer state'}; or {weights_alone}")
    name, own = embeddings_of(shapes, folder=path), session.options.build.params_dtype
    dtype = shapes[name].dtype
    if dtype != own:
        theirs, ours = (str(each).removeprefix("torch.") for each in (dtype, own))
        raise CheckpointError(f"{path}: is in {theirs}, and this run in {ours}; give --dtype {theirs}, or {weights_alone}")
    state = found.get(("main", name)) if session.graph.backbone.ties_embeddings else None
    if state is not None and not _is_of_weight(path, state, name, shapes[name]):
        raise CheckpointError(
            f"{path}: the optimizer's state of {name} does not belong to these weights: megatron-core writes it shifted where "
            f"tied embeddings lie on two pipeline stages, and goes on with that; {weights_alone}"
        )
    return found


def _is_of_weight(path: Path, state: str, name: str, weight: ShardedTensor) -> bool:
    """Return True if a matrix and the weights of full precision that the optimizer has of it agree in the first and last row."""
    shape, rows = tuple(weight.global_shape), (0, weight.global_shape[0] - 1)
    values = {key: [torch.empty(1, shape[1], dtype=weight.dtype) for _ in rows] for key in (state, name)}
    pieces = {key: tuple(Piece((row, 0), each) for row, each in zip(rows, found, strict=True)) for key, found in values.items()}
    read_folder(path, [HeldTensor(key, shape, weight.dtype, each, False) for key, each in pieces.items()])
    return all(map(torch.equal, values[state], values[name]))


def _find_value(common: Any, *names: str) -> Any:
    """Return a value of one of the optimizer's parameter groups, or beside its state; None if there is none."""
    nested = list(common.items() if isinstance(common, dict) else enumerate(common) if isinstance(common, list | tuple) else ())
    found = (each for key, each in nested if key in names)
    inside = (_find_value(each, *names) for _, each in nested)
    return next((each for each in chain(found, inside) if each is not None), None)


def check_megatron_target(folder: Path, *, graph: ModelGraph) -> None:
    """Raise CheckpointError for errors that would only show after training: no place, or no such model."""
    if graph.generators or any(unit.image is None for unit in graph.encoders):
        raise CheckpointError("Megatron's models have encoders of images and no generator; save to --save-hf instead")
    if folder.exists() and any(folder.iterdir()) and not (folder / _TRACKER).is_file():
        raise CheckpointError(f"{folder}: is not empty, and holds no run of Megatron; give a new folder")


def save_megatron(
    folder: Path,
    *,
    session: Session,
    step: int,
    adapters: Mapping[str, Adapter],
    scheduler: Mapping[str, Any] | None = None,
    global_batch_size: int = 1,
) -> None:
    """Write all parameters, and the optimizer's state if it has stepped, as a checkpoint of Megatron's; collective.

    Without that state (also with `adapters`, which are added to the weights) it is a release. scheduler: its state, which
    counts steps, where Megatron counts samples, or its rates alone. Raises CheckpointError on every rank if it fails on any.
    """
    graph, what = session.graph, f"saving to {folder}"
    session.complete_parameters()
    on_first_rank(lambda: check_megatron_target(folder, graph=graph), what=what)
    has_adapters = any(unit.lora is not None for unit in graph.units)
    weights = list(held_tensors.merged_tensors(session.state, adapters))
    states = [] if has_adapters else optimizer_tensors(session.state)
    own = {float(each.pieces[0].values) for each in states if each.key.startswith("step.")}
    steps = set().union(*on_all_ranks(lambda: own, what=what))
    stepped = {each.key.partition(".")[2] for each in states if each.key.startswith("exp_avg.")}
    mains = {each.key.partition(".")[2] for each in states if each.key.startswith("main.")}
    held = [*weights, *(each for each in states if not each.key.startswith("step."))] if len(steps) == 1 else weights
    if len(steps) == 1:
        held += [replace(each, key=each.key.replace("model.", "main.", 1)) for each in weights if each.key[6:] in stepped - mains]
    tensors = list(_tensors_there(held, graph, folder=folder))
    name = f"iter_{step:07d}" if len(steps) == 1 else "release"
    partial = folder / f".{name}.partial"
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": step}
    if len(steps) == 1:
        common["optimizer"] = _common_state(session, scheduler or {}, step=steps.pop())
        if scheduler and "num_steps" in scheduler:
            counts = {key: value * global_batch_size for key, value in scheduler.items() if key.endswith("_steps")}
            common["opt_param_scheduler"] = {**scheduler, **counts}

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def complete() -> None:
        torch.save(common, partial / "common.pt")
        form = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (partial / "metadata.json").write_text(json.dumps({**form, "common_backend": "torch", "common_backend_version": 1}))
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(partial, folder / name)
        (folder / f"{_TRACKER}.new").write_text(name if name == "release" else str(step))
        os.replace(folder / f"{_TRACKER}.new", folder / _TRACKER)

    on_first_rank(begin, what=what)
    try:
        write_folder(partial, tensors, what=what)
        on_first_rank(complete, what=what)
    except CheckpointError as problem:
        on_first_rank(lambda: shutil.rmtree(partial, ignore_errors=True), what=what)
        raise CheckpointError(f"{problem}; {MAKE_ROOM}") from None


def check_megatron_weights(folder: Path, *, session: Session) -> None:
    """Raise CheckpointError on every rank, before training, if Megatron's models have nothing like a weight; collective."""
    tensors = held_tensors.merged_tensors(session.state, {})
    on_this_rank(lambda: [*_tensors_there(tensors, session.graph, folder=folder)], what=f"saving to {folder}")


def _tensors_there(held: Iterable[HeldTensor], graph: ModelGraph, *, folder: Path) -> Iterator[HeldTensor]:
    """Yield tensors under the names, and in the shapes, of Megatron's models; raises CheckpointError if these have none."""
    prefixes = _own_prefixes(graph)
    for tensor in held:
        kind, _, rest = tensor.key.partition(".")
        places, inner = list(find_places(f"model.{rest}", graph, prefixes)), _shape_there(tensor, graph)
        if not places or math.prod(inner) != math.prod(tensor.shape):
            raise CheckpointError(f"{tensor.key}: nothing in Megatron's models is like it; save to --save-hf instead")
        unit = graph.unit(rest.split(".")[0])
        is_uniform = len({*unit.layers[1:-1]}) < 2 and (unit is graph.backbone or len(graph.encoders) < 2 or _STACKS_IN_MIMO)
        # under both names of norms, which Transformer Engine's and local layers may call differently
        for place in places[::2] if is_uniform or len(places) == 1 else places[1::2]:
            key = place.key if kind == "model" else f"optimizer.state.{'param' if kind == 'main' else kind}.{place.key}"
            yield _placed(tensor, place._replace(key=key), (*place.sizes, *inner), folder=folder)


def _common_state(session: Session, scheduler: Mapping[str, Any], *, step: float) -> dict[Any, Any]:
    """Return what Megatron's optimizer wants beside its tensors; with expert parallelism it has an optimizer of their own."""
    rates = {name: scheduler[key] for name, key in _RATES.items() if key in scheduler}

    def of(*, is_expert: bool) -> dict[str, Any]:
        groups = session.describe_groups(step=step, is_expert=is_expert, rates=rates)
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}

    if max(unit.expert_parallel_size for unit in session.plan.units.values()) > 1:
        return {0: of(is_expert=False), 1: of(is_expert=True)}
    return of(is_expert=False)


def _placed(tensor: HeldTensor, place: Place, shape: tuple[int, ...], *, folder: Path) -> HeldTensor:
    """Return a tensor as a part of one of Megatron's, of this shape; the pieces are views. Raises CheckpointError."""
    stack, inner = shape[: len(place.part)], shape[len(place.part) :]
    if any(index >= size for index, size in zip(place.part, stack, strict=True)):
        raise CheckpointError(f"{folder}: {place.key} has {stack[0]} layers, but there is {tensor.key}; correct the model file")
    if place.key.endswith((EMBEDDINGS, "output_layer.weight")) and inner[1:] == tensor.shape[1:]:
        tensor = held_tensors.rows_of_tensor(tensor, range(min(tensor.shape[0], inner[0])), key=tensor.key)
    elif math.prod(inner) != math.prod(tensor.shape):
        found = f"{place.key} has shape {list(inner)}, but {tensor.key} has {list(tensor.shape)}"
        raise CheckpointError(f"{folder}: {found}; correct the model file")
    reshaped = tensor.pieces if inner[1:] == tensor.shape[1:] else _in_shape(tensor, inner)
    pieces = tuple(Piece((*place.part, *piece.offsets), piece.values[(None,) * len(stack)]) for piece in reshaped)
    return HeldTensor(place.key, shape, tensor.dtype, pieces, tensor.is_copy)


def _in_shape(tensor: HeldTensor, shape: tuple[int, ...]) -> Iterator[Piece]:
    """Yield the pieces of a tensor with as many elements in other dimensions; each piece is a range of its elements."""
    for piece in tensor.pieces:
        first, rest = 0, list(piece.values.shape)
        for offset, size in zip(piece.offsets, tensor.shape, strict=True):
            first = first * size + offset
        assert rest[1:] == list(tensor.shape[1:]) or rest[0] == 1, "pieces of whole tensors are whole rows or a part of one"
        flat, position = piece.values.reshape(-1), 0
        for box in held_tensors.boxes_of_flat_range(shape, range(first, first + len(flat))):
            yield Piece(box.offsets, flat[position : position + box.num_elements].view(box.sizes))
            position += box.num_elements


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
        settings, layers = unit.transformer.experts, len(unit.layers) - 2
        sizes = (settings.num_experts,) if experts is not None and settings is not None else ()
        inside = f"mlp.experts.experts.{experts[2]}" if experts is not None else parameter
        for each in _names_in_layer(inside, has_experts=unit.transformer.experts is not None):
            yield Place(f"{own}decoder.layers.{each}", (layer - 1, *expert), (layers, *sizes))
            yield Place(f"{own}decoder.layers.{layer - 1}.{each}", expert, sizes)
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
    """Return a parameter's names in a layer of Megatron: those of fused norms, which local layers may have, too, and plain."""
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


def _own_prefixes(graph: ModelGraph) -> Prefixes:
    """Return those of GPTModel, of LLaVAModel or, with several encoders, of MimoModel with the names of the units."""
    if len(graph.encoders) < 2:
        return Prefixes("language_model." if graph.encoders else "", {unit.name: _IMAGES for unit in graph.encoders})
    each = {unit.name: f"modality_submodules.{unit.name}." for unit in graph.encoders}
    parts = {name: (f"{own}encoders.{name}.", f"{own}input_projections.0.encoder.") for name, own in each.items()}
    return Prefixes("language_model.", parts)


def _shape_there(tensor: HeldTensor, graph: ModelGraph) -> tuple[int, ...]:
    unit = graph.unit(tensor.key.split(".")[1])
    if unit.image is not None and tensor.key.endswith(".layers.0.weight"):
        return (tensor.shape[0], unit.image.in_channels, unit.image.patch_size, unit.image.patch_size)
    return (1, 1, *tensor.shape) if tensor.key.endswith(".layers.0.class_token") else tensor.shape
