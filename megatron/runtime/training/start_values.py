"""Values that must be the same on every rank before a run starts, in printable form: flags, model, plan, data, versions."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.runtime.feed.data_sets import DataSets, text_settings
from megatron.runtime.flags.configuration import UNIT_RATES, RunConfig
from megatron.runtime.flags.field_flags import all_flags, value_of
from megatron.runtime.flags.unit_flags import MICRO_BATCH_SIZE, SIZE_SPELLINGS, shown_flag
from megatron.runtime.launch.distributed_setup import StartValues
from megatron.runtime.orchestrator.machine import version_of
from megatron.runtime.training.prediction import cluster_of, profile_of
from multimodal.balance import UNBALANCED
from multimodal.cost.cost_table import CostTable
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.sample_source import file_digest
from multimodal.kernels import kernels
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.typed_reader import to_plain

MAY_DIFFER = frozenset({"log_interval", "log_json", "tensorboard_dir", "peak_tflops", "progress_bar"})
"""Fields that do not affect what ranks do together: only rank 0 reports, and devices may differ."""
BY_CONTENT = frozenset({"model", "plan", "tokenizer_model", "chat_template", "emulate", "cluster", "layer_costs"}).union(
    ("data_path", "data_args_path", "valid_data_path")
)
"""Input files that may be at another place on every node: their contents are compared instead."""
_PACKAGES = ("braid", "megatron-core", "torch", "numpy")
_MOST_DIGESTED_LENGTHS = 100_000


def collect_start_values(config: RunConfig, *, graph: ModelGraph, plan: Plan, data: DataSets, vocab_size: int) -> StartValues:
    """Return all values of this rank that must be the same on all; O(bytes of the manifest)."""
    tokenizer = {"the vocabulary": str(data.tokenizer.vocab_size), "the padded vocabulary": str(vocab_size)}
    if config.data.tokenizer_model is not None:
        digests = text_settings(config).digests
        tokenizer["the digest of its file"] = str(digests["tokenizer_digest"])
        tokenizer["the digest of its chat template"] = str(digests["chat_template_digest"])
    costs: dict[str, str] = {}
    if config.training.emulate is not None:
        costs |= _flat("emulate", to_plain(CostTable.from_file(config.training.emulate)))
    if config.training.cluster is not None or config.goes_by_durations:
        costs |= _flat("cluster", cluster_of(config).to_dict())
    if (profile := profile_of(config)) is not None:
        costs |= _flat("layers", profile.to_dict())
    return {
        **collect_flag_values(config),
        "model": dict(_flat("", graph.to_dict())),
        "plan": dict(_flat("", plan.to_dict())),
        "tokenizer": tokenizer,
        "data": _data_values(config, data),
        "costs": costs,
    }


def collect_flag_values(config: RunConfig) -> StartValues:
    """Return those of the values that are known before anything is read."""
    # The size of a node may only differ if no balancer uses it.
    uses_nodes = config.training.balance != UNBALANCED or config.training.rearrange_nodes
    variables = ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if uses_nodes else ("WORLD_SIZE",)
    flags = {"plan": f"{'with' if config.parallelism.plans_itself else 'without'} --plan auto"}
    for flag in all_flags():
        if flag.name not in MAY_DIFFER | BY_CONTENT:
            flags[flag.name] = _shown(flag.flag, value_of(config, flag.name), is_switch=flag.parse is None)
    sizes = {f"{unit}.{name}": getattr(own, name) for unit, own in config.parallelism.units.items() for name in SIZE_SPELLINGS}
    counts, rates = config.training.encoder_micro_batch_sizes, config.optimizer.unit_rates
    of_units = {**sizes, **{f"{unit}.{MICRO_BATCH_SIZE}": counts.get(unit) for unit in config.parallelism.units}}
    of_units |= {name: rates.get(name) for unit in config.parallelism.units for rate in UNIT_RATES if (name := f"{unit}.{rate}")}
    flags |= {name: _shown(shown_flag(name), value) for name, value in of_units.items()}
    return {
        "program": {
            **{package: version_of(package) for package in _PACKAGES},
            "decisions by": "C++ kernels" if kernels is not None else "Python references",
        },
        "flags": flags,
        "environment": {name: os.environ.get(name, "unset") for name in variables},
    }


def _shown(flag: str, value: Any, *, is_switch: bool = False) -> str:
    """Return the flag as typed: `with --lr 0.001`, `without --plan`."""
    if is_switch:
        is_given = bool(value) != flag.startswith("--no-")
        return f"{'with' if is_given else 'without'} {flag}"
    if value is None or value == ():
        return f"without {flag}"
    return f"with {flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested plain values, each with its path; a list of leaves, or an empty container, is a leaf."""
    if isinstance(value, list) and any(isinstance(entry, (list, Mapping)) for entry in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping) and value:
        for key, entry in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), entry)
    else:
        yield name, str(value)


def _data_values(config: RunConfig, data: DataSets) -> Mapping[str, str]:
    """Return the values of the data; those of a program follow from its text, flags and seed."""
    valid_sets, remote = config.evaluation.valid_sets.items(), config.data.remote
    valid = {f"the digest of validation set '{name}'": open_sample_files(each.path, remote).digest for name, each in valid_sets}
    if config.data.sample_program is not None:
        return {"the digest of the program of --data-path": file_digest(config.data.sample_program), **valid}
    values = {"--data-path": "a manifest", **valid}
    for name, source in (("training", data.train.source), ("validation", data.valid.source)):
        values[f"the number of {name} samples"] = str(len(source))
        digest, every = hashlib.blake2b(digest_size=8), -(-len(source) // _MOST_DIGESTED_LENGTHS) or 1
        for index in range(0, len(source), every):  # spread over the set, so that the largest sets take seconds
            digest.update(repr(source.lengths(index)).encode())
        values[f"the digest of the lengths of {name} samples"] = digest.hexdigest()
    for number, named in enumerate(config.data.mixture):
        which = f" {number + 1}" if number else ""
        values[f"the digest of the manifest{which}"] = open_sample_files(named.path, remote).digest
        values[f"the weight of the manifest{which}"] = str(named.weight)
    return values
