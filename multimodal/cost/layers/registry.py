"""All kinds of layer that a unit may list, by name."""

from dataclasses import replace
from pathlib import Path

from multimodal.cost.layers import backbone_ends, encoder_ends, moe_transformer
from multimodal.cost.layers.adapters import LinearLayers, resolve_adapters
from multimodal.cost.layers.layer import Layer
from multimodal.cost.layers.opaque import DenoiserLayer, OpaqueLayer
from multimodal.cost.layers.query_projector import QueryProjectorLayer
from multimodal.cost.layers.transformer import ModulatedTransformerLayer, TransformerLayer
from multimodal.values.errors import ModelError
from multimodal.values.file_form import read_file
from multimodal.values.model_graph import ModelGraph, Unit
from multimodal.values.units.unit import NEW_ROWS

LAYER_KINDS: dict[str, type[Layer]] = {
    "patch_embedding": encoder_ends.PatchEmbeddingLayer,
    "learned_patch_embedding": encoder_ends.LearnedPatchEmbeddingLayer,
    "stretched_patch_embedding": encoder_ends.StretchedPatchEmbeddingLayer,
    "audio_embedding": encoder_ends.AudioEmbeddingLayer,
    "token_embedding": backbone_ends.TokenEmbeddingLayer,
    "transformer": TransformerLayer,
    "windowed_transformer": moe_transformer.WindowedTransformerLayer,
    "sliding_transformer": moe_transformer.SlidingTransformerLayer,
    "moe_transformer": moe_transformer.MoeTransformerLayer,
    "sliding_moe_transformer": moe_transformer.SlidingMoeTransformerLayer,
    "modulated_transformer": ModulatedTransformerLayer,
    "opaque": OpaqueLayer,
    "denoiser": DenoiserLayer,
    "projector": encoder_ends.ProjectorLayer,
    "linear_projector": encoder_ends.LinearProjectorLayer,
    "joined_tokens": encoder_ends.JoinedTokensLayer,
    "merged_tokens": encoder_ends.MergedTokensLayer,
    "query_projector": QueryProjectorLayer,
    "head": backbone_ends.HeadLayer,
    "generator_projector": backbone_ends.GeneratorProjectorLayer,
    "generator_head": backbone_ends.GeneratorHeadLayer,
    "diffusion_embedding": backbone_ends.DiffusionEmbeddingLayer,
    "diffusion_head": backbone_ends.DiffusionHeadLayer,
}
"""Each kind has a row of the same name in multimodal/model/layers/registry.py, unless it can only be planned."""


def describe_layer(graph: ModelGraph, unit: Unit, kind: str, *, vocab_size: int) -> Layer:
    """Return the costs of a layer of this kind in a unit; vocab_size: padded."""
    adapted = unit.lora.modules(kind) if unit.lora is not None else ()
    return LAYER_KINDS[kind](graph, unit, vocab_size, (*adapted, NEW_ROWS) if unit.new_rows(kind) else adapted)


def linear_layers(graph: ModelGraph) -> LinearLayers:
    """Return the linear layers of all units to which adapters can be added."""
    return {
        unit.name: {
            f"{kind}.{module}": kind not in (unit.layers[0], unit.layers[-1])
            for kind in dict.fromkeys(unit.layers)
            for module in describe_layer(graph, unit, kind, vocab_size=0).linear_layers
        }
        for unit in graph.units
    }


def count_segments(unit: Unit, layers: range) -> int:
    """Return the number of segments of a stage with these layers; unknown kinds count as one."""
    return sum(len(LAYER_KINDS[kind].segments) if kind in LAYER_KINDS else 1 for kind in unit.layers[layers.start : layers.stop])


def read_model(path: str | Path) -> ModelGraph:
    """Read a model file, or a Hugging Face folder's config.json, and check its kinds of layer; a ModelError names the place."""
    if Path(path).is_dir():
        from multimodal.hugging_face.registry import read_graph  # which no run of a model file needs

        return _with_known_kinds(read_graph(path))
    graph = read_file(path, lambda value: _with_known_kinds(ModelGraph.from_dict(value)), error=ModelError)
    return replace(graph, units=tuple(_beside(Path(path), unit) for unit in graph.units))


def _beside(path: Path, unit: Unit) -> Unit:
    """Return a unit whose relative folders have been looked up beside the model file, or else here, for whoever is elsewhere."""

    def found(folder: str) -> str:
        return next((str(each.absolute()) for each in (path.parent / folder, Path(folder)) if each.is_dir()), folder)

    module = replace(unit.module, directory=found(unit.module.directory)) if unit.module is not None else None
    image = unit.image
    if image is not None and image.latents is not None:
        image = replace(image, latents=replace(image.latents, directory=found(image.latents.directory)))
    return replace(unit, module=module, image=image, weights=found(unit.weights) if unit.weights is not None else None)


def _with_known_kinds(graph: ModelGraph) -> ModelGraph:
    for unit in graph.units:
        rows = [(name, kind) for name, kind in LAYER_KINDS.items() if unit.role in kind.roles and kind.fits(unit)]
        for index, layer in enumerate(unit.layers):
            position = "first" if index == 0 else "last" if index == len(unit.layers) - 1 else "between"
            fitting = [name for name, kind in rows if kind.position == position]
            if layer not in fitting:
                raise ModelError(
                    f"unit '{unit.name}', layers[{index}]: '{layer}' is no kind of layer that a {unit.role} has "
                    f"{'between the two ends' if position == 'between' else position}; use one of {', '.join(fitting)}",
                    place=("units", unit.name, "layers", index),
                )
    return resolve_adapters(graph, linear_layers(graph))
