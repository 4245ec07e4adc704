"""Flags that would have no effect, or set the same thing twice, as tables; `cross_checks` and the page of flags read them."""

from collections.abc import Callable
from typing import NamedTuple

from megatron.runtime.flags.configuration import RunConfig
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


_NO_DECAY = "--lr-decay-style constant never lowers the learning rate; choose another style or leave it out"
_NO_WSD = "it belongs to --lr-decay-style WSD; choose that style or leave it out"
_NO_EVALUATION = "nothing is evaluated; add --eval-iters N or leave it out"
_NO_MANIFEST = "--data-path digits reads no image files; use a manifest or leave it out"
_NO_INDEX = "--data-path digits has no index; leave it out"
_NO_SAVE = "no checkpoint is written; add --save DIR or leave it out"
_NO_LOAD = "no checkpoint is resumed; add --load DIR or leave it out"
_EMULATED = "--emulate waits as long as its table says, whatever would compute; leave one of them out"
_FINETUNE = "--finetune takes over the weights alone; leave it out"
_NO_WEIGHTS = "it takes over the weights of --load; add --load DIR or leave it out"
_WEIGH = " and ".join(name for name, row in BALANCERS.items() if row.weighs_units)
_DEFER = " and ".join(name for name, row in BALANCERS.items() if row.defers)
_PLACE_ITEMS = " and ".join(name for name, row in BALANCERS.items() if row.places_items)
_BY_COSTS = " and ".join(name for name, row in BUILDERS.items() if row.needs_costs)
_PREDICT = " and ".join(name for name, row in BALANCERS.items() if row.needs_costs or row.judges)
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
        lambda c: c.data.chat_template is not None and c.data.is_digits,
        "digits are asked about in turns of Braid's own; leave it out",
    ),
    IgnoredFlag(
        "balance_granularity",
        ("balance",),
        lambda c: not BALANCERS[c.training.balance].places_items,
        f"only --balance {_PLACE_ITEMS} place an encoder's items by themselves; choose one or leave it out",
    ),
    *(
        IgnoredFlag(
            name,
            ("balance",),
            lambda c: not BALANCERS[c.training.balance].defers,
            f"only --balance {_DEFER} group an encoder's samples otherwise than the LLM's; choose one or leave it out",
        )
        for name in ("balance_num_microbatches", "merge_encoders")
    ),
    IgnoredFlag(
        "unit_costs",
        ("balance",),
        lambda c: bool(c.training.unit_costs) and not BALANCERS[c.training.balance].weighs_units,
        f"only --balance {_WEIGH} balance units by costs of their own; choose one or leave it out",
    ),
    IgnoredFlag(
        "cluster",
        ("balance", "balance_num_microbatches", "schedule", "plan"),
        lambda c: not goes_by_durations(c) and not c.parallelism.plans_itself and not c.parallelism.cuts_by_seconds,
        f"only --balance {_PREDICT} and --schedule {_BY_COSTS} go by durations, and sizes with pipeline stages; choose one or "
        "leave it out",
    ),
    *(
        IgnoredFlag(
            name, ("elastic",), lambda c: not c.parallelism.elastic, "a lost process ends the run; add --elastic or leave it out"
        )
        for name in ("elastic_timeout", "fault_tolerance")
    ),
    *(
        IgnoredFlag(
            name, ("plan",), lambda c: not c.parallelism.plans_itself, "the plan is given; use --plan auto or leave it out"
        )
        for name in ("plan_time_budget", "plan_review_iters", "replan")
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
        lambda c: not c.data.is_digits,
        "the samples come from a manifest; use --data-path digits or leave it out",
    ),
    IgnoredFlag(
        "split",
        ("data_path",),
        lambda c: c.data.is_digits,
        "--data-path digits holds out handwritten digits of its own; leave it out",
    ),
    IgnoredFlag(
        "allow_outside_paths",
        ("data_path",),
        lambda c: c.data.allow_outside_paths and c.data.is_digits,
        _NO_MANIFEST,
    ),
    IgnoredFlag("producers", ("data_path",), lambda c: bool(c.data.producers) and c.data.is_digits, _NO_MANIFEST),
    IgnoredFlag("producers", ("emulate",), lambda c: bool(c.data.producers) and c.training.emulate is not None, _EMULATED),
    IgnoredFlag(
        "producer_token",
        ("producers",),
        lambda c: not c.data.producers,
        "nothing is decoded elsewhere; add --producers HOST:PORT or leave it out",
    ),
    IgnoredFlag("data_cache_path", ("data_path",), lambda c: c.data.is_digits, _NO_INDEX),
    IgnoredFlag("max_image_pixels", ("data_path",), lambda c: c.data.is_digits, _NO_MANIFEST),
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
    IgnoredFlag("new_phase", ("load",), lambda c: c.checkpoint.new_phase and c.checkpoint.load is None, _NO_LOAD),
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
        "layer_partition",
        ("plan",),
        lambda c: c.parallelism.plan is not None,
        "a plan says which layers every stage has; leave it out",
    ),
    IgnoredFlag(
        "layer_partition",
        (),
        lambda c: all(sizes.pipeline_parallel_size == 1 for sizes in c.parallelism.units.values()),
        "no unit has several pipeline stages; raise a pipeline parallel size (such as --llm-pp 2) or leave it out",
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
