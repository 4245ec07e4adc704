"""Flags that would have no effect, or set the same thing twice, as tables; `cross_checks` and the page of flags read them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import all_flags, value_of
from multimodal.balance import BALANCERS
from multimodal.schedule.builders import BUILDERS


class IgnoredFlag(NamedTuple):
    """A flag that has no effect under some condition."""

    name: str
    """The field's name."""
    because_of: tuple[str, ...]
    """Fields that determine this. If one of them is on the command line, the flag in a configuration file is dropped."""
    is_ignored: Callable[[RunConfig], bool]
    reason: str


def goes_by_durations(config: RunConfig) -> bool:
    """Return True if predicted durations determine anything in a run."""
    balancer = BALANCERS[config.training.balance]
    is_predicted = balancer.defers and config.training.balance_num_microbatches == "predicted"
    return balancer.needs_costs or balancer.judges or is_predicted or BUILDERS[config.training.schedule].needs_costs


def _rows(names: str, causes: str, is_ignored: Callable[[RunConfig], bool], reason: str) -> Iterator[IgnoredFlag]:
    """Yield the rows of several flags, whose names are parted by spaces."""
    for name in names.split():
        yield IgnoredFlag(name, tuple(causes.split()), is_ignored, f"{reason} or leave it out")


def _needing(names: str, causes: str, reason: str) -> Iterator[IgnoredFlag]:
    """Yield the rows of flags that need one of others to be set."""
    return _rows(names, causes, lambda c: not any(value_of(c, cause) for cause in causes.split()), reason)


_WEIGH = " and ".join(name for name, row in BALANCERS.items() if row.weighs_units)
_DEFER = " and ".join(name for name, row in BALANCERS.items() if row.defers)
_PLACE_ITEMS = " and ".join(name for name, row in BALANCERS.items() if row.places_items)
_BY_COSTS = " and ".join(name for name, row in BUILDERS.items() if row.needs_costs)
_PREDICT = " and ".join(name for name, row in BALANCERS.items() if row.needs_costs or row.judges)
_NO_LOAD = "no checkpoint is resumed; add --load DIR"
_NO_FILES = "a program (digits, FILE.py) reads no image files; use a manifest"
_EMULATED = "--emulate waits as long as its table says, whatever would compute; leave one of them out"
_FINETUNE = "--finetune takes over the weights alone; leave it out"

IGNORED_FLAGS: tuple[IgnoredFlag, ...] = (
    *_rows(
        "min_lr lr_decay_iters",
        "lr_decay_style",
        lambda c: c.optimizer.lr_decay_style == "constant",
        "--lr-decay-style constant never lowers the learning rate; choose another style",
    ),
    *_rows(
        "lr_wsd_decay_iters lr_wsd_decay_style",
        "lr_decay_style",
        lambda c: c.optimizer.lr_decay_style != "WSD",
        "it belongs to --lr-decay-style WSD; choose that style",
    ),
    *_needing("lr_warmup_init", "lr_warmup_iters lr_warmup_fraction", "there is no warm-up; add --lr-warmup-iters N"),
    *_needing("lora_alpha lora_targets", "lora_rank", "there are no adapters; add --lora-rank N"),
    *_rows(
        "tokenizer_model",
        "tokenizer_type",
        lambda c: c.data.tokenizer_type == "ByteTokenizer",
        "a ByteTokenizer needs no file; add --tokenizer-type HuggingFaceTokenizer",
    ),
    *_rows(
        "chat_template",
        "tokenizer_type",
        lambda c: c.data.tokenizer_type == "ByteTokenizer",
        "bytes have no special tokens that a template could write; add --tokenizer-type HuggingFaceTokenizer",
    ),
    IgnoredFlag(
        "chat_template",
        ("data_path",),
        lambda c: c.data.sample_program is not None,
        "a program's samples (digits, FILE.py) come in turns of Braid's own; leave it out",
    ),
    *_rows(
        "balance_granularity",
        "balance",
        lambda c: not BALANCERS[c.training.balance].places_items,
        f"only --balance {_PLACE_ITEMS} place an encoder's items by themselves; choose one",
    ),
    *_rows(
        "balance_num_microbatches merge_encoders",
        "balance",
        lambda c: not BALANCERS[c.training.balance].defers,
        f"only --balance {_DEFER} group an encoder's samples otherwise than the LLM's; choose one",
    ),
    *_rows(
        "unit_costs",
        "balance",
        lambda c: not BALANCERS[c.training.balance].weighs_units,
        f"only --balance {_WEIGH} balance units by costs of their own; choose one",
    ),
    *_rows(
        "cluster",
        "balance balance_num_microbatches schedule plan",
        lambda c: not goes_by_durations(c) and not c.parallelism.plans_itself and not c.parallelism.cuts_by_seconds,
        f"only --balance {_PREDICT} and --schedule {_BY_COSTS} go by durations, and sizes with pipeline stages; choose one",
    ),
    *_needing("elastic_timeout fault_tolerance", "elastic", "a lost process ends the run; add --elastic"),
    *_rows(
        "plan_time_budget plan_review_iters replan",
        "plan",
        lambda c: not c.parallelism.plans_itself,
        "the plan is given; use --plan auto",
    ),
    *_needing("tp_comm_overlap_parts", "tp_comm_overlap", "tensor parallel collectives are not cut; add --tp-comm-overlap"),
    IgnoredFlag(
        "num_workers",
        ("lengths_from",),
        lambda c: c.data.lengths_from == "decode",
        "--lengths-from decode loads in a thread, as samples are exchanged; leave it out",
    ),
    *_rows(
        "program_samples",
        "data_path",
        lambda c: c.data.sample_program is None,
        "the samples are read, not made; use --data-path digits or FILE.py",
    ),
    IgnoredFlag(
        "split",
        ("data_path",),
        lambda c: c.data.sample_program is not None,
        "a program (digits, FILE.py) holds out samples of its own; leave it out",
    ),
    *_rows("allow_outside_paths producers", "data_path", lambda c: c.data.sample_program is not None, _NO_FILES),
    IgnoredFlag("producers", ("emulate",), lambda c: c.training.emulate is not None, _EMULATED),
    *_needing("producer_token", "producers", "nothing is decoded elsewhere; add --producers HOST:PORT"),
    *_rows(
        "data_cache_path",
        "data_path",
        lambda c: c.data.sample_program is not None,
        "a program's samples (digits, FILE.py) have no index; use a manifest",
    ),
    *_rows("max_image_pixels", "data_path", lambda c: c.data.sample_program is not None, _NO_FILES),
    *_needing("eval_interval eval_blank_images", "eval_iters", "nothing is evaluated; add --eval-iters N"),
    *_needing(
        "save_interval save_retain_interval async_save keep_last_checkpoints",
        "save",
        "no checkpoint is written; add --save DIR",
    ),
    *_needing("load_optim load_rng", "load", _NO_LOAD),
    IgnoredFlag("load_optim", ("finetune",), lambda c: c.checkpoint.finetune, _FINETUNE),
    IgnoredFlag("load_rng", ("finetune",), lambda c: c.checkpoint.finetune, _FINETUNE),
    *_needing("new_phase", "load", _NO_LOAD),
    *_needing("finetune", "load", "it takes over the weights of --load; add --load DIR"),
    *_needing("timeline_interval", "report_dir", "timelines are drawn into the report; add --report-dir DIR"),
    *_needing(
        "profile_step_start profile_step_end profile_ranks use_pytorch_profiler",
        "profile",
        "nothing is profiled; add --profile",
    ),
    *_needing(
        "wandb_exp_name wandb_entity wandb_save_dir",
        "wandb_project",
        "Weights & Biases gets nothing; add --wandb-project NAME",
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
    *_needing("fp8_recipe", "fp8_format", "no product is in FP8; add --fp8-format"),
    IgnoredFlag(
        "layer_partition",
        ("plan",),
        lambda c: c.parallelism.plan is not None,
        "a plan says which layers every stage has; leave it out",
    ),
    *_rows(
        "layer_partition",
        "",
        lambda c: all(sizes.pipeline_parallel_size == 1 for sizes in c.parallelism.units.values()),
        "no unit has several pipeline stages; raise a pipeline parallel size (such as --llm-pp 2)",
    ),
    IgnoredFlag(
        "colocate_units",
        ("model",),
        lambda c: len(c.parallelism.units) == 1,
        "the model has one unit, which has nobody to share ranks with; leave it out",
    ),
    IgnoredFlag(
        "attention_mask",
        ("model",),
        lambda c: c.model.attention_mask != "causal" and len(c.parallelism.units) == 1,
        "the model has one unit, so there are no items among its tokens; leave it out",
    ),
)


def ignored_flags(config: RunConfig) -> tuple[IgnoredFlag, ...]:
    """List the flags that were given but have no effect; a switch that is given as its default asks for none."""
    given = {flag.name for flag in all_flags() if flag.name in config.given and not flag.is_off(config)}
    return tuple(row for row in IGNORED_FLAGS if row.name in given and row.is_ignored(config))


ENCODER_FLAGS = {
    "attention_mask": "it says how the LLM sees items",
    "balance_granularity": "it says how their items are placed",
    "balance_num_microbatches": "it lowers the number where one sample's items would fill a microbatch",
    "rearrange_nodes": "it moves their batches",
    "merge_encoders": "it balances them as one",
    "eval_blank_images": "it blanks what they take",
}
"""Fields that have no meaning without an encoder -> the reason."""

EXCLUSIVE_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("lr_warmup_iters", "lr_warmup_fraction", "both set the length of the warm-up"),
    ("micro_batch_size", "tokens_per_microbatch", "both say how large a microbatch is"),
    ("finetune", "new_phase", "the former starts at step 0, the latter goes on"),
    ("finetune", "pretrained_checkpoint", "both start from weights alone; --finetune takes those of --load"),
    ("finetune", "load_hf", "both start from weights alone; --finetune takes those of --load"),
    ("pretrained_checkpoint", "load_hf", "both start from weights alone"),
    ("plan", "colocate_units", "a plan already says which ranks each unit has"),
)

LEFT_TO_THE_PLAN = ("schedule", "schedule_passes", "balance", "sequence_parallel", "tp_comm_overlap", "tokens_per_microbatch")
"""Fields that a run which plans by itself chooses with its plan, or cannot plan with."""

EXCLUSIVE_SIZES: tuple[tuple[str, str, str], ...] = (
    ("virtual_pipeline_size", "layers_per_virtual_stage", "both say how many virtual stages a pipeline rank holds"),
)
"""Exclusive sizes of one unit: two fields, and the reason."""
