"""Adapters in the format of Hugging Face's PEFT: the linear layers that a folder adapts, without reading its numbers.

One matrix here may be several of theirs (queries, keys and values), whose adapters each have their own A. If these are equal, as
Braid writes them, they are the A here; otherwise they are stacked by rows, so that the rank is their sum.
"""

import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.hugging_face.architecture import Architecture
from multimodal.hugging_face.families import FAMILIES
from multimodal.hugging_face.registry import architecture_of, read_config
from multimodal.hugging_face.safetensors_header import StoredTensor, read_header
from multimodal.hugging_face.weight_names import Spelling, UnitNames, spelled
from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ModelGraph

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of all names in the file."""
DOWN_ENDING, UP_ENDING = ".lora_A.weight", ".lora_B.weight"
TOKENS_ENDING = ".token_adapter.trainable_tokens_delta"
"""The end of the name of trained rows of the vocabulary: their values, in the order of `trainable_token_indices`."""
_ALLOWED = FAMILIES["adapters"]
_NAME = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?")
"""A name, or its end, as a regular expression: what can be matched without backtracking."""


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
    new_tokens: tuple[int, int] | None = None
    """The first token whose row of the vocabulary is trained, and the one behind the last."""
    dropout: float = 0.0
    """The probability with which PEFT drops inputs of adapters in training; it says nothing about the trained model."""

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

    Of a composed model: the adapters of its LLM, in the folder where --save-adapter writes them. Raises ConfigError for other
    folders, for unsupported options, and for adapters of layers that the model does not have.
    """
    folder, weights = Path(folder), graph.backbone.weights
    if weights is not None:  # of a composed model
        folder = folder / graph.backbone.name if (folder / graph.backbone.name).is_dir() else folder
        graph, base = ModelGraph((graph.backbone,)), weights
    architecture = read_config(base)[0] if base is not None and Path(base).is_dir() else architecture_of(graph)
    config = _read_config(folder)
    try:
        tensors, _ = read_header(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{folder / ADAPTER_WEIGHTS}: is no safetensors file ({problem}); copy it again") from problem
    known = dict(_own_modules(graph, architecture))
    modules = _find_adapters(folder, config, tensors, known=known)
    _check_targets(folder, config, [part.name for parts in modules.values() for part in parts], known=known)
    shares_down = {own: _are_equal(folder, tensors, parts) for own, parts in modules.items()}
    return PeftAdapter(
        folder=folder,
        rank=max(parts[0].rank if shares_down[own] else sum(part.rank for part in parts) for own, parts in modules.items()),
        scale=next(iter(modules.values()))[0].scale,
        targets=tuple(dict.fromkeys(own.target for own in modules)),
        modules=modules,
        shares_down=shares_down,
        others=tuple(name for name in sorted(tensors) if not name.endswith((DOWN_ENDING, UP_ENDING))),
        graph=graph,
        architecture=architecture,
        new_tokens=_trained_tokens(folder, config),
        dropout=float(config.get("lora_dropout") or 0),
    )


def _find_adapters(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    *,
    known: Mapping[str, tuple[OwnModule, int, str]],
) -> dict[OwnModule, tuple[PeftModule, ...]]:
    """Return the adapters of every linear layer that has some, in order; known: as `_own_modules` yields them."""
    found: dict[OwnModule, dict[int, PeftModule]] = {}
    for name in sorted(tensors):
        if not name.endswith(DOWN_ENDING):
            continue
        module = name.removeprefix(PREFIX).removesuffix(DOWN_ENDING)
        own, place, key = known.get(module, (None, 0, ""))
        if own is None or f"{PREFIX}{module}{UP_ENDING}" not in tensors:
            problem = "is no linear layer of the model that may have one" if own is None else f"has no {UP_ENDING[1:]}"
            raise ConfigError(
                f"{folder / ADAPTER_WEIGHTS}: {name}: {module} {problem}; give adapters of this model, on linear layers alone"
            )
        rank = _checked_rank(folder, config, module, tensors[name])
        alpha = float(_value_for(module, config.get("alpha_pattern"), default=config["lora_alpha"]))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        found.setdefault(own, {})[place] = PeftModule(key, module, rank, scale)
    if not found:
        raise ConfigError(f"{folder / ADAPTER_WEIGHTS}: holds no {DOWN_ENDING[1:]}; give a folder of PEFT with LoRA adapters")
    return {own: tuple(parts[place] for place in sorted(parts)) for own, parts in found.items()}


def _read_config(folder: Path) -> Mapping[str, Any]:
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: there is no {name}; give a folder that save_pretrained of PEFT or --save-adapter wrote")
    try:
        config = read_mapping(folder / ADAPTER_CONFIG, error=ModelError)
    except ModelError as problem:
        raise ConfigError(str(problem)) from None
    for key, values in _ALLOWED.items():
        if config.get(key) not in values and (key in config or None not in values):
            raise ConfigError(
                f"{folder / ADAPTER_CONFIG}: {key} is {config.get(key)!r}, and only {' or '.join(map(repr, values))} can be "
                "trained here; give adapters of LoRA without it"
            )
    for key, (is_right, expected) in _TYPES.items():
        if not is_right(config.get(key)):
            raise ConfigError(f"{folder / ADAPTER_CONFIG}: {key} is {config.get(key)!r}, expected {expected}; correct it")
    for key in ("rank_pattern", "alpha_pattern"):
        if wrong := [name for name in config.get(key) or () if not _NAME.fullmatch(name)]:
            raise ConfigError(
                f"{folder / ADAPTER_CONFIG}: {key} has the key {wrong[0]!r}, expected the name of a module, or its end; write "
                "one entry for each name that the expression matches"
            )
    return config


def _trained_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the tokens of `trainable_token_indices`: a list, or one for each module."""
    given = config.get("trainable_token_indices")
    lists = list(given.values()) if isinstance(given, Mapping) else [] if given is None else [given]
    if not lists:
        return None
    first = lists[0][0] if isinstance(lists[0], list) and lists[0] and type(lists[0][0]) is int else -1
    if first < 0 or any(each != list(range(first, first + len(lists[0]))) for each in lists):
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG}: trainable_token_indices is {given!r}, expected tokens one after another, the same for "
            "embeddings and output; merge such an adapter with PEFT"
        )
    return first, first + len(lists[0])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_pattern(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return value is None or (isinstance(value, Mapping) and all(map(is_right, value.values())))


_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "lora_alpha": (_is_number, "a number"),
    "r": (_is_rank, "a positive integer"),
    "alpha_pattern": (partial(_is_pattern, is_right=_is_number), "a mapping from names of modules to numbers"),
    "rank_pattern": (partial(_is_pattern, is_right=_is_rank), "a mapping from names of modules to positive integers"),
    "target_modules": (
        lambda value: value is None or all(isinstance(each, str) for each in (value if isinstance(value, list) else [value])),
        "a list of names",
    ),
    "lora_dropout": (lambda value: value is None or (_is_number(value) and 0 <= value <= 1), "a number from 0 to 1"),
}


def _matches(pattern: str, module: str) -> bool:
    """Return True if a pattern is the end of a module's name (all of it behind '^'), as in PEFT, without a search."""
    name = pattern.replace("\\.", ".").removesuffix("$")
    return module == name.removeprefix("^") or (not name.startswith("^") and module.endswith(f".{name}"))


def _value_for(module: str, patterns: Mapping[str, Any] | None, *, default: Any) -> Any:
    return next((value for pattern, value in (patterns or {}).items() if _matches(pattern, module)), default)


def _checked_rank(folder: Path, config: Mapping[str, Any], module: str, stored: StoredTensor) -> int:
    expected = _value_for(module, config.get("rank_pattern"), default=config["r"])
    if stored.shape[:1] != (expected,):
        raise ConfigError(
            f"{folder}: {module}{DOWN_ENDING} has shape {list(stored.shape)}, but {ADAPTER_CONFIG} gives it the rank {expected} "
            "(r or rank_pattern); take the two files from one adapter"
        )
    return int(expected)


def _check_targets(folder: Path, config: Mapping[str, Any], modules: Collection[str], *, known: Collection[str]) -> None:
    """Raise ConfigError if `target_modules` names something else than the file has adapters of.

    Names of which the model has none are passed over, as by PEFT: scripts list those of several families. A regular expression
    is not evaluated, nor `exclude_modules`: the tensors say what has adapters.
    """
    targets = config.get("target_modules")
    if isinstance(targets, str):
        targets = [f"^{targets}"] if _NAME.fullmatch(targets) and targets != "all-linear" else None
    if targets is None or config.get("exclude_modules"):
        return
    of_none = [each for each in targets if any(_matches(each, module) for module in known)]
    of_none = [each for each in of_none if not any(_matches(each, module) for module in modules)]
    unnamed = [module for module in modules if not any(_matches(each, module) for each in targets)]
    problems = [f"names {each.removeprefix('^')!r}, of which there is none" for each in of_none]
    problems += [f"does not name {module}, which has one" for module in unnamed]
    if problems:
        where = f"{folder / ADAPTER_CONFIG}: target_modules {problems[0]} in {ADAPTER_WEIGHTS}"
        raise ConfigError(f"{where}; name the modules with adapters")


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
                if entry.is_module:
                    for place, theirs in enumerate(entry.theirs):
                        own, key = OwnModule(unit.name, index, kind, entry.ours), prefix + theirs
                        for spelling in all_spellings(architecture):
                            yield spelled(key, spelling), (own, place, key)


def _are_equal(folder: Path, tensors: Mapping[str, StoredTensor], parts: Sequence[PeftModule]) -> bool:
    """Return True if all parts have the same A and scale."""
    stored = [tensors[f"{PREFIX}{part.name}{DOWN_ENDING}"] for part in parts]
    if len({(each.shape, part.scale) for each, part in zip(stored, parts, strict=True)}) > 1:
        return False
    contents = set()
    with open(folder / ADAPTER_WEIGHTS, "rb") as file:
        for each in stored:
            file.seek(each.start)
            contents.add(file.read(each.stop - each.start))
    return len(contents) == 1
