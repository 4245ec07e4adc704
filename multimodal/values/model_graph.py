"""The model: a graph of units (encoders, one backbone, generators) and the architecture of each."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

from multimodal.values.errors import ModelError
from multimodal.values.file_form import read_file
from multimodal.values.typed_reader import Plain, check_fields
from multimodal.values.units.bounds import up_to
from multimodal.values.units.experts import Experts
from multimodal.values.units.items import AudioInput, ImageInput, ItemInput, problem_of_image, problem_of_waveform
from multimodal.values.units.lora import Lora
from multimodal.values.units.opaque import Opaque
from multimodal.values.units.queries import Queries
from multimodal.values.units.transformer import Transformer

__all__ = [
    "AudioInput",
    "Experts",
    "ImageInput",
    "ItemInput",
    "Lora",
    "ModelGraph",
    "Opaque",
    "Queries",
    "Role",
    "Transformer",
    "Unit",
]


class Role(StrEnum):
    """The role of a unit in the graph."""

    ENCODER = "encoder"
    BACKBONE = "backbone"
    GENERATOR = "generator"


_OF_PROJECTORS = (
    *("has_linear_projector", "has_projector", "projector_hidden_size", "projector_norm", "projector_norm_epsilon"),
    *("queries", "join"),
)
_UNIT_NAME = re.compile(r"[^\W\d_][\w-]{0,63}")
_EDGE_ROLES = ((Role.ENCODER, Role.BACKBONE), (Role.BACKBONE, Role.GENERATOR), (Role.ENCODER, Role.ENCODER))

_ENDS = {
    Role.ENCODER: ("patch_embedding", "projector"),
    Role.BACKBONE: ("token_embedding", "head"),
    Role.GENERATOR: ("generator_projector", "generator_head"),
}
"""Kinds of the first and the last layer."""
MOE_TRANSFORMER = "moe_transformer"
"""Kind of the layers that have experts."""


@dataclass(frozen=True)
class Unit:
    """One module of the model graph with its own parallelism."""

    name: str
    role: Role
    transformer: Transformer = field(metadata={"inline": True})
    image: ImageInput | None = None
    """The images that an encoder takes, or that a generator makes."""
    audio: AudioInput | None = None
    """The sound that an encoder takes, in place of images."""
    projector_hidden_size: int | None = field(default=None, metadata=up_to(2**24))
    """Encoders only; None: hidden_size x merge_factor."""
    has_linear_projector: bool = False
    """Encoders only: a projector is one product, instead of two with a GELU between them."""
    projector_norm: Literal["patches", "merged", "none"] = "patches"
    """Encoders only: the norm before the projector's first product: of every patch, or of those that are merged together."""
    projector_norm_epsilon: float | None = field(default=None, metadata={"above": 0, "maximum": 1})
    """Encoders only; None: layernorm_epsilon."""
    join: Literal["features", "sequence"] | None = None
    """Encoders that other encoders feed, in place of images or sound: what these give of an item is laid side by side, channel
    behind channel, or one behind the other, token behind token."""
    has_projector: bool = True
    """Encoders that feed other encoders only. False: their tokens leave normalised and merged, and not projected."""
    queries: Queries | None = None
    """Encoders only: the projector is cross-attention of learned queries; None: it takes tokens one by one, or merged ones."""
    untie_embeddings_and_output_weights: bool = True
    """Backbone only."""
    vocab_size: int | None = field(default=None, metadata=up_to(2**31))
    """Backbone only: the vocabulary size where no tokenizer gives it; a run takes its tokenizer's."""
    has_exact_vocabulary: bool = False
    """Backbone only. True: a run has `vocab_size` tokens, or its tokenizer's if those are more, and rows that pad the vocabulary
    have no logits, as in models of Hugging Face. False: they count in the softmax, as in Megatron."""
    freeze_module: bool = False
    freeze_projector: bool = False
    """Encoders (the last layer) and generators (the first one) only."""
    lora: Lora | None = None
    """Adapters of the module's linear layers, and of the projector's, where they are named. All that is not an adapter is frozen
    in the module then, and in a projector that has some."""
    module: Opaque | None = None
    """Encoders of images of one size, or of sound: a module of transformers in place of all layers but the projector.
    `num_layers` and the rest of the shape say what it costs, as long as it is not measured."""
    weights: str | None = None
    """A folder of Hugging Face that the unit starts from, but for its projector; in a model file relative to that, too."""
    layer_kinds: tuple[str, ...] | None = field(default=None, metadata={"key": "layers"})
    """Kind of every layer, first to last, `num_layers` of them between the two ends; None: transformer layers between the role's
    ends; encoders of images of one size learn positions. The kinds are those of multimodal/cost/layers."""

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The kinds of the unit's layers, in order; stages are ranges of this list."""
        first, last = _ENDS[self.role]
        if self.audio is not None:
            first = "audio_embedding"
        if self.role is Role.ENCODER and self.image is not None and self.image.image_size is not None:
            first = "learned_patch_embedding"
        if self.role is Role.ENCODER and self.image is not None and self.image.position_grid is not None:
            first = "stretched_patch_embedding"
        if self.join is not None:
            first = "joined_tokens"
        if self.has_linear_projector:
            last = "linear_projector"
        if not self.has_projector:
            last = "merged_tokens"
        if self.queries is not None:
            last = "query_projector"
        if self.module is not None:
            return "opaque", last
        body = [MOE_TRANSFORMER if self.transformer.experts is not None else "transformer"] * self.transformer.num_layers
        if self.has_windows:
            full = self.image.full_attention_layers if self.image is not None else ()
            body = ["transformer" if index in full else "windowed_transformer" for index in range(len(body))]
        return self.layer_kinds or (first, *body, last)

    @property
    def item_input(self) -> ItemInput | None:
        """What an encoder takes, or a generator makes; None where that is not described."""
        return self.audio or self.image

    @property
    def inner_layers(self) -> tuple[str, ...]:
        """Kinds of the layers that pipeline stages share out: all but the two ends, or a module of transformers, which is one."""
        return self.layers[1:-1] or self.layers[:1]

    @property
    def num_inner_layers(self) -> int:
        """Number of these."""
        return len(self.inner_layers)

    @property
    def has_windows(self) -> bool:
        """True if tokens of an encoder's items attend inside windows, or chunks."""
        return self.role is Role.ENCODER and self.item_input is not None and self.item_input.tokens_per_window is not None

    @property
    def keeps_items_whole(self) -> bool:
        """True if context parallel ranks do not cut an encoder's items.

        Windows are made where an item is whole, and so are tokens merged beside a class token, or in a clip that leaves some.
        Queries attend to all of an item.
        """
        if self.has_windows or self.queries is not None:
            return True
        merges = self.merge_factor > 1
        return merges and (self.audio is not None or bool(self.image and self.image.class_token))

    @property
    def is_causal(self) -> bool:
        """True if a token attends to those before it only; the items of other units attend to all of themselves."""
        return self.role is Role.BACKBONE

    @property
    def ties_embeddings(self) -> bool:
        """True if the last layer multiplies with the word embeddings of the first."""
        return self.role is Role.BACKBONE and not self.untie_embeddings_and_output_weights

    def num_tokens_known(self, padded: int) -> int:
        """Tokens of the vocabulary that have logits; padded: its rows."""
        exact = self.vocab_size if self.has_exact_vocabulary else None
        return min(exact or padded, padded)

    @property
    def merge_factor(self) -> int:
        """Neighbouring tokens that leave an encoder's projector as one."""
        return self.item_input.merge_factor if self.item_input is not None else 1

    @property
    def merged_size(self) -> int:
        """Width of what an encoder's projector multiplies: tokens side by side, or one."""
        is_averaged = self.audio is not None and self.audio.merge == "averaged"
        return self.transformer.hidden_size * (1 if is_averaged else self.merge_factor)

    def num_output_tokens(self, grid: tuple[int, int]) -> int:
        """Tokens that leave an encoder of an item with this grid."""
        assert self.item_input is not None, f"unit '{self.name}' takes no items"
        return self.num_outputs(self.item_input.num_tokens(grid))

    def num_outputs(self, num_tokens: int) -> int:
        """Tokens that leave an encoder of an item with so many inside."""
        return self.num_merged_tokens(num_tokens) if self.queries is None else self.queries.num_queries

    @property
    def is_described(self) -> bool:
        """True if it says what the unit takes or makes."""
        return self.item_input is not None or self.join is not None

    @property
    def divided_widths(self) -> Mapping[str, int]:
        """What tensor parallel ranks share evenly, by its name."""
        shape = self.transformer
        own = {
            "num_attention_heads": shape.num_attention_heads,
            "num_query_groups": shape.query_groups,
            "ffn_hidden_size": shape.ffn_hidden_size,
            "ffn_hidden_size of experts": shape.expert_hidden_size,
            "shared_expert_intermediate_size": (shape.experts and shape.experts.shared_expert_intermediate_size) or 0,
        }
        if self.queries is None:
            return own
        of_queries = self.queries.shape(shape)
        heads, inner = "num_attention_heads of queries", "ffn_hidden_size of queries"
        return {**own, heads: of_queries.num_attention_heads, inner: of_queries.ffn_hidden_size}

    def num_merged_tokens(self, num_tokens: int) -> int:
        """Tokens of an item behind the merging of neighbours, of so many inside the encoder."""
        is_dropped = self.image is not None and self.image.class_token == "dropped"
        return (num_tokens - is_dropped) // self.merge_factor

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Transformer layers of an encoder, counted from 0, whose output goes to the LLM as well."""
        return self.image.deepstack_layers if self.role is Role.ENCODER and self.image is not None else ()

    def is_trainable(self, layer_index: int) -> bool:
        """True if any of this layer's parameters are trained."""
        return self.trains_weights(layer_index) or bool(self.adapted_modules(layer_index))

    def trains_weights(self, layer_index: int) -> bool:
        """True if this layer's own weights are trained, and not adapters of them."""
        projector = {Role.ENCODER: len(self.layers) - 1, Role.GENERATOR: 0}.get(self.role)
        if self.join is not None and layer_index == 0:
            return False  # there are none
        if layer_index == projector and not self.has_projector:
            return self.projector_norm != "none" and not self.freeze_module and self.lora is None
        if layer_index == projector:
            return not (self.freeze_projector or self.adapted_modules(layer_index))
        return not self.freeze_module and self.lora is None

    def adapted_modules(self, layer_index: int) -> tuple[str, ...]:
        """Return the linear layers of this layer that have adapters."""
        return self.lora.modules(self.layers[layer_index]) if self.lora is not None else ()


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

    def item_units(self, name: str) -> tuple[str, ...]:
        """Return the encoders that the items of an encoder pass through, in the graph's order: all that edges join to it.

        Those that no encoder feeds take the item itself, the last one feeds the LLM.
        """
        found = {name}
        inner = [edge for edge in self.edges if all(self.unit(each).role is Role.ENCODER for each in edge)]
        while more := {each for edge in inner if found.intersection(edge) for each in edge} - found:
            found |= more
        return tuple(each for each in self.unit_names if each in found)

    @property
    def item_encoders(self) -> tuple[Unit, ...]:
        """The encoders that items of data are for: one of those that an item passes through, the first one."""
        return tuple(unit for unit in self.encoders if self.item_units(unit.name)[0] == unit.name)

    def num_carried(self, name: str, layer: int) -> int:
        """Return how many hidden states travel beside those that come out of a unit's layer (deepstack).

        An encoder's are those of its layers that go to the LLM as well; the LLM adds one behind each of its first layers.
        """
        unit = self.unit(name)
        if unit.role is Role.BACKBONE:
            return max(0, max((len(self.unit(each).deepstack_layers) for each in self.upstream(name)), default=0) - layer)
        return sum(each < layer for each in unit.deepstack_layers)

    def width_behind(self, name: str, layer: int) -> int:
        """Return the channels of what comes out of a unit's layer, with all that travels beside it."""
        unit = self.unit(name)
        is_end = unit.role is Role.ENCODER and layer == len(unit.layers) - 1
        if is_end and not unit.has_projector:
            return unit.merged_size
        targets = self.downstream(name) if is_end else ()
        speaks = self.unit(targets[0]) if targets else unit
        return speaks.transformer.hidden_size * (1 + self.num_carried(name, layer))

    def to_dict(self) -> dict[str, Any]:
        """Plain form, read back by `from_dict`."""
        return {"units": {unit.name: _unit_to_dict(unit) for unit in self.units}, "edges": [list(e) for e in self.edges]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "ModelGraph":
        """Build from the plain form; raises ModelError naming the offending key."""
        top = Plain(value, "model", ModelError).mapping(known=("units", "edges"), required=("units",))
        entries = top["units"].mapping(at_least=1, expected="each unit's name with its description")
        units = tuple(_unit_from_plain(name, replace(entry, where=f"unit '{name}'")) for name, entry in entries.items())
        if "edges" not in top:
            return cls(units, _default_edges(units))
        pairs = top["edges"].entries(expected="a list of [source, target] pairs", called="edge")
        return cls(units, tuple(pair.read(tuple[str, str]) for pair in pairs))

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelGraph":
        """Read a YAML or JSON model file; a ModelError names the line."""
        return read_file(path, cls.from_dict, error=ModelError)


_OPTIONAL = ("image", "audio", "vocab_size", "projector_norm_epsilon", "join", "queries", "lora", "weights")
"""Keys of a unit that are left out where they are not set."""


def _unit_to_dict(unit: Unit) -> dict[str, Any]:
    entry = asdict(unit)
    del entry["name"]
    transformer = entry.pop("transformer")
    experts = transformer.pop("experts")
    kinds = entry.pop("layer_kinds")
    optional = {key: entry.pop(key) for key in _OPTIONAL} | {
        "layers": kinds and list(kinds),
        "experts": experts and {key: value for key, value in experts.items() if value is not None},
    }
    if (module := entry.pop("module")) is not None:
        optional["module"] = {
            "class" if key == "class_name" else key: value for key, value in module.items() if value is not None
        }
    given = {key: value for key, value in optional.items() if value is not None}
    return {"role": str(entry.pop("role")), **transformer, **given, **entry}


def _default_edges(units: tuple[Unit, ...]) -> tuple[tuple[str, str], ...]:
    backbones = [unit.name for unit in units if unit.role is Role.BACKBONE]
    edges = [(unit.name, target) for unit in units if unit.role is Role.ENCODER for target in backbones]
    return (*edges, *((source, unit.name) for unit in units if unit.role is Role.GENERATOR for source in backbones))


def _unit_from_plain(name: str, entry: Plain) -> Unit:
    unit = entry.build(Unit, name=name)
    is_encoder = unit.role is Role.ENCODER
    if is_encoder and unit.audio is not None and unit.image is not None:
        entry.fail("has an image and audio; an encoder takes one kind of item, so make it two units")
    if unit.role is not Role.BACKBONE:
        _refuse_values(
            entry, unit, ("vocab_size", "untie_embeddings_and_output_weights", "has_exact_vocabulary"), owner="the backbone"
        )
    if not is_encoder:
        also = ("image", "freeze_projector") if unit.role is Role.BACKBONE else ()
        _refuse_values(
            entry,
            unit,
            (*_OF_PROJECTORS, "audio", *also),
            owner="encoders",
        )
    return replace(unit, image=ImageInput()) if is_encoder and not unit.is_described else unit


def _refuse_values(entry: Plain, unit: Unit, names: tuple[str, ...], *, owner: str) -> None:
    """Raise where a unit has another value than the default in a field of another role."""
    plain = Unit(unit.name, unit.role, unit.transformer)
    for name in names:
        if getattr(unit, name) != getattr(plain, name):
            entry.inner(name, None, where=entry.where).fail(f"{name} belongs to {owner}; remove it here")


def _check_graph(graph: ModelGraph) -> None:
    names = graph.unit_names
    if len(set(names)) != len(names):
        raise ModelError(f"unit names must differ, found {', '.join(names)}")
    backbones = [unit.name for unit in graph.units if unit.role is Role.BACKBONE]
    if len(backbones) != 1:
        raise ModelError(f"a model needs exactly one unit with role backbone, found {len(backbones)}", place=("units",))
    for index in range(len(graph.edges)):
        _check_edge(graph, index)
    for unit in graph.units:
        if unit.role is Role.ENCODER and not graph.downstream(unit.name):
            raise ModelError(f"unit '{unit.name}' feeds nobody; add an edge [{unit.name}, {backbones[0]}]", place=("edges",))
        if unit.role is Role.GENERATOR and not graph.upstream(unit.name):
            raise ModelError(f"unit '{unit.name}' is fed by nobody; add an edge [{backbones[0]}, {unit.name}]", place=("edges",))
        _check_unit(unit)
        if unit.role is Role.ENCODER and (problem := _problem_of_edges(graph, unit)):
            raise ModelError(f"unit '{unit.name}': {problem}", place=("units", unit.name))
        if (most := graph.backbone.transformer.num_layers) < len(unit.deepstack_layers):
            raise ModelError(
                f"unit '{unit.name}': deepstack_layers has {len(unit.deepstack_layers)} layers, and the backbone only {most} to "
                "take them; leave some out",
                place=("units", unit.name, "image"),
            )


def _check_edge(graph: ModelGraph, index: int) -> None:
    names = graph.unit_names
    source, target = graph.edges[index]
    problem = ""
    if source not in names or target not in names:
        problem = f"names a unit that does not exist; units are {', '.join(names)}"
    elif (graph.unit(source).role, graph.unit(target).role) not in _EDGE_ROLES:
        roles = ", ".join(f"{unit.name} ({unit.role})" for unit in graph.units)
        problem = (
            "edges lead from an encoder to the backbone or another encoder, or from the backbone to a generator; change it; "
            f"units are {roles}"
        )
    elif names.index(source) >= names.index(target):
        problem = f"list '{source}' before '{target}'"
    elif (source, target) in graph.edges[:index]:
        problem = "is there twice, and would count its gradients twice; keep one"
    if problem:
        raise ModelError(f"edge {source} -> {target}: {problem}", place=("edges", index))


def _problem_of_edges(graph: ModelGraph, unit: Unit) -> str:
    """Say what is wrong with how an encoder is fed by encoders, or feeds some; empty when nothing is."""
    sources, targets = graph.upstream(unit.name), graph.downstream(unit.name)
    feeds_llm = graph.backbone.name in targets
    if bool(sources) != (unit.join is not None):
        return (
            f"is fed by {', '.join(sources)}; give it join: features or sequence, and no image or audio"
            if sources
            else "has join, but no encoder feeds it; add an edge from one, or leave join out"
        )
    if unit.item_input is not None and sources:
        return f"takes what {', '.join(sources)} give; leave image and audio out"
    if feeds_llm and (len(targets) > 1 or not unit.has_projector):
        return "feeds the backbone, so it must have a projector and feed no encoder as well; change it or the edges"
    if (sources or not feeds_llm) and unit.deepstack_layers:
        return "deepstack_layers belong to encoders that feed nobody but the backbone; leave them out"
    passed = graph.item_units(unit.name)
    if len(ends := [name for name in passed if graph.backbone.name in graph.downstream(name)]) != 1:
        return f"its items reach the backbone through {len(ends)} encoders ({', '.join(ends)}); expected one; change the edges"
    inputs = {name: graph.unit(name).item_input for name in passed if not graph.upstream(name)}
    if unit.name in inputs and not _cuts_alike(unit, graph.unit(passed[0])):
        return (
            f"takes the items of '{passed[0]}', but cuts them otherwise; describe image or audio as there, but for mean and std"
        )
    widths = [graph.width_behind(name, len(graph.unit(name).layers) - 1) for name in sources]
    if not sources:
        return ""
    shown = " + ".join(map(str, widths))
    if unit.join == "features" and sum(widths) != unit.transformer.hidden_size:
        return f"{', '.join(sources)} give {shown} channels, but hidden_size is {unit.transformer.hidden_size}; make them equal"
    if unit.join == "sequence" and set(widths) != {unit.transformer.hidden_size}:
        return f"{', '.join(sources)} must each give hidden_size {unit.transformer.hidden_size} channels, found {shown}"
    return ""


_ALIKE = ("patch_size", "merge_size", "in_channels", "min_pixels", "max_pixels", "image_size", "fit", "max_tiles", "num_frames")


def _cuts_alike(unit: Unit, other: Unit) -> bool:
    """Return True if two encoders make the same tokens of an item, before they embed them."""
    if unit.image is None or other.image is None:
        return unit.item_input == other.item_input
    return all(getattr(unit.image, name) == getattr(other.image, name) for name in _ALIKE)


def _problem_of_module(unit: Unit) -> str:
    image, audio = unit.image, unit.audio
    takes_images = image is not None and image.image_size is not None and image.num_frames == 1
    takes_sound = audio is not None and audio.chunk_tokens is None
    if unit.role is not Role.ENCODER or not (takes_images or takes_sound):
        return (
            "module belongs to encoders of images of one size, or of sound in one piece; give the unit an image with image_size "
            "or audio without chunk_tokens, or leave module out"
        )
    if unit.deepstack_layers:
        return "module is one layer; leave deepstack_layers out"
    if unit.layer_kinds is not None:
        return "module takes the place of all layers but the projector; leave layers out"
    return ""


def _problem_of_experts(unit: Unit, experts: Experts) -> str:
    if unit.role is not Role.BACKBONE:
        return "experts belong to the backbone; remove them here"
    if experts.router_topk > experts.num_experts:
        return f"router_topk {experts.router_topk} is above num_experts {experts.num_experts}; lower it to at most that"
    if unit.transformer.add_bias_linear:
        return "experts have no biases; leave add_bias_linear out"
    if MOE_TRANSFORMER not in unit.layers:
        return f"no layer of the list has them; name some {MOE_TRANSFORMER}, or leave experts out"
    return ""


def _problem_of_queries(unit: Unit) -> str:
    assert unit.queries is not None
    if unit.has_linear_projector or unit.projector_hidden_size is not None or unit.deepstack_layers:
        return (
            "queries take the place of has_linear_projector and projector_hidden_size, and do not attend to deepstack_layers; "
            "leave these out"
        )
    shape = unit.queries.shape(unit.transformer)
    if shape.hidden_size % shape.num_attention_heads:
        return (
            f"hidden_size {shape.hidden_size} of queries is not divisible by their num_attention_heads "
            f"{shape.num_attention_heads}; change one of them"
        )
    return ""


def _check_unit(unit: Unit) -> None:
    shape = unit.transformer
    at = Plain(None, f"unit '{unit.name}'", ModelError, ("units", unit.name))
    if not _UNIT_NAME.fullmatch(unit.name):
        at.fail("a unit's name starts with a letter and has letters, digits, _ and - after it, 64 at most; rename the unit")
    check_fields(unit, at=at)

    def fail(key: str, problem: str) -> NoReturn:
        at.inner(key, None, where=at.where).fail(problem)

    if unit.layer_kinds is not None and len(unit.layer_kinds) != shape.num_layers + 2:
        fail(
            "layers",
            f"layers lists {len(unit.layer_kinds)} layers, expected num_layers + 2 = {shape.num_layers + 2}, the first and the "
            "last layer included; change one of them",
        )
    if unit.module is not None and (problem := _problem_of_module(unit)):
        fail("module", problem)
    if unit.audio is not None and unit.audio.waveform is not None:
        if problem := problem_of_waveform(unit.audio.waveform):
            fail("audio", f"waveform: {problem}")
        if unit.module is None:
            fail("audio", "waveform is what modules of transformers take; give the unit a module, or leave it out")
    if shape.kv_channels is None and shape.hidden_size % shape.num_attention_heads:
        fail(
            "hidden_size",
            f"hidden_size {shape.hidden_size} is not divisible by num_attention_heads "
            f"{shape.num_attention_heads}; change one of them or set kv_channels",
        )
    if shape.num_attention_heads % shape.query_groups:
        fail(
            "num_query_groups",
            f"num_attention_heads {shape.num_attention_heads} is not divisible by num_query_groups {shape.query_groups}; "
            "change one of them",
        )
    if shape.rotary_sections and (unit.role is not Role.BACKBONE or 2 * sum(shape.rotary_sections) != shape.head_channels):
        fail(
            "rotary_sections",
            f"rotary_sections {list(shape.rotary_sections)} must belong to the backbone and add up to half its channels per head "
            f"({shape.head_channels // 2}); correct them",
        )
    if shape.has_interleaved_sections and not shape.rotary_sections:
        fail("has_interleaved_sections", "has_interleaved_sections is of rotary_sections, which are missing; add them")
    if len(shape.rotary_sections) not in (0, 3):
        fail("rotary_sections", f"expected 3 numbers, for time, row and column, found {len(shape.rotary_sections)}; correct them")
    if shape.rotary_scaling and (unit.role is not Role.BACKBONE or len(shape.rotary_scaling) != 4):
        fail("rotary_scaling", f"expected 4 numbers, and of the backbone only, found {len(shape.rotary_scaling)}; correct them")
    if shape.rotary_scaling and shape.rotary_scaling[1] >= shape.rotary_scaling[2]:
        fail("rotary_scaling", "its low_freq_factor must be below its high_freq_factor; correct them")
    if shape.experts is not None and (problem := _problem_of_experts(unit, shape.experts)):
        fail("experts", problem)
    if unit.deepstack_layers and (unit.has_linear_projector or unit.deepstack_layers[-1] >= shape.num_layers):
        fail(
            "image",
            f"deepstack_layers {list(unit.deepstack_layers)} need projectors of two products and must be below num_layers "
            f"{shape.num_layers}; correct them",
        )
    if not unit.has_projector and (
        unit.has_linear_projector or unit.projector_hidden_size is not None or unit.queries is not None
    ):
        fail("has_projector", "has_projector is false beside has_linear_projector, projector_hidden_size or queries; remove it")
    if not unit.has_projector and unit.freeze_projector:
        fail("freeze_projector", "there is no projector to freeze; remove one of freeze_projector and has_projector")
    if unit.has_linear_projector and unit.projector_hidden_size is not None:
        fail("projector_hidden_size", "a linear projector has no inner width; remove one of the two")
    if unit.queries is not None and (problem := _problem_of_queries(unit)):
        fail("queries", problem)
    rotary_axes = 4 if unit.role is Role.ENCODER or unit.image is not None else 2
    if shape.has_rotary_positions and shape.head_channels % rotary_axes:
        fail(
            "num_attention_heads" if shape.kv_channels is None else "kv_channels",
            f"channels per head ({shape.head_channels}) must be divisible by {rotary_axes} for rotary positions; "
            "change hidden_size, num_attention_heads or kv_channels",
        )
    if unit.role is Role.GENERATOR and unit.image is not None and unit.image.class_token is not None:
        fail("image", "class_token belongs to encoders; remove it here")
    for key, default in (("max_tiles", 1), ("position_grid", None), ("deepstack_layers", ())):
        if unit.role is Role.GENERATOR and unit.image is not None and getattr(unit.image, key) != default:
            fail("image", f"{key} belongs to encoders; remove it here")
    if unit.image is not None and (problem := problem_of_image(unit.image)):
        fail("image", problem)
