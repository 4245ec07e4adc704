"""Combinations of flags that are refused, as tables of (condition, message); `cross_checks` reads them."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron.runtime.checkpoint.folder import folder_of_run
from megatron.runtime.flags.configuration import RunConfig
from multimodal.balance import BALANCERS
from multimodal.data.sample_source import PILLOW_MAX_PIXELS
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES, PassRow


class IgnoredFlag(NamedTuple):
    """A flag that has no effect under some condition."""

    name: str
    """The field's name."""
    because_of: tuple[str, ...]
    """Fields that decide it. When one of them was given on the command line, the flag of a configuration file just yields."""
    is_ignored: Callable[[RunConfig], bool]
    reason: str


class Rule(NamedTuple):
    """A combination that cannot be run."""

    is_broken: Callable[[RunConfig], bool]
    message: str
    """A format string over `c`, the configuration."""


def _passes(config: RunConfig) -> list[PassRow]:
    """List the passes that are named; `check_schedule` reports wrong names."""
    return [PASSES[name] for name in config.training.schedule_passes.split(",") if name in PASSES]


_NO_DECAY = "--lr-decay-style constant never lowers the learning rate; choose another style or leave it out"
_NO_WSD = "it belongs to --lr-decay-style WSD; choose that style or leave it out"
_NO_EVALUATION = "nothing is evaluated; add --eval-iters N or leave it out"
_NO_MANIFEST = "--data-path digits reads no image files; use a manifest or leave it out"
_NO_SAVE = "no checkpoint is written; add --save DIR or leave it out"
_NO_LOAD = "no checkpoint is resumed; add --load DIR or leave it out"
_EMULATED = "--emulate waits as long as its table says, whatever would compute; leave one of them out"
_FINETUNE = "--finetune takes over the weights alone; leave it out"
_NO_WEIGHTS = "it takes over the weights of --load; add --load DIR or leave it out"
_PLACE_ITEMS = " and ".join(name for name, row in BALANCERS.items() if row.places_items)
_BY_COSTS = " and ".join(name for name, row in BUILDERS.items() if row.needs_costs)
_PREDICT = " and ".join(name for name, row in BALANCERS.items() if row.needs_costs)
_SPLITTING_SCHEDULES = ", ".join(f"--schedule {name}" for name, row in BUILDERS.items() if row.splits_backwards)
_SPLITTING_PASSES = ", ".join(name for name, row in PASSES.items() if row.splits_backwards)
_ONCE_A_STEP = " and ".join(name for name, row in PASSES.items() if not row.works_with_sharded_weights)
_NO_PROJECT = "Weights & Biases gets nothing; add --wandb-project NAME or leave it out"
_STYLE, _EVALUATION = ("lr_decay_style",), ("eval_iters",)

IGNORED_FLAGS: tuple[IgnoredFlag, ...] = (
    IgnoredFlag("min_lr", _STYLE, lambda c: c.optimizer.lr_decay_style == "constant", _NO_DECAY),
    IgnoredFlag("lr_decay_iters", _STYLE, lambda c: c.optimizer.lr_decay_style == "constant", _NO_DECAY),
    IgnoredFlag("lr_wsd_decay_iters", _STYLE, lambda c: c.optimizer.lr_decay_style != "WSD", _NO_WSD),
    IgnoredFlag("lr_wsd_decay_style", _STYLE, lambda c: c.optimizer.lr_decay_style != "WSD", _NO_WSD),
    IgnoredFlag(
        "lr_warmup_init",
        ("lr_warmup_iters", "lr_warmup_fraction"),
        lambda c: not c.optimizer.lr_warmup_iters and not c.optimizer.lr_warmup_fraction,
        "there is no warm-up; add --lr-warmup-iters N or leave it out",
    ),
    *(
        IgnoredFlag(
            name, ("lora_rank",), lambda c: c.model.lora_rank is None, "there are no adapters; add --lora-rank N or leave it out"
        )
        for name in ("lora_alpha", "lora_targets")
    ),
    IgnoredFlag(
        "tokenizer_model",
        ("tokenizer_type",),
        lambda c: c.data.tokenizer_type == "ByteTokenizer",
        "a ByteTokenizer needs no file; add --tokenizer-type HuggingFaceTokenizer or leave it out",
    ),
    IgnoredFlag(
        "chat_template",
        ("tokenizer_type",),
        lambda c: c.data.chat_template is not None and c.data.tokenizer_type == "ByteTokenizer",
        "bytes have no special tokens that a template could write; add --tokenizer-type HuggingFaceTokenizer or leave it out",
    ),
    IgnoredFlag(
        "chat_template",
        ("data_path",),
        lambda c: c.data.chat_template is not None and c.data.data_path == "digits",
        "digits are asked about in turns of Braid's own; leave it out",
    ),
    IgnoredFlag(
        "balance_granularity",
        ("balance",),
        lambda c: not BALANCERS[c.training.balance].places_items,
        f"only --balance {_PLACE_ITEMS} place an encoder's items by themselves; choose one or leave it out",
    ),
    IgnoredFlag(
        "cluster",
        ("balance", "schedule"),
        lambda c: not BALANCERS[c.training.balance].needs_costs and not BUILDERS[c.training.schedule].needs_costs,
        f"only --balance {_PREDICT} and --schedule {_BY_COSTS} go by durations; choose one or leave it out",
    ),
    IgnoredFlag(
        "tp_comm_overlap_parts",
        ("tp_comm_overlap",),
        lambda c: not c.parallelism.tp_comm_overlap,
        "tensor parallel collectives are not cut; add --tp-comm-overlap or leave it out",
    ),
    IgnoredFlag(
        "num_workers",
        ("lengths_from",),
        lambda c: c.data.lengths_from == "decode",
        "--lengths-from decode loads in a thread, as samples are exchanged; leave it out",
    ),
    IgnoredFlag(
        "digits_samples",
        ("data_path",),
        lambda c: c.data.data_path != "digits",
        "the samples come from a manifest; use --data-path digits or leave it out",
    ),
    IgnoredFlag(
        "split",
        ("data_path",),
        lambda c: c.data.data_path == "digits",
        "--data-path digits holds out handwritten digits of its own; leave it out",
    ),
    IgnoredFlag(
        "allow_outside_paths",
        ("data_path",),
        lambda c: c.data.allow_outside_paths and c.data.data_path == "digits",
        _NO_MANIFEST,
    ),
    IgnoredFlag("max_image_pixels", ("data_path",), lambda c: c.data.data_path == "digits", _NO_MANIFEST),
    IgnoredFlag("eval_interval", _EVALUATION, lambda c: not c.evaluation.eval_iters, _NO_EVALUATION),
    IgnoredFlag(
        "eval_blank_images",
        _EVALUATION,
        lambda c: c.evaluation.eval_blank_images and not c.evaluation.eval_iters,
        _NO_EVALUATION,
    ),
    IgnoredFlag("save_interval", ("save",), lambda c: c.checkpoint.save is None, _NO_SAVE),
    IgnoredFlag("save_retain_interval", ("save",), lambda c: c.checkpoint.save is None, _NO_SAVE),
    IgnoredFlag("async_save", ("save",), lambda c: c.checkpoint.async_save and c.checkpoint.save is None, _NO_SAVE),
    IgnoredFlag("keep_last_checkpoints", ("save",), lambda c: c.checkpoint.save is None, _NO_SAVE),
    IgnoredFlag("load_optim", ("load",), lambda c: not c.checkpoint.load_optim and c.checkpoint.load is None, _NO_LOAD),
    IgnoredFlag("load_rng", ("load",), lambda c: not c.checkpoint.load_rng and c.checkpoint.load is None, _NO_LOAD),
    IgnoredFlag("load_optim", ("finetune",), lambda c: not c.checkpoint.load_optim and c.checkpoint.finetune, _FINETUNE),
    IgnoredFlag("load_rng", ("finetune",), lambda c: not c.checkpoint.load_rng and c.checkpoint.finetune, _FINETUNE),
    IgnoredFlag("finetune", ("load",), lambda c: c.checkpoint.finetune and c.checkpoint.load is None, _NO_WEIGHTS),
    IgnoredFlag(
        "timeline_interval",
        ("report_dir",),
        lambda c: c.logging.report_dir is None,
        "timelines are drawn into the report; add --report-dir DIR or leave it out",
    ),
    *(
        IgnoredFlag(name, ("profile",), lambda c: not c.logging.profile, "nothing is profiled; add --profile or leave it out")
        for name in ("profile_step_start", "profile_step_end", "profile_ranks", "use_pytorch_profiler")
    ),
    *(
        IgnoredFlag(name, ("wandb_project",), lambda c: c.logging.wandb_project is None, _NO_PROJECT)
        for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir")
    ),
    *(
        IgnoredFlag(
            name,
            ("emulate",),
            lambda c: c.training.emulate is not None and not BALANCERS[c.training.balance].needs_costs,
            _EMULATED,
        )
        for name in ("transformer_impl", "attention_backend", "recompute_granularity", "fp8_format")
    ),
    IgnoredFlag(
        "fp8_recipe",
        ("fp8_format",),
        lambda c: c.model.fp8_format is None,
        "no product is in FP8; add --fp8-format or leave it out",
    ),
    IgnoredFlag(
        "colocate_units",
        ("model",),
        lambda c: c.parallelism.colocate_units and len(c.parallelism.units) == 1,
        "the model has one unit, which has nobody to share ranks with; leave it out",
    ),
    IgnoredFlag(
        "attention_mask",
        ("model",),
        lambda c: c.model.attention_mask != "causal" and len(c.parallelism.units) == 1,
        "the model has one unit, so there are no items among its tokens; leave it out",
    ),
)

ENCODER_FLAGS = {
    "attention_mask": "it says how the LLM sees items",
    "balance_granularity": "it says how their items are placed",
    "eval_blank_images": "it blanks what they take",
}
"""Fields that mean nothing without an encoder -> why."""

EXCLUSIVE_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("lr_warmup_iters", "lr_warmup_fraction", "both set the length of the warm-up"),
    ("finetune", "pretrained_checkpoint", "both start from weights alone; --finetune takes those of --load"),
    ("finetune", "load_hf", "both start from weights alone; --finetune takes those of --load"),
    ("pretrained_checkpoint", "load_hf", "both start from weights alone"),
    ("plan", "colocate_units", "a plan already says which ranks each unit has"),
)

EXCLUSIVE_SIZES: tuple[tuple[str, str, str], ...] = (
    ("virtual_pipeline_size", "layers_per_virtual_stage", "both say how many virtual stages a pipeline rank holds"),
)
"""The rules of one unit's flags."""

RULES: tuple[Rule, ...] = (
    Rule(
        lambda c: c.training.micro_batch_size > c.training.global_batch_size,
        "--micro-batch-size {c.training.micro_batch_size} is larger than --global-batch-size {c.training.global_batch_size}; "
        "lower the former or raise the latter",
    ),
    Rule(
        lambda c: c.optimizer.min_lr > c.optimizer.lr,
        "--min-lr {c.optimizer.min_lr} is above --lr {c.optimizer.lr}; lower it",
    ),
    Rule(
        lambda c: c.optimizer.lr_warmup_init > c.optimizer.lr,
        "--lr-warmup-init {c.optimizer.lr_warmup_init} is above --lr {c.optimizer.lr}; lower it",
    ),
    Rule(
        lambda c: c.optimizer.lr_warmup_iters >= (c.optimizer.lr_decay_iters or c.training.train_iters),
        "--lr-warmup-iters {c.optimizer.lr_warmup_iters} leaves no step for the decay, which ends at --lr-decay-iters "
        "(by default --train-iters {c.training.train_iters}); lower the former or raise the latter",
    ),
    Rule(
        lambda c: c.optimizer.lr_decay_style == "WSD" and c.optimizer.lr_wsd_decay_iters is None,
        "--lr-decay-style WSD needs the length of its final annealing; add --lr-wsd-decay-iters N",
    ),
    Rule(
        lambda c: (c.optimizer.lr_wsd_decay_iters or 0) > (c.optimizer.lr_decay_iters or c.training.train_iters),
        "--lr-wsd-decay-iters {c.optimizer.lr_wsd_decay_iters} is longer than the whole decay, which ends at --lr-decay-iters "
        "(by default --train-iters {c.training.train_iters}); lower it",
    ),
    Rule(
        lambda c: c.data.tokenizer_type == "HuggingFaceTokenizer" and c.data.tokenizer_model is None,
        "--tokenizer-type HuggingFaceTokenizer needs its file; add --tokenizer-model PATH",
    ),
    Rule(
        lambda c: not _proportions(c.data.split),
        "--split {c.data.split!r} must be one to three proportions (training, validation, test), the first above 0, such as "
        "969,30,1",
    ),
    Rule(
        lambda c: c.data.max_image_pixels > PILLOW_MAX_PIXELS,
        f"--max-image-pixels {{c.data.max_image_pixels}} is more than {PILLOW_MAX_PIXELS}, beyond which Pillow opens no image; "
        "lower it, and scale larger images down",
    ),
    Rule(
        lambda c: c.evaluation.eval_iters > 0 and c.data.data_path != "digits" and not any(_proportions(c.data.split)[1:2]),
        "--eval-iters {c.evaluation.eval_iters} needs validation samples, but --split {c.data.split} leaves none; use a second "
        "proportion above 0 or --eval-iters 0",
    ),
    Rule(
        lambda c: c.logging.profile and c.logging.profile_step_start >= c.logging.profile_step_end,
        "--profile-step-start {c.logging.profile_step_start} is not before --profile-step-end {c.logging.profile_step_end}: no "
        "step is profiled; raise the latter",
    ),
    Rule(
        lambda c: min(c.logging.profile_ranks) < 0,
        "--profile-ranks {c.logging.profile_ranks}: ranks count from 0; leave out what is below",
    ),
    Rule(
        lambda c: c.logging.profile and not c.logging.use_pytorch_profiler and not _has_cuda(),
        "--profile starts CUDA's profiler, and there is no CUDA device; add --use-pytorch-profiler",
    ),
    Rule(
        lambda c: c.logging.use_pytorch_profiler and c.logging.report_dir is None,
        "--use-pytorch-profiler has no place to write to; add --report-dir DIR",
    ),
    Rule(
        lambda c: c.logging.wandb_project is not None and importlib.util.find_spec("wandb") is None,
        "--wandb-project {c.logging.wandb_project}: the package wandb is not installed; install it (pip install wandb), or leave "
        "it out",
    ),
    Rule(
        lambda c: c.model.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None,
        "--transformer-impl transformer_engine: Transformer Engine is not installed; install it or use --transformer-impl local",
    ),
    Rule(
        lambda c: c.model.transformer_impl == "transformer_engine" and not _has_cuda(),
        "--transformer-impl transformer_engine needs a CUDA device; use --transformer-impl local on a CPU",
    ),
    Rule(
        lambda c: c.model.transformer_impl == "transformer_engine" and c.training.dtype == "float64",
        "--transformer-impl transformer_engine has no float64; use --transformer-impl local for exact checks",
    ),
    Rule(
        lambda c: c.model.transformer_impl == "transformer_engine" and _splits_backwards(c) and not can_delay_weight_gradients(),
        "--transformer-impl transformer_engine splits backwards into input and weight gradients, as "
        f"{_SPLITTING_SCHEDULES} and --schedule-passes {_SPLITTING_PASSES} do, from version 2.3 on; install that, or use "
        "--transformer-impl local, or another schedule",
    ),
    Rule(
        lambda c: c.model.transformer_impl == "transformer_engine" and BUILDERS[c.training.schedule].runs_segments,
        "--schedule {c.training.schedule} runs pieces of layers, which Transformer Engine fuses; use --transformer-impl local, "
        "or another schedule",
    ),
    Rule(
        lambda c: c.model.fp8_format is not None and not _has_cuda(),
        "--fp8-format {c.model.fp8_format} needs a CUDA device; leave it out on a CPU",
    ),
    Rule(
        lambda c: c.model.fp8_format is not None and importlib.util.find_spec("transformer_engine") is None,
        "--fp8-format {c.model.fp8_format} runs by Transformer Engine's recipes, and that is not installed; install it, or leave "
        "the flag out",
    ),
    Rule(
        lambda c: c.model.fp8_format is not None and "transformer_impl" in c.given and c.model.transformer_impl == "local",
        "--fp8-format {c.model.fp8_format} needs layers of Transformer Engine; use --transformer-impl transformer_engine",
    ),
    Rule(
        lambda c: c.model.fp8_recipe == "delayed" and c.training.recompute_granularity == "full",
        "--fp8-recipe delayed takes scales from forwards before, and a forward that --recompute-granularity full repeats would "
        "count twice; use --fp8-recipe tensorwise, or leave out recomputation",
    ),
    Rule(
        lambda c: c.model.attention_backend == "flash" and c.model.attention_mask != "causal",
        "--attention-backend flash cannot evaluate --attention-mask {c.model.attention_mask}; use --attention-backend triton",
    ),
    Rule(
        lambda c: c.model.attention_backend == "flash" and not (_has_cuda() and _is_half(c)),
        "--attention-backend flash needs a CUDA device and --bf16; use --attention-backend sequences",
    ),
    Rule(
        lambda c: c.model.attention_backend == "sequences" and c.model.attention_mask != "causal",
        "--attention-backend sequences cannot evaluate --attention-mask {c.model.attention_mask}; use --attention-backend blocks",
    ),
    Rule(
        lambda c: c.model.attention_backend in ("flex", "triton") and not _has_cuda(),
        "--attention-backend {c.model.attention_backend} needs a CUDA device to train; use --attention-backend blocks on a CPU",
    ),
    Rule(
        lambda c: c.model.attention_backend == "triton" and importlib.util.find_spec("triton") is None,
        "--attention-backend triton: Triton is not installed; install it (pip install 'braid[triton]') or use "
        "--attention-backend blocks",
    ),
    Rule(
        lambda c: c.model.attention_backend == "triton" and c.training.dtype == "float64",
        "--attention-backend triton has no float64; use --attention-backend blocks for exact checks",
    ),
    Rule(
        lambda c: c.parallelism.tp_comm_overlap and c.model.transformer_impl == "transformer_engine",
        "--tp-comm-overlap cuts the collectives of --transformer-impl local; Transformer Engine's layers have an overlap of "
        "their own, in user buffers that Braid does not set up; use --transformer-impl local, or leave it out",
    ),
    Rule(
        lambda c: c.parallelism.tp_comm_overlap and c.training.emulate is not None,
        "--emulate waits as long as its table says, with or without --tp-comm-overlap; leave one of them out",
    ),
    Rule(
        lambda c: c.parallelism.shards_weights and c.model.transformer_impl == "transformer_engine",
        "--data-parallel-sharding-strategy optim_grads_params takes a layer's weights away between its forward and its backward, "
        "but layers of Transformer Engine keep casts and transposes of them; use --transformer-impl local, or "
        "--data-parallel-sharding-strategy optim",
    ),
    Rule(
        lambda c: c.parallelism.shards_weights and c.training.emulate is not None,
        "--emulate has no weights to gather, so --data-parallel-sharding-strategy optim_grads_params would show nothing; leave "
        "one of them out",
    ),
    Rule(
        lambda c: c.parallelism.shards_weights and not all(row.works_with_sharded_weights for row in _passes(c)),
        f"--schedule-passes {{c.training.schedule_passes}}: {_ONCE_A_STEP} move weights and gradients of a stage once a step, "
        "but --data-parallel-sharding-strategy optim_grads_params does whenever a layer computes; leave them out",
    ),
    Rule(
        lambda c: (
            c.training.emulate is not None
            and (
                bool(c.checkpoint.save or c.checkpoint.load or c.checkpoint.pretrained_checkpoint or c.evaluation.eval_iters)
                or bool(c.checkpoint.load_hf or c.checkpoint.save_hf or c.checkpoint.save_adapter)
            )
        ),
        "--emulate trains nothing, so there is nothing to save, resume or evaluate; leave out --save, --load, "
        "--pretrained-checkpoint, --load-hf, --save-hf, --save-adapter and --eval-iters",
    ),
    Rule(
        lambda c: c.checkpoint.load_hf is not None and importlib.util.find_spec("safetensors") is None,
        "--load-hf needs the package 'safetensors'; install it (pip install 'braid[hf]') or leave it out",
    ),
    Rule(
        lambda c: c.model.transformer_impl == "transformer_engine" and bool(c.checkpoint.load_hf or c.checkpoint.save_hf),
        "--transformer-impl transformer_engine keeps norms under other names, which --load-hf and --save-hf do not know; use "
        "--transformer-impl local",
    ),
    Rule(
        lambda c: c.checkpoint.finetune and _same_run(c.checkpoint.load, c.checkpoint.save),
        "--finetune starts at step 0 and --save {c.checkpoint.save} would mix its checkpoints with those that it starts from; "
        "give another --save",
    ),
    Rule(
        lambda c: _same_run(c.checkpoint.pretrained_checkpoint, c.checkpoint.save),
        "--pretrained-checkpoint starts at step 0 and --save {c.checkpoint.save} would mix its checkpoints with those that it "
        "starts from; give another --save",
    ),
    Rule(
        lambda c: (
            c.checkpoint.pretrained_checkpoint is not None
            and c.checkpoint.load is not None
            and not _same_folder(c.checkpoint.load, c.checkpoint.save)
        ),
        "--pretrained-checkpoint {c.checkpoint.pretrained_checkpoint} is for a run that starts from those weights and goes on "
        "from its own checkpoints, but --load {c.checkpoint.load} is not where --save writes; make --load and --save the same "
        "folder, or leave --pretrained-checkpoint or --load out",
    ),
    Rule(
        lambda c: (
            c.checkpoint.load_hf is not None
            and c.checkpoint.load is not None
            and not _same_folder(c.checkpoint.load, c.checkpoint.save)
        ),
        "--load-hf {c.checkpoint.load_hf} is for a run that starts from those weights and goes on from its own checkpoints, but "
        "--load {c.checkpoint.load} is not where --save writes; make --load and --save the same folder, or leave --load-hf or "
        "--load out",
    ),
)


def _same_run(source: Path | None, save: Path | None) -> bool:
    return source is not None and _same_folder(folder_of_run(source), save)


def _same_folder(first: Path, second: Path | None) -> bool:
    return second is not None and os.path.abspath(first) == os.path.abspath(second)


def _is_half(config: RunConfig) -> bool:
    """Whether a run on CUDA computes in bfloat16: unless something else is given."""
    return "dtype" not in config.given or config.training.dtype == "bfloat16"


def _splits_backwards(config: RunConfig) -> bool:
    return BUILDERS[config.training.schedule].splits_backwards or any(row.splits_backwards for row in _passes(config))


def can_delay_weight_gradients() -> bool:
    """Return whether the installed Transformer Engine has `delay_wgrad_compute`."""
    try:
        found = importlib.metadata.version("transformer_engine").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in found[:2]) >= (2, 3)


def _has_cuda() -> bool:
    import torch  # only here: reading flags should not wait for it

    return torch.cuda.is_available()


def _proportions(split: str) -> list[float]:
    """Parse a split; empty when it is none."""
    try:
        proportions = [float(part) for part in split.split(",")]
    except ValueError:
        return []
    is_split = len(proportions) <= 3 and all(0 <= part < float("inf") for part in proportions) and proportions[0] > 0
    return proportions if is_split else []
