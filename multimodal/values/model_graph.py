"""What is trained: a graph of units (encoders, one backbone, generators) and the architecture of each."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from multimodal.values.errors import ModelError
from multimodal.values.file_form import read_mapping

_Part = TypeVar("_Part", "Transformer", "ImageInput", "AudioInput")


class Role(StrEnum):
    """What a unit does in the graph."""

    ENCODER = "encoder"
    BACKBONE = "backbone"
    GENERATOR = "generator"


class LayerKind(StrEnum):
    """What one entry of a unit's ordered layer list is."""

    PATCH_EMBEDDING = "patch_embedding"
    TOKEN_EMBEDDING = "token_embedding"
    TRANSFORMER = "transformer"
    PROJECTOR = "projector"
    HEAD = "head"


_EDGE_ROLES = ((Role.ENCODER, Role.BACKBONE), (Role.BACKBONE, Role.GENERATOR))

SEGMENTS: Mapping[LayerKind, tuple[str, ...]] = {
    LayerKind.PATCH_EMBEDDING: ("patch_embedding",),
    LayerKind.TOKEN_EMBEDDING: ("token_embedding",),
    LayerKind.TRANSFORMER: ("norm_qkv", "attention", "projection", "mlp"),
    LayerKind.PROJECTOR: ("projector",),
    LayerKind.HEAD: ("head",),
}
"""The smallest pieces of a layer that can run on their own, in order."""


@dataclass(frozen=True)
class Transformer:
    """The shape of a unit's transformer layers, under Megatron's names."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    num_query_groups: int | None = None
    """Key and value heads (grouped-query attention); None: as many as query heads."""
    kv_channels: int | None = None
    """Channels per head; None: hidden_size / num_attention_heads."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    activation: Literal["swiglu", "gelu"] = "swiglu"
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    layernorm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    init_method_std: float = 0.02

    @property
    def head_channels(self) -> int:
        """Channels of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads


@dataclass(frozen=True)
class ImageInput:
    """How a unit cuts an image into tokens (Qwen2-VL's rule: native resolution, sizes rounded, area bounded)."""

    patch_size: int = 14
    merge_size: int = 2
    """merge_size x merge_size neighbouring patches leave an encoder's projector as one token; sizes are multiples of both."""
    in_channels: int = 3
    min_pixels: int = 3136
    max_pixels: int = 1003520


@dataclass(frozen=True)
class AudioInput:
    """How an encoder turns sound into tokens (Whisper's rule: a spectrogram, two convolutions of width 3, the second halves)."""

    num_mel_bins: int = 128
    tokens_per_second: int = 50
    """Inside the encoder; the spectrogram has twice as many frames."""
    merge_factor: int = 2
    """So many neighbouring tokens leave the projector as one."""


@dataclass(frozen=True)
class Unit:
    """One module of the model graph with its own parallelism."""

    name: str
    role: Role
    transformer: Transformer
    image: ImageInput | None = None
    """The images that an encoder takes, or that a generator makes."""
    audio: AudioInput | None = None
    """Encoders only, in place of an image. Planned and simulated; not trained yet."""
    projector_hidden_size: int | None = None
    """Encoders only; None: hidden_size x merge_factor."""
    untie_embeddings_and_output_weights: bool = True
    """Backbone only."""
    vocab_size: int | None = None
    """Backbone only: the vocabulary to count with where no tokenizer tells; a run takes its tokenizer's."""
    freeze_module: bool = False
    freeze_projector: bool = False
    """Encoders (the last layer) and generators (the first one) only."""

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """The ordered layer list that stages are ranges of."""
        body = (LayerKind.TRANSFORMER,) * self.transformer.num_layers
        if self.role is Role.ENCODER:
            return (LayerKind.PATCH_EMBEDDING, *body, LayerKind.PROJECTOR)
        if self.role is Role.GENERATOR:
            return (LayerKind.PROJECTOR, *body, LayerKind.HEAD)
        return (LayerKind.TOKEN_EMBEDDING, *body, LayerKind.HEAD)

    @property
    def merge_factor(self) -> int:
        """Neighbouring tokens that leave an encoder's projector as one."""
        if self.audio is not None:
            return self.audio.merge_factor
        return self.image.merge_size**2 if self.image is not None else 1

    def is_trainable(self, layer_index: int) -> bool:
        """Whether this layer's parameters are trained."""
        frozen = self.freeze_projector if self.layers[layer_index] is LayerKind.PROJECTOR else self.freeze_module
        return not frozen


@dataclass(frozen=True)
class ModelGraph:
    """Units in a topological order, and the edges along which activations flow."""

    units: tuple[Unit, ...]
    edges: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _check_graph(self)

    def unit(self, name: str) -> Unit:
        """Look a unit up by name; raises ModelError when there is none."""
        for unit in self.units:
            if unit.name == name:
                return unit
        raise ModelError(f"the model has no unit '{name}'; its units are {', '.join(self.unit_names)}")

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Names in topological order."""
        return tuple(unit.name for unit in self.units)

    @property
    def backbone(self) -> Unit:
        """The LLM."""
        return next(unit for unit in self.units if unit.role is Role.BACKBONE)

    @property
    def encoders(self) -> tuple[Unit, ...]:
        """All encoders, in the graph's order."""
        return tuple(unit for unit in self.units if unit.role is Role.ENCODER)

    @property
    def generators(self) -> tuple[Unit, ...]:
        """All generators, in the graph's order."""
        return tuple(unit for unit in self.units if unit.role is Role.GENERATOR)

    def upstream(self, name: str) -> tuple[str, ...]:
        """Units whose outputs this unit consumes."""
        return tuple(source for source, target in self.edges if target == name)

    def downstream(self, name: str) -> tuple[str, ...]:
        """Units that consume this unit's outputs."""
        return tuple(target for source, target in self.edges if source == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain form, read back by `from_dict`."""
        return {"units": {unit.name: _unit_to_dict(unit) for unit in self.units}, "edges": [list(e) for e in self.edges]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "ModelGraph":
        """Build from the plain form; raises ModelError naming the offending key."""
        _reject_unknown(value, {"units", "edges"}, where="model")
        units = value.get("units")
        if not isinstance(units, Mapping) or not units:
            raise ModelError("model: 'units' must map each unit's name to its description")
        built = tuple(_unit_from_dict(str(name), entry) for name, entry in units.items())
        backbone = [unit.name for unit in built if unit.role is Role.BACKBONE]
        default = [(unit.name, target) for unit in built if unit.role is Role.ENCODER for target in backbone]
        default += [(source, unit.name) for unit in built if unit.role is Role.GENERATOR for source in backbone]
        edges = value.get("edges", default)
        if not all(isinstance(edge, (list, tuple)) and len(edge) == 2 for edge in edges):
            raise ModelError(f"model: 'edges' must be a list of [source, target] pairs, found {edges}")
        return cls(built, tuple((str(source), str(target)) for source, target in edges))

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelGraph":
        """Read a YAML or JSON model file."""
        try:
            return cls.from_dict(read_mapping(path, error=ModelError))
        except ModelError as problem:
            raise problem if str(problem).startswith(str(path)) else ModelError(f"{path}: {problem}") from None


def _unit_to_dict(unit: Unit) -> dict[str, Any]:
    entry = asdict(unit)
    del entry["name"]
    transformer = entry.pop("transformer")
    optional = {key: entry.pop(key) for key in ("image", "audio", "vocab_size")}
    given = {key: value for key, value in optional.items() if value is not None}
    return {"role": str(entry.pop("role")), **transformer, **given, **entry}


def _unit_from_dict(name: str, entry: Any) -> Unit:
    where = f"unit '{name}'"
    if not isinstance(entry, Mapping):
        raise ModelError(f"{where}: expected a mapping, found {type(entry).__name__}")
    own = {field.name for field in fields(Unit)} - {"name", "transformer"}
    _reject_unknown(entry, own | {field.name for field in fields(Transformer)}, where=where)
    roles = [str(role) for role in Role]
    if entry.get("role") not in roles:
        raise ModelError(f"{where}: 'role' must be one of {', '.join(roles)}, found {entry.get('role')!r}")
    role = Role(entry["role"])
    has_audio = role is Role.ENCODER and entry.get("audio") is not None
    if has_audio and entry.get("image") is not None:
        raise ModelError(f"{where}: has an image and audio; an encoder takes one kind of item, so make it two units")
    has_image = (role is Role.ENCODER and not has_audio) or (role is Role.GENERATOR and entry.get("image") is not None)
    image = _build(ImageInput, entry.get("image") or {}, f"{where}, image") if has_image else None
    audio = _build(AudioInput, entry["audio"], f"{where}, audio") if has_audio else None
    if role is not Role.BACKBONE and entry.get("vocab_size") is not None:
        raise ModelError(f"{where}: vocab_size belongs to the backbone; remove it here")
    foreign = ("projector_hidden_size", "audio", *(("image", "freeze_projector") if role is Role.BACKBONE else ()))
    misplaced = [key for key in foreign if entry.get(key)]
    if role is not Role.ENCODER and misplaced:
        raise ModelError(f"{where}: {', '.join(misplaced)} belong to encoders; remove them here")
    rest = {key: entry[key] for key in own - {"role", "image", "audio"} if key in entry}
    shape = {field.name: entry[field.name] for field in fields(Transformer) if field.name in entry}
    return Unit(name=name, role=role, transformer=_build(Transformer, shape, where), image=image, audio=audio, **rest)


def _build(kind: type[_Part], entry: Mapping[str, Any], where: str) -> _Part:
    names = [field.name for field in fields(kind)]
    _reject_unknown(entry, set(names), where=where)
    required = [field.name for field in fields(kind) if field.default is MISSING]
    if missing := [name for name in required if name not in entry]:
        raise ModelError(f"{where}: missing {', '.join(missing)}")
    return kind(**{name: entry[name] for name in names if name in entry})


def _reject_unknown(entry: Mapping[str, Any], known: set[str], *, where: str) -> None:
    if unknown := sorted(set(map(str, entry)) - known):
        raise ModelError(f"{where}: unknown key {unknown[0]!r}; known keys are {', '.join(sorted(known))}")


def _check_graph(graph: ModelGraph) -> None:
    names = graph.unit_names
    if len(set(names)) != len(names):
        raise ModelError(f"unit names must differ, found {', '.join(names)}")
    backbones = [unit.name for unit in graph.units if unit.role is Role.BACKBONE]
    if len(backbones) != 1:
        raise ModelError(f"a model needs exactly one unit with role backbone, found {len(backbones)}")
    for source, target in graph.edges:
        if source not in names or target not in names:
            raise ModelError(f"edge {source} -> {target} names a unit that does not exist; units are {', '.join(names)}")
        if (graph.unit(source).role, graph.unit(target).role) not in _EDGE_ROLES:
            raise ModelError(
                f"edge {source} -> {target}: edges lead from an encoder to the backbone, or from the backbone to a generator"
            )
        if names.index(source) >= names.index(target):
            raise ModelError(f"edge {source} -> {target}: list '{source}' before '{target}'")
    for unit in graph.units:
        if unit.role is Role.ENCODER and not graph.downstream(unit.name):
            raise ModelError(f"unit '{unit.name}' feeds nobody; add an edge [{unit.name}, {backbones[0]}]")
        if unit.role is Role.GENERATOR and not graph.upstream(unit.name):
            raise ModelError(f"unit '{unit.name}' is fed by nobody; add an edge [{backbones[0]}, {unit.name}]")
        _check_unit(unit)


def _check_unit(unit: Unit) -> None:
    shape = unit.transformer
    where = f"unit '{unit.name}'"
    sizes: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_query_groups": shape.query_groups,
    }
    if unit.image is not None:
        image = unit.image
        sizes |= {"patch_size": image.patch_size, "merge_size": image.merge_size, "in_channels": image.in_channels}
        sizes |= {"min_pixels": image.min_pixels, "max_pixels": image.max_pixels}
    if unit.audio is not None:
        sizes |= asdict(unit.audio)
    if unit.vocab_size is not None:
        sizes["vocab_size"] = unit.vocab_size
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ModelError(f"{where}: {name} must be a positive integer, found {size!r}")
    if shape.normalization not in ("LayerNorm", "RMSNorm"):
        raise ModelError(f"{where}: normalization must be LayerNorm or RMSNorm, found {shape.normalization!r}")
    if shape.activation not in ("swiglu", "gelu"):
        raise ModelError(f"{where}: activation must be swiglu or gelu, found {shape.activation!r}")
    if shape.kv_channels is None and shape.hidden_size % shape.num_attention_heads:
        raise ModelError(
            f"{where}: hidden_size {shape.hidden_size} is not divisible by num_attention_heads "
            f"{shape.num_attention_heads}; change one of them or set kv_channels"
        )
    if shape.num_attention_heads % shape.query_groups:
        raise ModelError(
            f"{where}: num_attention_heads {shape.num_attention_heads} is not divisible by num_query_groups {shape.query_groups}"
        )
    rotary_axes = 4 if unit.role is Role.ENCODER or unit.image is not None else 2
    if shape.head_channels % rotary_axes:
        raise ModelError(
            f"{where}: channels per head ({shape.head_channels}) must be divisible by {rotary_axes} for rotary positions; "
            "change hidden_size, num_attention_heads or kv_channels"
        )
    if unit.image is not None and unit.image.max_pixels < unit.image.min_pixels:
        raise ModelError(f"{where}: max_pixels {unit.image.max_pixels} is below min_pixels {unit.image.min_pixels}")
