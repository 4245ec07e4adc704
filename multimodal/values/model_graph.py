"""The model: a graph of units (encoders, one backbone, generators) and the architecture of each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from multimodal.values.errors import ModelError
from multimodal.values.file_form import FileValue
from multimodal.values.typed_reader import Plain, to_plain
from multimodal.values.units.check_unit import check_unit
from multimodal.values.units.items import AudioInput, ImageInput, ItemInput
from multimodal.values.units.transformer import Experts, Transformer
from multimodal.values.units.unit import Lora, Queries, Role, Unit, unit_from_plain

__all__ = ["AudioInput", "Experts", "ImageInput", "ItemInput", "Lora", "ModelGraph", "Queries", "Role", "Transformer", "Unit"]
_EDGE_ROLES = (*((Role.ENCODER, role) for role in (Role.ENCODER, Role.BACKBONE, Role.GENERATOR)), (Role.BACKBONE, Role.GENERATOR))


@dataclass(frozen=True)
class ModelGraph(FileValue):
    """Units in a topological order, and the edges along which activations flow."""

    file_error: ClassVar = ModelError
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
        """Return the encoders that the items of an encoder pass through, in the graph's order: all that edges connect with it.

        Those without upstream encoders take the item itself; the last one feeds the LLM.
        """
        found = {name}
        inner = [edge for edge in self.edges if all(self.unit(each).role is Role.ENCODER for each in edge)]
        while more := {each for edge in inner if found.intersection(edge) for each in edge} - found:
            found |= more
        return tuple(each for each in self.unit_names if each in found)

    @property
    def item_encoders(self) -> tuple[Unit, ...]:
        """The encoders that items in data name: of the encoders that an item passes through, the first."""
        return tuple(unit for unit in self.encoders if self.item_units(unit.name)[0] == unit.name)

    def gives_items_once(self, name: str) -> bool:
        """True if an encoder takes items itself and feeds only one unit, so that its backward can run consumer by consumer."""
        return not self.upstream(name) and len(self.downstream(name)) == 1

    def conditions(self, generator: str) -> tuple[str, ...]:
        """Encoders whose outputs a generator takes beside the LLM's hidden states."""
        return tuple(name for name in self.upstream(generator) if self.unit(name).role is Role.ENCODER)

    def takes_tokens(self, generator: str) -> bool:
        """True if tokens of encoders, or some of the LLM, stand before the patches that a generator makes."""
        return bool(self.conditions(generator)) or self.unit(generator).num_conditions > 1

    @property
    def passes_items_on(self) -> bool:
        """True if items have lengths in several units: encoders feed others than the LLM, or tokens stand before what is made."""
        is_passed = any(self.unit(source).role is Role.ENCODER and target != self.backbone.name for source, target in self.edges)
        return is_passed or any(self.takes_tokens(unit.name) for unit in self.generators)

    def num_carried(self, name: str, layer: int) -> int:
        """Return the number of hidden states that are carried beside the output of a unit's layer (deepstack).

        An encoder carries the outputs of its deepstack layers to the LLM, which adds one of them behind each of its first layers.
        A generator of diffusers' form carries what its first layer embeds to all others.
        """
        unit = self.unit(name)
        if unit.flow is not None and unit.module is None:
            return unit.flow.num_carried if layer < len(unit.layers) - 1 else 0
        if unit.role is Role.BACKBONE:
            return max(0, max((len(self.unit(each).deepstack_layers) for each in self.upstream(name)), default=0) - layer)
        return sum(each < layer for each in unit.deepstack_layers)

    def width_behind(self, name: str, layer: int) -> int:
        """Return the channels behind a layer of a unit: its output and the hidden states that are carried beside it."""
        unit = self.unit(name)
        is_end = unit.role is Role.ENCODER and layer == len(unit.layers) - 1
        if is_end and not unit.has_projector:
            return unit.merged_size
        size = self.projected_size(name) if is_end else unit.transformer.hidden_size
        return size * (1 + self.num_carried(name, layer))

    def projected_size(self, name: str) -> int:
        """Return the channels that an encoder's projector maps to: the LLM's if it feeds the LLM, else those of an encoder."""
        targets = self.downstream(name)
        taker = self.backbone.name if self.backbone.name in targets else next(iter(targets), name)
        return self.unit(taker).transformer.hidden_size

    def takers(self, name: str) -> tuple[Unit, ...]:
        """Return the units that take the output of a unit's projector as it is; generators map it to their own channels."""
        return tuple(unit for unit in map(self.unit, self.downstream(name)) if unit.role is not Role.GENERATOR)

    def to_dict(self) -> dict[str, Any]:
        """Plain form, read back by `from_dict`."""
        return {"units": {unit.name: to_plain(unit, given=("name",)) for unit in self.units}, "edges": to_plain(self.edges)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "ModelGraph":
        """Build from the plain form; raises ModelError naming the offending key."""
        top = Plain(value, "model", ModelError).mapping(known=("units", "edges"), required=("units",))
        entries = top["units"].mapping(at_least=1, expected="each unit's name with its description")
        units = tuple(unit_from_plain(name, replace(entry, where=f"unit '{name}'")) for name, entry in entries.items())
        if "edges" not in top:
            backbones = [unit.name for unit in units if unit.role is Role.BACKBONE]
            edges = [(unit.name, target) for unit in units if unit.role is Role.ENCODER for target in backbones]
            edges += [(source, unit.name) for unit in units if unit.role is Role.GENERATOR for source in backbones]
            return cls(units, tuple(edges))
        pairs = top["edges"].entries(expected="a list of [source, target] pairs", called="edge")
        return cls(units, tuple(pair.read(tuple[str, str]) for pair in pairs))


def _check_graph(graph: ModelGraph) -> None:
    names = graph.unit_names
    if len(set(names)) != len(names):
        raise ModelError(f"unit names must differ, found {', '.join(names)}")
    backbones = [unit.name for unit in graph.units if unit.role is Role.BACKBONE]
    if len(backbones) != 1:
        raise ModelError(f"a model needs exactly one unit with role backbone, found {len(backbones)}", place=("units",))
    for index, edge in enumerate(graph.edges):
        if problem := _problem_of_edge(graph, *edge, earlier=graph.edges[:index]):
            raise ModelError(f"edge {edge[0]} -> {edge[1]}: {problem}", place=("edges", index))
    for unit in graph.units:
        if unit.role is Role.ENCODER and not graph.downstream(unit.name):
            raise ModelError(f"unit '{unit.name}' feeds nobody; add an edge [{unit.name}, {backbones[0]}]", place=("edges",))
        if unit.role is Role.GENERATOR and backbones[0] not in (sources := graph.upstream(unit.name)):
            fed = f"fed by {', '.join(sources)} alone" if sources else "fed by nobody"
            raise ModelError(f"unit '{unit.name}' is {fed}; add an edge [{backbones[0]}, {unit.name}]", place=("edges",))
        check_unit(unit)
        if unit.role is Role.ENCODER and (problem := _problem_of_edges(graph, unit)):
            raise ModelError(f"unit '{unit.name}': {problem}", place=("units", unit.name))
        if (most := graph.backbone.transformer.num_layers) < len(unit.deepstack_layers):
            raise ModelError(
                f"unit '{unit.name}': deepstack_layers has {len(unit.deepstack_layers)} layers, and the backbone only {most} to "
                "take them; leave some out",
                place=("units", unit.name, "image"),
            )


def _problem_of_edge(graph: ModelGraph, source: str, target: str, *, earlier: tuple[tuple[str, str], ...]) -> str:
    names = graph.unit_names
    if source not in names or target not in names:
        return f"names a unit that does not exist; units are {', '.join(names)}"
    if (graph.unit(source).role, graph.unit(target).role) not in _EDGE_ROLES:
        roles = ", ".join(f"{unit.name} ({unit.role})" for unit in graph.units)
        return (
            "edges lead from an encoder to the backbone, a generator or another encoder, or from the backbone to a generator; "
            f"change it; units are {roles}"
        )
    if names.index(source) >= names.index(target):
        return f"list '{source}' before '{target}'"
    return "is there twice, and would count its gradients twice; keep one" if (source, target) in earlier else ""


def _problem_of_edges(graph: ModelGraph, unit: Unit) -> str:
    """Describe an error in the edges between an encoder and other encoders; empty if there is none."""
    sources, targets = graph.upstream(unit.name), graph.downstream(unit.name)
    feeds_llm = graph.backbone.name in targets
    fed = [name for name in targets if graph.unit(name).role is Role.ENCODER]
    if not feeds_llm and len(fed) < len(targets):
        generators = ", ".join(name for name in targets if name not in fed)
        return f"feeds {generators}, which takes what the backbone takes; add an edge [{unit.name}, {graph.backbone.name}]"
    if bool(sources) != (unit.join is not None):
        return (
            f"is fed by {', '.join(sources)}; give it join: features or sequence, and no image or audio"
            if sources
            else "has join, but no encoder feeds it; add an edge from one, or leave join out"
        )
    if unit.item_input is not None and sources:
        return f"takes what {', '.join(sources)} give; leave image and audio out"
    if feeds_llm and (fed or not unit.has_projector):
        return "feeds the backbone, so it must have a projector and feed no encoder as well; change it or the edges"
    if (sources or not feeds_llm) and unit.deepstack_layers:
        return "deepstack_layers belong to encoders that no encoder feeds and that feed none; leave them out"
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


_ALIKE = (
    *("patch_size", "merge_size", "in_channels", "min_pixels", "max_pixels"),
    *("image_size", "fit", "shorter_side", "max_tiles", "num_frames", "video"),
)


def _cuts_alike(unit: Unit, other: Unit) -> bool:
    """Return True if two encoders cut an item into the same tokens before they embed them."""
    if unit.image is None or other.image is None:
        return unit.item_input == other.item_input
    return all(getattr(unit.image, name) == getattr(other.image, name) for name in _ALIKE)
