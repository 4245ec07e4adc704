"""Adapters in the format of Hugging Face's PEFT: the linear layers that a folder adapts, without reading its numbers.

One matrix here may be several of theirs (queries, keys and values), whose adapters each have their own A. If these are equal, as
Braid writes them, they are the A here; otherwise they are stacked by rows, so that the rank is their sum.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.hugging_face.architecture import Architecture
from multimodal.hugging_face.registry import architecture_of, read_config
from multimodal.hugging_face.weight_names import Spelling, UnitNames, Weight, spelled
from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ModelGraph

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of all names in the file."""
DOWN_ENDING, UP_ENDING = ".lora_A.weight", ".lora_B.weight"
_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
}
_LENGTH_BYTES = 8
_LARGEST_HEADER = 2**27


class PeftModule(NamedTuple):
    """The adapter of one of Hugging Face's linear layers."""

    key: str
    """Its name in the family's table of names."""
    name: str
    """Its name in the file, without the prefix."""
    rank: int
    scale: float


class OwnModule(NamedTuple):
    """A linear layer in Braid."""

    unit: str
    layer: int
    kind: str
    module: str
    """Its path in the layer."""

    @property
    def target(self) -> str:
        """Its name in --lora-targets."""
        return f"{self.unit}.{self.kind}.{self.module.rpartition('.')[2]}"


@dataclass(frozen=True)
class PeftAdapter:
    """A folder's adapters, for a model in Braid."""

    folder: Path
    rank: int
    """The rank of all adapters here: the largest that one of them needs."""
    scale: float
    targets: tuple[str, ...]
    modules: Mapping[OwnModule, tuple[PeftModule, ...]]
    """The PEFT adapters that make up each linear layer's, in the order in which they are stacked."""
    shares_down: Mapping[OwnModule, bool]
    """True if all parts have the same A."""
    others: tuple[str, ...]
    """Names in the file of tensors of no adapter, such as a projector's."""
    graph: ModelGraph
    """The graph of the units that the folder describes."""
    architecture: Architecture

    @property
    def alpha(self) -> float:
        """The value of --lora-alpha that gives the same scale."""
        return self.scale * self.rank

    def names(self, unit: str) -> UnitNames:
        """Return the names of a unit's weights."""
        return self.architecture.names_of(self.graph)[self.graph.unit_names.index(unit)]

    def columns(self, own: OwnModule) -> Iterator[tuple[PeftModule, int]]:
        """Yield the parts of a linear layer's adapter, each with its first row of A here."""
        start = 0
        for part in self.modules.get(own, ()):
            yield part, start
            start += 0 if self.shares_down[own] else part.rank


def read_peft_adapter(folder: str | Path, *, graph: ModelGraph, base: str | Path | None) -> PeftAdapter:
    """Return a folder's adapters for a model; base: the folder of the model's weights, if they come from one.

    For a model that is composed of several folders: the adapters of its LLM, in the folder where --save-adapter writes them.
    Raises ConfigError for other folders, for unsupported options, and for adapters of layers that the model does not have.
    """
    folder, graph, architecture = _adapted_part(Path(folder), graph, base)
    config = _read_config(folder)
    tensors = _read_header(folder / ADAPTER_WEIGHTS)
    known = dict(_own_modules(graph, architecture))
    found: dict[OwnModule, dict[int, PeftModule]] = {}
    others = []
    for name in sorted(tensors):
        if name.endswith(DOWN_ENDING):
            module = name.removeprefix(PREFIX).removesuffix(DOWN_ENDING)
            own, place, key = known.get(module, (None, 0, ""))
            if own is None or f"{PREFIX}{module}{UP_ENDING}" not in tensors:
                problem = "is no linear layer of the model that may have one" if own is None else f"has no {UP_ENDING[1:]}"
                raise ConfigError(
                    f"{folder / ADAPTER_WEIGHTS}: {name}: {module} {problem}; give adapters of this model, on linear layers alone"
                )
            rank = tensors[name].shape[0]
            found.setdefault(own, {})[place] = PeftModule(key, module, rank, _scale(config, module, rank))
        elif not name.endswith(UP_ENDING):
            others.append(name)
    if not found:
        raise ConfigError(f"{folder / ADAPTER_WEIGHTS}: holds no {DOWN_ENDING[1:]}; give a folder of PEFT with LoRA adapters")
    modules = {own: tuple(parts[place] for place in sorted(parts)) for own, parts in found.items()}
    shares = {own: _are_equal(folder, tensors, parts) for own, parts in modules.items()}
    ranks = (parts[0].rank if shares[own] else sum(part.rank for part in parts) for own, parts in modules.items())
    first = next(iter(modules.values()))[0]
    targets = tuple(dict.fromkeys(own.target for own in modules))
    return PeftAdapter(folder, max(ranks), first.scale, targets, modules, shares, tuple(others), graph, architecture)


def _adapted_part(folder: Path, graph: ModelGraph, base: str | Path | None) -> tuple[Path, ModelGraph, Architecture]:
    """Return the folder, graph and family of the adapted model."""
    weights = graph.backbone.weights
    if weights is not None:
        inner = folder / graph.backbone.name
        return inner if inner.is_dir() else folder, ModelGraph((graph.backbone,)), read_config(weights)[0]
    return folder, graph, read_config(base)[0] if base is not None and Path(base).is_dir() else architecture_of(graph)


def _read_config(folder: Path) -> Mapping[str, Any]:
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder}: there is no {name}; give a folder that save_pretrained of PEFT, or --save-adapter, wrote"
            )
    try:
        config = read_mapping(folder / ADAPTER_CONFIG, error=ModelError)
    except ModelError as problem:
        raise ConfigError(str(problem)) from None
    for key, values in _COMPUTED.items():
        if config.get(key) not in values and (key in config or None not in values):
            raise ConfigError(
                f"{folder / ADAPTER_CONFIG}: {key} is {config.get(key)!r}, and only {' or '.join(map(repr, values))} can be "
                "trained here; give adapters of LoRA without it"
            )
    if not isinstance(config.get("lora_alpha"), int | float):
        raise ConfigError(f"{folder / ADAPTER_CONFIG}: lora_alpha is {config.get('lora_alpha')!r}, expected a number; correct it")
    return config


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of B A; patterns match the end of a module's name."""
    patterns = config.get("alpha_pattern") or {}
    alpha = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def all_spellings(architecture: Architecture) -> Iterable[Spelling]:
    """Return the spellings of a family's modules in different versions of transformers."""
    return dict.fromkeys((architecture.module_spelling, (), *architecture.spellings))


def _own_modules(graph: ModelGraph, architecture: Architecture) -> Iterator[tuple[str, tuple[OwnModule, int, str]]]:
    """Yield their names of linear layers, in every spelling, with our layer, the index among its parts, and the key."""
    for unit, names in zip(graph.units, architecture.names_of(graph), strict=True):
        for index, kind in enumerate(unit.layers):
            is_end = index in (0, len(unit.layers) - 1)
            prefix = "" if is_end else names.prefix.format(index - 1)
            for entry in names.body if not is_end else names.first if index == 0 else names.last:
                if isinstance(entry, Weight):
                    for place, theirs in enumerate(entry.theirs):
                        own, key = OwnModule(unit.name, index, kind, entry.ours), prefix + theirs
                        for spelling in all_spellings(architecture):
                            yield spelled(key, spelling), (own, place, key)


class _Stored(NamedTuple):
    shape: tuple[int, ...]
    start: int
    stop: int


def _read_header(path: Path) -> Mapping[str, _Stored]:
    """Return the matrices of a safetensors file, and the positions of their bytes."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(min(size, _LARGEST_HEADER)))
        first = _LENGTH_BYTES + size
        return {
            key: _Stored(tuple(entry["shape"]), *(first + offset for offset in entry["data_offsets"]))
            for key, entry in header.items()
            if key != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ConfigError(f"{path}: is no safetensors file ({problem}); copy it again") from problem


def _are_equal(folder: Path, tensors: Mapping[str, _Stored], parts: Sequence[PeftModule]) -> bool:
    """Return True if all parts have the same A and scale."""
    stored = [tensors[f"{PREFIX}{part.name}{DOWN_ENDING}"] for part in parts]
    if len({(each.shape, part.scale) for each, part in zip(stored, parts, strict=True)}) > 1:
        return False
    with open(folder / ADAPTER_WEIGHTS, "rb") as file:
        return len(set(_contents(file, stored))) == 1


def _contents(file: Any, stored: Iterable[_Stored]) -> Iterator[bytes]:
    for each in stored:
        file.seek(each.start)
        yield file.read(each.stop - each.start)
