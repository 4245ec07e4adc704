"""All kinds of layers that can be built and trained, by name."""

from multimodal.model.layers import encoder_embeddings as embeddings
from multimodal.model.layers import generator_ends, projectors, transformer_kinds
from multimodal.model.layers.backbone_ends import HeadKind, LanguageHead, TokenEmbedding, TokenEmbeddingKind
from multimodal.model.layers.diffusion_transformer import DiffusionEmbedding, DiffusionHead
from multimodal.model.layers.layer_kind import LayerKind
from multimodal.model.layers.opaque import OpaqueKind
from multimodal.model.layers.transformer import TransformerKind
from multimodal.model.parameter_sharding import ParameterSharding
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit

LAYER_KINDS: dict[str, LayerKind] = {
    "patch_embedding": embeddings.PatchEmbeddingKind(embeddings.PatchEmbedding),
    "learned_patch_embedding": embeddings.PatchEmbeddingKind(embeddings.LearnedPatchEmbedding, first_place=(0, 0)),
    "stretched_patch_embedding": embeddings.PatchEmbeddingKind(embeddings.StretchedPatchEmbedding, first_place=(0, 0, 16, 16)),
    "audio_embedding": embeddings.AudioEmbeddingKind(embeddings.AudioEmbedding),
    "token_embedding": TokenEmbeddingKind(TokenEmbedding),
    "transformer": TransformerKind(),
    "windowed_transformer": transformer_kinds.WindowedTransformerKind(),
    "sliding_transformer": transformer_kinds.SlidingTransformerKind(),
    "moe_transformer": transformer_kinds.MoeTransformerKind(),
    "sliding_moe_transformer": transformer_kinds.SlidingMoeTransformerKind(),
    "modulated_transformer": transformer_kinds.ModulatedTransformerKind(),
    "opaque": OpaqueKind(),
    "denoiser": generator_ends.DenoiserKind(),
    "projector": projectors.ProjectorKind(projectors.Projector),
    "linear_projector": projectors.ProjectorKind(projectors.LinearProjector),
    "joined_tokens": embeddings.JoinedTokensKind(embeddings.JoinedTokens),
    "merged_tokens": projectors.ProjectorKind(projectors.UnprojectedTokens),
    "query_projector": projectors.QueryProjectorKind(projectors.QueryProjector),
    "head": HeadKind(LanguageHead),
    "generator_projector": generator_ends.GeneratorProjectorKind(generator_ends.GeneratorProjector),
    "generator_head": generator_ends.GeneratorHeadKind(generator_ends.GeneratorHead),
    "diffusion_embedding": generator_ends.GeneratorProjectorKind(DiffusionEmbedding),
    "diffusion_head": generator_ends.GeneratorHeadKind(DiffusionHead),
}
"""The costs of each kind are under the same name in multimodal/cost/layers."""


def kind_of(unit: Unit, index: int) -> LayerKind:
    """Return the kind of a unit's layer at `index`; raises ModelError if it cannot be built."""
    name = unit.layers[index]
    if name not in LAYER_KINDS:
        raise ModelError(
            f"unit '{unit.name}', layers[{index}]: '{name}' can be planned and simulated, but not trained; "
            f"kinds of layer that can be are {', '.join(LAYER_KINDS)}",
            place=("units", unit.name, "layers", index),
        )
    return LAYER_KINDS[name]


def sharding_of(unit: Unit, name: str) -> ParameterSharding:
    """Return the sharding of a parameter of a UnitStage of `unit`, by its name there (`layers.<layer index>. ...`)."""
    _, index, rest = name.split(".", 2)
    return kind_of(unit, int(index)).sharding(unit, rest)
