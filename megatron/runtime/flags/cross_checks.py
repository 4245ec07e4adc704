"""Checks combinations: every rule about two or more flags, and the flags' demands on the model and the plan."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.runtime.flags.configuration import AUTO, RunConfig
from megatron.runtime.flags.field_flags import all_flags, value_of
from megatron.runtime.flags.flag_rules import RULES
from megatron.runtime.flags.ignored_flags import ENCODER_FLAGS, EXCLUSIVE_FLAGS, EXCLUSIVE_SIZES, LEFT_TO_THE_PLAN, ignored_flags
from megatron.runtime.flags.schedule_checks import problems_of_schedule
from megatron.runtime.flags.unit_flags import LLM, MICRO_BATCH_SIZE, SIZE_SPELLINGS, shown_flag
from multimodal.balance import BALANCERS
from multimodal.balance.placement import has_unequal_shares
from multimodal.cost.engine_limits import engine_products, fp8_multiple
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.hugging_face.architecture import check_autoencoders
from multimodal.values.backward_need import unit_is_trainable
from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
MAX_MICROBATCHES = 2**14
"""The most microbatches of a replica in a step: beyond it, planning a step would take minutes and gigabytes."""


def drop_overruled(values: Mapping[str, Any], *, overruled: Callable[[str, str], bool], units: tuple[str, ...]) -> dict[str, Any]:
    """Drop one of two mutually exclusive flags if the command line overrules it; raises ConfigError if both are in one place.

    values: destination -> value; overruled(a, b): True if a is from a file and b from the command line.
    """
    kept = dict(values)
    sizes = [(f"{unit}.{size}", "plan", "a plan already has every unit's sizes") for unit in units for size in SIZE_SPELLINGS]
    if kept.get("plan") == AUTO:  # sizes may stand beside it, not what comes with a plan
        planned = {*LEFT_TO_THE_PLAN, "micro_batch_size", *(name for name, _, _ in sizes)}
        kept, sizes = {name: value for name, value in kept.items() if name not in planned or not overruled(name, "plan")}, []
        for name in LEFT_TO_THE_PLAN:
            if kept.get(name) not in (None, False):
                raise ConfigError(
                    f"{shown_flag(name)} and --plan auto exclude each other: the plan comes with what suits it; leave the former "
                    "out, or write a plan file with tools/plan.py"
                )
    ranges = [(f"{unit}.{first}", f"{unit}.{second}", reason) for unit in units for first, second, reason in EXCLUSIVE_SIZES]
    for first, second, reason in (*EXCLUSIVE_FLAGS, *sizes, *ranges):
        if kept.get(first) in (None, False) or kept.get(second) in (None, False):
            continue
        if overruled(first, second):
            del kept[first]
        elif overruled(second, first):
            del kept[second]
        else:
            raise ConfigError(f"{shown_flag(first)} and {shown_flag(second)} exclude each other: {reason}; keep one")
    for unit in units if kept.get("colocate_units") else ():
        if overruled(f"{unit}.data_parallel_size", "colocate_units"):
            kept.pop(f"{unit}.data_parallel_size", None)
    return kept


def check_config(config: RunConfig, *, graph: ModelGraph) -> None:
    """Check combinations, for the model as it is trained; raises ConfigError, or ModelError for one that can only be planned."""
    for problem in chain(
        (f"{shown_flag(row.name)} would be ignored: {row.reason}" for row in ignored_flags(config)),
        _problems_of_units(config, graph),
        (message.format(c=config) for message, is_broken in RULES.items() if is_broken(config)),
        _problems_with_model(config, graph),
    ):
        raise ConfigError(problem)
    _check_layers_can_be_built(graph)
    if not any(unit_is_trainable(graph, name) for name in graph.unit_names):
        raise ConfigError("every unit is frozen, so nothing would be trained; leave a --freeze or --freeze-projector out")


def _problems_of_units(config: RunConfig, graph: ModelGraph) -> Iterator[str]:
    """Yield adapters, sizes and callbacks of units that other flags do not allow."""
    adapted = [unit.name for unit in graph.units if unit.lora is not None]
    if config.checkpoint.save_adapter is not None and not adapted:
        yield "--save-adapter would be ignored: nothing has adapters; add --lora-rank N or leave it out"
    if config.parallelism.plans_itself:
        for name, sizes in config.parallelism.units.items():
            if sizes.layers_per_virtual_stage is not None:
                flag = shown_flag(f"{name}.layers_per_virtual_stage")
                yield f"{flag} and --plan auto exclude each other: virtual stages are planned by number; leave it out"
        for name in config.training.encoder_micro_batch_sizes:
            flag = shown_flag(f"{name}.{MICRO_BATCH_SIZE}")
            yield f"{flag} and --plan auto exclude each other: the microbatches of encoders are planned, too; leave it out"
    for key in config.optimizer.unit_rates:
        name, _, rate = key.rpartition(".")
        last = config.optimizer.lr_decay_iters or config.training.train_iters
        if rate.endswith("lr_warmup_iters") and config.optimizer.unit_rates[key] >= last:
            yield f"{shown_flag(key)} leaves no step for the decay, which ends at step {last}; lower it"
        if rate.endswith("lr") and config.optimizer.unit_rates[key] < config.optimizer.lr_warmup_init:
            yield f"--lr-warmup-init {config.optimizer.lr_warmup_init} is above {shown_flag(key)}; lower it"
        unit, is_for_projector = graph.unit(name), rate.startswith("projector_")
        layers = (index for index in range(len(unit.layers)) if (index == unit.projector_layer) == is_for_projector)
        if not any(map(unit.is_trainable, layers)):
            yield f"{shown_flag(key)} would be ignored: what it is for in unit '{name}' is frozen; leave it out"
    if config.optimizer.projector_lr is not None and not (graph.encoders or graph.generators):
        yield "--projector-lr would be ignored: the model has no projector; leave it out"
    trained = [unit for unit in graph.generators if any(map(unit.is_trainable, range(len(unit.layers))))]
    if config.optimizer.generator_ema_decay is not None and not trained:
        reason = "all generators are frozen" if graph.generators else "the model has no generator"
        yield f"--generator-ema-decay would be ignored: {reason}; leave it out"
    if config.evaluation.sample_guidance_scale != 1 and not graph.generators:
        yield "--sample-guidance-scale would be ignored: the model has no generator, and draws nothing; leave it out"
    if config.data.latent_cache is not None and not any(unit.image and unit.image.latents for unit in graph.generators):
        yield "--latent-cache would be ignored: no generator of the model makes latents; leave it out, or give one `latents`"
    images = [unit.image for unit in graph.item_encoders if unit.image is not None]
    if config.data.video_max_pixels is not None and not any(each.image_size is each.longest_side is None for each in images):
        yield "--video-max-pixels would be ignored: no encoder takes images at native resolution within bounds; leave it out"
    num_ears = sum(unit.audio is not None for unit in graph.item_encoders)
    if config.data.video_sound and num_ears != 1:
        yield f"--video-sound needs one encoder of sound that hears videos, but the model has {num_ears}; leave it out"
    for unit in graph.units:
        if unit.module is not None and unit.module.callbacks and not config.model.allow_callbacks:
            yield (
                f"unit '{unit.name}', module: {unit.module.callbacks[0]} is a program that the model file wants to run; add "
                "--allow-callbacks if you trust it, or take it out"
            )


def _problems_with_model(config: RunConfig, graph: ModelGraph) -> Iterator[str]:
    """Yield flags that mean nothing to this model, or ask more of it than it can do."""
    folder = Path(config.checkpoint.load_hf or graph.backbone.weights or os.devnull)
    theirs = next((name for name in _TOKENIZER_FILES if (folder / name).is_file()), None)
    if theirs is not None and config.data.tokenizer_type == "ByteTokenizer":
        yield (
            f"--tokenizer-type ByteTokenizer: the LLM's weights in {folder} know the tokens of {theirs} there, whose ids are not "
            "those of bytes; give --tokenizer-type HuggingFaceTokenizer --tokenizer-model and the path of its tokenizer.json"
        )
    for flag in all_flags() if not graph.encoders else ():
        if flag.name in ENCODER_FLAGS and flag.name in config.given and value_of(config, flag.name) != flag.default:
            yield f"{flag.flag} would be ignored: {ENCODER_FLAGS[flag.name]}, and the model has no encoder; leave it out"
    for name in config.training.declared_costs:
        if name not in graph.unit_names:
            yield f"--unit-costs {name}: the model has no such unit; its units are {', '.join(graph.unit_names)}"
    if config.training.merge_encoders and len(graph.encoders) == 1:
        yield f"--merge-encoders would be ignored: '{graph.encoders[0].name}' is the only encoder of the model; leave it out"
    _, longest = graph.backbone.transformer.rotary_dynamic_scaling or (1.0, float("inf"))
    if config.data.seq_length > longest:
        yield (
            f"--seq-length {config.data.seq_length} is beyond the {longest:.0f} tokens from which on the model scales its rotary "
            "positions (rotary_dynamic_scaling), which is not computed here; lower it"
        )


def _check_layers_can_be_built(graph: ModelGraph) -> None:
    check_autoencoders(graph)
    for unit in graph.units:
        audio = unit.audio if unit.module is None else None
        if audio is not None and audio.tokens_per_second != 50:
            raise ModelError(
                f"unit '{unit.name}': tokens_per_second {audio.tokens_per_second} can be planned and simulated but not "
                "trained; set it to 50, two frames of 10 ms a token"
            )
        if audio is not None and unit.transformer.has_rotary_positions:
            raise ModelError(
                f"unit '{unit.name}' takes audio, to which its first layer adds positions; set has_rotary_positions: false"
            )
        for index, kind in enumerate(unit.layer_kinds or ()):
            if not LAYER_KINDS[kind].is_built_in(unit):
                raise ModelError(
                    f"unit '{unit.name}', layers[{index}]: '{kind}' can be planned and simulated but not trained yet; "
                    "use another kind"
                )


def check_plan(config: RunConfig, *, graph: ModelGraph, plan: Plan) -> None:
    """Check the rules that depend on the parallel sizes; raises ConfigError for the first broken one."""
    for problem in chain(
        _problems_of_sizes(config, plan),
        _problems_of_context(config, graph, plan),
        _problems_of_shares(config, graph, plan),
        problems_of_schedule(config, graph, plan),
        _problems_of_fp8(config, graph, plan),
        _problems_of_buffers(config, graph, plan),
    ):
        raise ConfigError(problem)


def _problems_of_fp8(config: RunConfig, graph: ModelGraph, plan: Plan) -> Iterator[str]:
    if config.model.fp8_format is None:
        return
    sizes = {unit: max(plan.units[unit.name].tensor_sizes) for unit in graph.units}
    products = [each for unit, size in sizes.items() for each in engine_products(graph, unit, size, config.model.fp8_recipe)]
    if not any(product.is_in_fp8 for product in products):
        multiple, found = fp8_multiple(config.model.fp8_recipe), sorted({each.widths for each in products})
        shown = ", ".join(" x ".join(map(str, widths)) for widths in found) or "none by Transformer Engine"
        yield (
            f"--fp8-format {config.model.fp8_format} would be ignored: products in FP8 have widths that are multiples of "
            f"{multiple} with --fp8-recipe {config.model.fp8_recipe}, found {shown} on each rank; leave it out, or choose other "
            "tensor parallel sizes"
        )


def _problems_of_buffers(config: RunConfig, graph: ModelGraph, plan: Plan) -> Iterator[str]:
    if (rows := config.parallelism.tp_comm_overlap_rows) is None:
        return
    unit = plan.units[graph.backbone.name]
    groups = [group for replica in unit.replicas for stage in replica.stages for group in unit.tensor_parallel_groups(stage)]
    size = max(unit.tensor_sizes)
    blocks = [tuple(range(first, first + size)) for first in range(0, plan.num_ranks, size)]
    if graph.backbone.needs_local_layers or rows % size or plan.num_ranks % size or not set(map(tuple, groups)) <= set(blocks):
        yield (
            f"--tp-comm-overlap-rows {rows}: user buffers are for an LLM with layers of Transformer Engine, and lie on blocks of "
            "as many ranks as its tensor parallel size, which divides their rows and the number of ranks; its groups are "
            f"{', '.join(str(list(group)) for group in groups[:4])} of {plan.num_ranks} ranks; choose other sizes or leave it out"
        )


_NEEDED_SIZES = {
    "sequence_parallel": ("tensor", "--tensor-model-parallel-size 2"),
    "tp_comm_overlap": ("tensor", "--tensor-model-parallel-size 2"),
    "context_parallel_distribution": ("context", "--context-parallel-size 2"),
    "context_parallel_block_size": ("context", "--context-parallel-size 2"),
}
"""Field -> the parallel size that some unit must have above 1, and such a size."""


def _problems_of_sizes(config: RunConfig, plan: Plan) -> Iterator[str]:
    units = plan.units.values()
    tensor_size, context_size = max(max(unit.tensor_sizes) for unit in units), max(unit.context_parallel_size for unit in units)
    largest = {"tensor": tensor_size, "context": context_size}
    for name, (kind, example) in _NEEDED_SIZES.items():
        if name in config.given and value_of(config, name) and largest[kind] == 1:
            yield (
                f"{shown_flag(name)} would be ignored: every unit's {kind} parallel size is 1; raise one (such as {example}) or "
                "leave it out"
            )
    shared = {name: unit for name, unit in plan.units.items() if unit.data_parallel_size * unit.context_parallel_size > 1}
    if config.parallelism.shards_weights and not shared:
        yield (
            "--data-parallel-sharding-strategy optim_grads_params would be ignored: no two ranks hold the same weights; raise a "
            f"unit's data parallel size (such as --{LLM}-data-parallel-size 2) or leave it out"
        )
    if (count := config.parallelism.num_state_copies) is None:
        return
    flag = f"--num-distributed-optimizer-instances {count}"
    if not shared:
        yield f"{flag} would be ignored: no two ranks hold the same weights; raise a data parallel size or leave it out"
    for name, unit in shared.items():
        size = unit.data_parallel_size
        if unit.expert_parallel_size > 1:
            yield f"{flag}: replicas of unit '{name}' hold different experts; leave it out"
        elif size % count:
            fits = math.gcd(*(each.data_parallel_size for each in shared.values()))
            choice = ", ".join(str(each) for each in range(2, fits + 1) if fits % each == 0)
            yield (
                f"{flag} does not divide the {size} replicas of unit '{name}'; "
                + (f"choose one of {choice}, or leave it out" if choice else "leave it out, or change the data parallel sizes")
            )


def _problems_of_context(config: RunConfig, graph: ModelGraph, plan: Plan) -> Iterator[str]:
    spread = [graph.unit(name) for name, unit in plan.units.items() if unit.context_parallel_size > 1]
    if spread and config.model.attention_backend == "sequences":
        yield (
            f"--attention-backend sequences needs whole sequences, which unit '{spread[0].name}' spreads over "
            f"{plan.units[spread[0].name].context_parallel_size} ranks; use --attention-backend blocks"
        )
    block_size = config.parallelism.context_parallel_block_size
    if spread and config.model.attention_backend == "triton" and (block_size < 16 or block_size & (block_size - 1)):
        yield (
            f"--context-parallel-block-size {block_size} is no size for --attention-backend triton; choose a power of two of at "
            "least 16"
        )
    for unit in spread:
        if unit.role is Role.ENCODER and block_size % unit.merge_factor:
            yield (
                f"--context-parallel-block-size {block_size} would cut what unit '{unit.name}' merges, "
                f"{unit.merge_factor} patches at a time; choose a multiple of {unit.merge_factor}"
            )


def _problems_of_shares(config: RunConfig, graph: ModelGraph, plan: Plan) -> Iterator[str]:
    """Yield what replicas that differ cannot have, and batches that are too small or too large for the replicas."""
    unlike = [name for name, unit in plan.units.items() if unit.is_unlike]
    if unlike and config.parallelism.shards_weights:
        yield (
            f"--data-parallel-sharding-strategy optim_grads_params: the replicas of unit '{unlike[0]}' differ in their stages, "
            "and replicas that share weights must hold the same ones; leave it out, or give all replicas the same stages"
        )
    balance, batch, microbatch = config.training.balance, config.training.global_batch_size, config.training.micro_batch_size
    whole = [name for name, other in BALANCERS.items() if other.keeps_samples_whole or other.deals_shares]
    if has_unequal_shares(graph, plan) and balance not in whole:
        what = f"the replicas of unit '{unlike[0]}' differ" if unlike else "the plan gives the LLM's replicas shares of their own"
        yield f"--balance {balance} cannot deal unequal shares of a batch: {what}; choose one of {', '.join(whole)}"
    elif has_unequal_shares(graph, plan) and config.training.refine_encoders:
        yield "--refine-encoders cannot deal unequal shares of a batch, which the plan gives its replicas; leave it out"
    num_replicas = plan.units[graph.backbone.name].data_parallel_size
    if batch < num_replicas:
        yield (
            f"--global-batch-size {batch} leaves some of the {num_replicas} replicas of unit '{graph.backbone.name}' without a "
            f"sample; raise it to at least {num_replicas}, or lower --{LLM}-data-parallel-size"
        )
    if (count := batch // (microbatch * num_replicas)) > MAX_MICROBATCHES:
        yield (
            f"--global-batch-size {batch} gives a replica of the LLM {count} microbatches of --micro-batch-size {microbatch} in "
            f"one step, and no schedule is made of more than {MAX_MICROBATCHES}; lower the former, raise the latter or "
            f"--{LLM}-data-parallel-size"
        )
