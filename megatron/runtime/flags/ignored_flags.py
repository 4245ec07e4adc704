"""Flags that would have no effect, or set the same thing twice, as tables; `cross_checks` and the page of flags read them."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import all_flags, value_of
from multimodal.balance import BALANCERS
from multimodal.schedule.builders import BUILDERS


class IgnoredFlag(NamedTuple):
    """A flag that has no effect under some condition."""

    name: str
    because_of: tuple[str, ...]
    """Fields that determine this. If one of them is on the command line, the flag in a configuration file is dropped."""
    is_ignored: Callable[[RunConfig], bool]
    reason: str


def _where(causes: str, is_ignored: Callable[[RunConfig], bool], reasons: Mapping[str, str]) -> Iterator[IgnoredFlag]:
    """Yield the rows of flags with the same causes. reasons: names of such flags, parted by spaces -> the reason."""
    for names, reason in reasons.items():
        way_out = "" if reason.endswith(" out") else " or leave it out" if ";" in reason else "; leave it out"
        for name in names.split():
            yield IgnoredFlag(name, tuple(causes.split()), is_ignored, reason + way_out)


def _without(causes: str, reasons: Mapping[str, str]) -> Iterator[IgnoredFlag]:
    """Yield the rows of flags that need one of others to be set."""
    return _where(causes, lambda c: not any(value_of(c, cause) for cause in causes.split()), reasons)


_WEIGH = " and ".join(name for name, row in BALANCERS.items() if row.weighs_units)
_DEFER = " and ".join(name for name, row in BALANCERS.items() if row.defers)
_PLACE_ITEMS = " and ".join(name for name, row in BALANCERS.items() if row.places_items)
_BY_COSTS = " and ".join(name for name, row in BUILDERS.items() if row.needs_costs)
_PREDICT = " and ".join(name for name, row in BALANCERS.items() if row.needs_costs or row.judges)
_EMULATED = "--emulate waits as long as its table says, whatever would compute; leave one of them out"

IGNORED_FLAGS: tuple[IgnoredFlag, ...] = (
    *_where(
        "lr_decay_style",
        lambda c: c.optimizer.lr_decay_style == "constant",
        {"min_lr lr_decay_iters": "--lr-decay-style constant never lowers the learning rate; choose another style"},
    ),
    *_where(
        "lr_decay_style",
        lambda c: c.optimizer.lr_decay_style != "WSD",
        {"lr_wsd_decay_iters lr_wsd_decay_style": "it belongs to --lr-decay-style WSD; choose that style"},
    ),
    *_without("lr_warmup_iters lr_warmup_fraction", {"lr_warmup_init": "there is no warm-up; add --lr-warmup-iters N"}),
    *_without("lora_rank", {"lora_alpha lora_targets": "there are no adapters; add --lora-rank N"}),
    *_where(
        "tokenizer_type",
        lambda c: c.data.tokenizer_type == "ByteTokenizer",
        {
            "tokenizer_model": "a ByteTokenizer needs no file; add --tokenizer-type HuggingFaceTokenizer",
            "chat_template": (
                "bytes have no special tokens that a template could write; add --tokenizer-type HuggingFaceTokenizer"
            ),
        },
    ),
    *_where(
        "balance",
        lambda c: BALANCERS[c.training.balance].places_items,
        {"refine_encoders": f"--balance {_PLACE_ITEMS} balance encoders by themselves anyway; choose another one"},
    ),
    *_where(
        "balance refine_encoders",
        lambda c: not BALANCERS[c.training.balance].places_items and not c.training.refine_encoders,
        {"balance_granularity": f"only --balance {_PLACE_ITEMS} and --refine-encoders balance an encoder by itself; choose one"},
    ),
    *_where(
        "balance",
        lambda c: not BALANCERS[c.training.balance].defers,
        {
            "balance_num_microbatches merge_encoders": f"only --balance {_DEFER} group an encoder's samples "
            "otherwise than the LLM's; choose one"
        },
    ),
    *_where(
        "balance",
        lambda c: not BALANCERS[c.training.balance].weighs_units,
        {"unit_costs": f"only --balance {_WEIGH} balance units by costs of their own; choose one"},
    ),
    *_where(
        "balance balance_num_microbatches schedule plan",
        lambda c: not c.goes_by_durations and not c.parallelism.plans_itself and not c.parallelism.cuts_by_seconds,
        {
            "cluster layer_costs": f"only --balance {_PREDICT} and --schedule {_BY_COSTS} go by durations, "
            "and sizes with pipeline stages; choose one"
        },
    ),
    *_where(
        "balance balance_num_microbatches schedule layer_costs emulate plan",
        lambda c: c.training.measure_interval > 0 == c.measuring_interval,
        {
            "measure_interval": f"only --balance {_PREDICT} and --schedule {_BY_COSTS} go by durations, "
            "and only runs without --layer-costs, --plan auto and --emulate measure them; choose one"
        },
    ),
    *_without("elastic", {"elastic_timeout fault_tolerance": "a lost process ends the run; add --elastic"}),
    *_where(
        "plan",
        lambda c: not c.parallelism.plans_itself,
        {"plan_time_budget plan_trial_iters plan_review_iters replan": "the plan is given; use --plan auto"},
    ),
    *_where(
        "data_parallel_sharding_strategy",
        lambda c: not c.parallelism.shards_weights,
        {
            "reduce_gradients_once": "gradients that nobody shares are reduced once; add --data-parallel-sharding-strategy "
            "optim_grads_params"
        },
    ),
    *_without(
        "tp_comm_overlap",
        {"tp_comm_overlap_parts tp_comm_overlap_rows": "tensor parallel collectives are not cut; add --tp-comm-overlap"},
    ),
    *_where(
        "lengths_from",
        lambda c: c.data.lengths_from == "decode",
        {"num_workers": "--lengths-from decode loads in a thread, as samples are exchanged"},
    ),
    *_where(
        "data_path",
        lambda c: c.data.sample_program is None,
        {"program_samples": "the samples are read, not made; use --data-path digits or FILE.py"},
    ),
    *_where(
        "data_path",
        lambda c: c.data.sample_program is not None,
        {
            "chat_template": "a program's samples (digits, FILE.py) come in turns of Braid's own",
            "split": "a program (digits, FILE.py) holds out samples of its own",
            "allow_outside_paths media_dir producers max_image_pixels num_frames video_fps video_max_pixels video_sound": (
                "a program (digits, FILE.py) reads no files; use a manifest"
            ),
            "overlong": "a program (digits, FILE.py) makes samples that fit, or cuts them; use a manifest",
            "latent_cache": "a program's samples (digits, FILE.py) are not cached; use a manifest",
            "data_cache_path": "a program's samples (digits, FILE.py) have no index; use a manifest",
        },
    ),
    *_where(
        "data_path",
        lambda c: (
            not c.data.allow_outside_paths
            and "://" not in " ".join((*c.data.data_path, *c.evaluation.valid_data_path, c.data.media_dir or ""))
        ),
        {"data_cache_mib data_retries": "no data lie elsewhere; give an address, such as s3://BUCKET/DATA"},
    ),
    *_where(
        "bad_sample",
        lambda c: c.data.bad_sample != "skip",
        {"bad_samples_per_thousand": "the first bad sample is an error; add --bad-sample skip"},
    ),
    *_where("emulate", lambda c: c.training.emulate is not None, {"bad_sample producers": _EMULATED}),
    *_without("producers", {"producer_token": "nothing is decoded elsewhere; add --producers HOST:PORT"}),
    *_without(
        "eval_iters",
        {"eval_interval eval_blank_images sample_prompts valid_data_path save_best": "nothing is evaluated; add --eval-iters N"},
    ),
    *_without(
        "save",
        {
            "save_retain_interval save_best async_save keep_last_checkpoints": "no checkpoint is written; add --save DIR",
            "sample_prompts": "its folder hands the weights over to what answers; add --save DIR",
            "generator_ema_decay": "averages are drawn with from a checkpoint; add --save DIR",
        },
    ),
    *_without("save save_megatron", {"save_interval": "no checkpoint is written; add --save DIR"}),
    *_without("sample_prompts", {"sample_max_new_tokens sample_guidance_scale": "nothing is asked; add --sample-prompts FILE"}),
    *_without("load", {"load_rng new_phase": "no checkpoint is resumed; add --load DIR"}),
    *_without(
        "load load_megatron",
        {
            "load_optim": "no checkpoint is resumed; add --load DIR",
            "finetune": "it takes over the weights of --load; add --load DIR",
        },
    ),
    *_where(
        "finetune",
        lambda c: c.checkpoint.finetune,
        {"load_optim load_rng": "--finetune takes over the weights alone; leave it out"},
    ),
    *_without("report_dir", {"timeline_interval": "timelines are drawn into the report; add --report-dir DIR"}),
    *_without(
        "profile",
        {"profile_step_start profile_step_end profile_ranks use_pytorch_profiler": "nothing is profiled; add --profile"},
    ),
    *_without(
        "wandb_project", {"wandb_exp_name wandb_entity wandb_save_dir": "Weights & Biases gets nothing; add --wandb-project NAME"}
    ),
    *_without("mlflow_experiment", {"mlflow_run_name": "MLflow gets nothing; add --mlflow-experiment NAME"}),
    *_where(
        "emulate",
        lambda c: c.training.emulate is not None and not BALANCERS[c.training.balance].needs_costs,
        {"transformer_impl attention_backend recompute_granularity fp8_format": _EMULATED},
    ),
    *_without("fp8_format", {"fp8_recipe": "no product is in FP8; add --fp8-format"}),
    *_where("plan", lambda c: c.parallelism.plan is not None, {"layer_partition": "a plan says which layers every stage has"}),
    *_where(
        "",
        lambda c: all(sizes.pipeline_parallel_size == 1 for sizes in c.parallelism.units.values()),
        {"layer_partition": "no unit has several pipeline stages; raise a pipeline parallel size (such as --llm-pp 2)"},
    ),
    *_where(
        "model",
        lambda c: len(c.parallelism.units) == 1,
        {"colocate_units": "the model has one unit, which has nobody to share ranks with"},
    ),
    *_where(
        "model",
        lambda c: c.model.attention_mask != "causal" and len(c.parallelism.units) == 1,
        {"attention_mask": "the model has one unit, so there are no items among its tokens"},
    ),
)


def ignored_flags(config: RunConfig) -> tuple[IgnoredFlag, ...]:
    """List the flags that were given but have no effect; a switch that is given as its default asks for none."""
    asking = set()
    for flag in all_flags():
        value = flag.value(config)
        is_off = value in (None, ()) or (flag.parse is None and value == flag.default)
        if flag.name in config.given and not is_off:
            asking.add(flag.name)
    return tuple(row for row in IGNORED_FLAGS if row.name in asking and row.is_ignored(config))


ENCODER_FLAGS = {
    "attention_mask": "it says how the LLM sees items",
    "balance_granularity": "it says how their items are placed",
    "balance_num_microbatches": "it lowers the number where one sample's items would fill a microbatch",
    "rearrange_nodes": "it moves their batches",
    "merge_encoders": "it balances them as one",
    "refine_encoders": "it balances them by themselves",
    "eval_blank_images": "it blanks what they take",
}
"""Fields that have no meaning without an encoder -> the reason."""

EXCLUSIVE_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("train_iters", "num_epochs", "both set the length of the training"),
    ("num_epochs", "new_phase", "the phases before have other data; say by --train-iters how many steps there are in all"),
    ("lr_warmup_iters", "lr_warmup_fraction", "both set the length of the warm-up"),
    ("micro_batch_size", "tokens_per_microbatch", "both say how large a microbatch is"),
    ("packing_seq_length", "tokens_per_microbatch", "a microbatch has at most --micro-batch-size sequences' tokens"),
    ("finetune", "new_phase", "the former starts at step 0, the latter goes on"),
    ("finetune", "pretrained_checkpoint", "both start from weights alone; --finetune takes those of --load"),
    ("finetune", "load_hf", "both start from weights alone; --finetune takes those of --load"),
    ("pretrained_checkpoint", "load_hf", "both start from weights alone"),
    ("load_megatron", "pretrained_checkpoint", "both say what a run starts from"),
    ("load_megatron", "load_hf", "both say what a run starts from"),
    ("bad_sample", "latent_cache", "an image without latents is one that the cache was not written for; write it again"),
    ("plan", "colocate_units", "a plan already says which ranks each unit has"),
)

LEFT_TO_THE_PLAN = (
    *("schedule", "schedule_passes", "balance", "sequence_parallel", "tp_comm_overlap"),
    *("tokens_per_microbatch", "packing_seq_length"),
)
"""Fields that a run which plans by itself chooses with its plan, or cannot plan with."""

EXCLUSIVE_SIZES: tuple[tuple[str, str, str], ...] = (
    ("virtual_pipeline_size", "layers_per_virtual_stage", "both say how many virtual stages a pipeline rank holds"),
)
"""Exclusive sizes of one unit: two fields, and the reason."""
