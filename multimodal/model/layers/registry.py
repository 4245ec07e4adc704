"""All kinds of layers that can be built and trained, by name."""

from multimodal.model.layers.backbone_ends import HeadKind, LanguageHead, TokenEmbedding, TokenEmbeddingKind
from multimodal.model.layers.diffusion_transformer import DiffusionEmbedding, DiffusionHead
from multimodal.model.layers.encoder_embeddings import (
    AudioEmbedding,
    AudioEmbeddingKind,
    JoinedTokens,
    JoinedTokensKind,
    LearnedPatchEmbedding,
    PatchEmbedding,
    PatchEmbeddingKind,
    StretchedPatchEmbedding,
)
from multimodal.model.layers.generator_ends import (
    DenoiserKind,
    GeneratorHead,
    GeneratorHeadKind,
    GeneratorProjector,
    GeneratorProjectorKind,
)
from multimodal.model.layers.layer_kind import LayerKind
from multimodal.model.layers.opaque import OpaqueKind
from multimodal.model.layers.projectors import (
    LinearProjector,
    Projector,
    ProjectorKind,
    QueryProjector,
    QueryProjectorKind,
    UnprojectedTokens,
)
from multimodal.model.layers.transformer import TransformerKind
from multimodal.model.layers.transformer_kinds import (
    ModulatedTransformerKind,
    MoeTransformerKind,
    SlidingMoeTransformerKind,
    SlidingTransformerKind,
    WindowedTransformerKind,
)
from multimodal.model.parameter_sharding import ParameterSharding
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import Unit

LAYER_KINDS: dict[str, LayerKind] = {
    "patch_embedding": PatchEmbeddingKind(PatchEmbedding),
    "learned_patch_embedding": PatchEmbeddingKind(LearnedPatchEmbedding, first_place=(0, 0)),
    "stretched_patch_embedding": PatchEmbeddingKind(StretchedPatchEmbedding, first_place=(0, 0, 16, 16)),
    "audio_embedding": AudioEmbeddingKind(AudioEmbedding),
    "token_embedding": TokenEmbeddingKind(TokenEmbedding),
    "transformer": TransformerKind(),
    "windowed_transformer": WindowedTransformerKind(),
    "sliding_transformer": SlidingTransformerKind(),
    "moe_transformer": MoeTransformerKind(),
    "sliding_moe_transformer": SlidingMoeTransformerKind(),
    "modulated_transformer": ModulatedTransformerKind(),
    "opaque": OpaqueKind(),
    "denoiser": DenoiserKind(),
    "projector": ProjectorKind(Projector),
    "linear_projector": ProjectorKind(LinearProjector),
    "joined_tokens": JoinedTokensKind(JoinedTokens),
    "merged_tokens": ProjectorKind(UnprojectedTokens),
    "query_projector": QueryProjectorKind(QueryProjector),
    "head": HeadKind(LanguageHead),
    "generator_projector": GeneratorProjectorKind(GeneratorProjector),
    "generator_head": GeneratorHeadKind(GeneratorHead),
    "diffusion_embedding": GeneratorProjectorKind(DiffusionEmbedding),
    "diffusion_head": GeneratorHeadKind(DiffusionHead),
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
