"""Combinations of flags that are refused: message -> condition; `cross_checks` reads it."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from megatron.runtime.checkpoint.folder import folder_of_run
from megatron.runtime.flags.configuration import DIGITS, RunConfig
from megatron.runtime.flags.device_rules import DEVICE_RULES, Condition, named_passes
from megatron.runtime.flags.field_flags import value_of
from multimodal.data.sample_program import DIGITS_PROGRAM
from multimodal.data.sample_source import PILLOW_MAX_PIXELS
from multimodal.schedule.passes import PASSES


def _same_run(source: Path | None, save: Path | None) -> bool:
    return source is not None and _same_folder(folder_of_run(source), save)


def _same_folder(first: Path, second: Path | None) -> bool:
    return second is not None and os.path.abspath(first) == os.path.abspath(second)


def _goes_on_elsewhere(name: str, c: RunConfig) -> bool:
    """Return True if a run starts from the weights of this field, and --load names a folder that is not its own."""
    return bool(value_of(c, name) and c.checkpoint.load and not _same_folder(c.checkpoint.load, c.checkpoint.save))


def _proportions(split: str) -> list[float]:
    """Parse a split; empty if it is invalid."""
    try:
        proportions = [float(part) for part in split.split(",")]
    except ValueError:
        return []
    is_split = len(proportions) <= 3 and all(0 <= part < float("inf") for part in proportions) and sum(proportions) > 0
    return proportions if is_split else []


_ONCE_A_STEP = " and ".join(name for name, row in PASSES.items() if not row.works_with_sharded_weights)

_WITH_WEIGHTS = ["save", "load", "pretrained_checkpoint", "load_hf", "load_adapter", "save_hf", "save_adapter", "eval_iters"]

RULES: Mapping[str, Condition] = {
    "--producers decode for those who know their token; add --producer-token FILE, "
    "the one that they were started with": lambda c: bool(c.data.producers) and c.data.producer_token is None,
    "--micro-batch-size {c.training.micro_batch_size} is larger than --global-batch-size {c.training.global_batch_size}; lower "
    "the former or raise the latter": lambda c: c.training.micro_batch_size > c.training.global_batch_size,
    "--skip-train leaves nothing to do; add --eval-iters N or --save-hf DIR, or leave it out": lambda c: (
        c.training.skip_train
        and not (c.evaluation.eval_iters or c.checkpoint.save_hf is not None or c.checkpoint.save_adapter is not None)
    ),
    "--min-lr {c.optimizer.min_lr} is above --lr {c.optimizer.lr}; lower it": lambda c: c.optimizer.min_lr > c.optimizer.lr,
    "--lr-warmup-init {c.optimizer.lr_warmup_init} is above --lr {c.optimizer.lr}; lower it": lambda c: (
        c.optimizer.lr_warmup_init > c.optimizer.lr
    ),
    "--lr-warmup-iters {c.optimizer.lr_warmup_iters} leaves no step for the decay, which ends at --lr-decay-iters (by default "
    "--train-iters {c.training.train_iters}); "
    "lower the former or raise the latter": lambda c: (
        c.optimizer.lr_warmup_iters >= (c.optimizer.lr_decay_iters or c.training.train_iters)
    ),
    "--lr-decay-style WSD needs the length of its final annealing; add --lr-wsd-decay-iters N": lambda c: (
        c.optimizer.lr_decay_style == "WSD" and c.optimizer.lr_wsd_decay_iters is None
    ),
    "--lr-wsd-decay-iters {c.optimizer.lr_wsd_decay_iters} is longer than the whole decay, which ends at --lr-decay-iters (by "
    "default --train-iters {c.training.train_iters}); "
    "lower it": lambda c: (c.optimizer.lr_wsd_decay_iters or 0) > (c.optimizer.lr_decay_iters or c.training.train_iters),
    "--tokenizer-type HuggingFaceTokenizer needs its file; add --tokenizer-model PATH": lambda c: (
        c.data.tokenizer_type == "HuggingFaceTokenizer" and c.data.tokenizer_model is None
    ),
    "--split {c.data.split!r} must be one to three proportions (training, validation, test), the first above 0, such "
    "as 969,30,1": lambda c: not _proportions(c.data.split) or not (_proportions(c.data.split)[0] > 0 or c.training.skip_train),
    f"--max-image-pixels {{c.data.max_image_pixels}} is more than {PILLOW_MAX_PIXELS}, beyond which Pillow opens no image; lower "
    "it, and scale larger images down": lambda c: c.data.max_image_pixels > PILLOW_MAX_PIXELS,
    "--eval-iters {c.evaluation.eval_iters} needs validation samples, but --split {c.data.split} leaves none; use a second "
    "proportion above 0, --valid-data-path or --eval-iters 0": lambda c: (
        c.evaluation.eval_iters > 0
        and not c.evaluation.valid_data_path
        and c.data.sample_program is None
        and not any(_proportions(c.data.split)[1:2])
    ),
    "--balance-num-microbatches effective makes microbatches as large as the longest sample's, whatever --tokens-per-microbatch "
    "{c.training.tokens_per_microbatch} allows; leave one of them out": lambda c: (
        c.training.tokens_per_microbatch is not None and c.training.balance_num_microbatches == "effective"
    ),
    "--data-path {c.data.data_path}: a program's samples (digits, FILE.py) are no part of a mixture; "
    "give it alone, or paths": lambda c: (
        len(c.data.data_path) > 1 and any(word == DIGITS or word.endswith(".py") for word in c.data.data_path)
    ),
    "--sample-loss-weight {c.training.sample_loss_weight}: expected a weight for each data set of --data-path, which must be "
    "several (a common factor changes nothing); correct it or leave it out": lambda c: (
        len(c.training.sample_loss_weight) not in (0, len(c.data.mixture)) or len(c.training.sample_loss_weight) == 1
    ),
    "--num-epochs: data sets that are drawn by weights have no end in common; give --train-iters N in its place": lambda c: (
        c.training.num_epochs is not None and any(named.weight is not None for named in c.data.mixture)
    ),
    "--data-path {c.data.data_path[0]} is a program, which does whatever it likes; add --allow-callbacks "
    "if you trust it": lambda c: c.data.sample_program not in (None, DIGITS_PROGRAM) and not c.model.allow_callbacks,
    "--profile-step-start {c.logging.profile_step_start} is not before --profile-step-end {c.logging.profile_step_end}: no step "
    "is profiled; raise the latter": lambda c: c.logging.profile and c.logging.profile_step_start >= c.logging.profile_step_end,
    "--profile-ranks {c.logging.profile_ranks}: ranks count from 0; leave out what is below": lambda c: (
        min(c.logging.profile_ranks) < 0
    ),
    **DEVICE_RULES,
    "--use-pytorch-profiler has no place to write to; add --report-dir DIR": lambda c: (
        c.logging.use_pytorch_profiler and c.logging.report_dir is None
    ),
    "--elastic needs templates to make plans of, for whatever nodes are there; write them with tools/plan.py --planner oobleck "
    "--fault-tolerance F --output templates.yaml, "
    "and give --plan templates.yaml": lambda c: c.parallelism.elastic and c.parallelism.plan is None,
    "--elastic goes by templates for every number of nodes, which --plan auto does not plan; write them with tools/plan.py "
    "--planner oobleck --fault-tolerance F --output templates.yaml, "
    "and give --plan templates.yaml": lambda c: c.parallelism.elastic and c.parallelism.plans_itself,
    "--emulate waits as its table says for the stages of one plan, so there is nothing for --plan auto to choose; leave one of "
    "them out": lambda c: c.parallelism.plans_itself and c.training.emulate is not None,
    "--replan takes a plan that a review finds, and --plan-review-iters 0 has none; raise it, or leave --replan out": lambda c: (
        c.parallelism.replan and not c.parallelism.plan_review_iters
    ),
    "--elastic: samples that are exchanged once they are decoded (--lengths-from decode) would be lost with a rank; use "
    "--lengths-from index": lambda c: c.parallelism.elastic and c.data.lengths_from == "decode",
    "--emulate trains nothing that --elastic could keep; leave one of them out": lambda c: (
        c.parallelism.elastic and c.training.emulate is not None
    ),
    "--elastic needs whole weights on every replica, which --data-parallel-sharding-strategy optim_grads_params shares; use "
    "--data-parallel-sharding-strategy optim": lambda c: c.parallelism.elastic and c.parallelism.shards_weights,
    "--async-save would finish a checkpoint with ranks that may be lost meanwhile; leave it or --elastic out": lambda c: (
        c.parallelism.elastic and c.checkpoint.async_save
    ),
    "--emulate has no weights to gather, so --data-parallel-sharding-strategy optim_grads_params would show nothing; leave one "
    "of them out": lambda c: c.parallelism.shards_weights and c.training.emulate is not None,
    f"--schedule-passes {{c.training.schedule_passes}}: {_ONCE_A_STEP} move weights and gradients of a stage once a step, but "
    "--data-parallel-sharding-strategy optim_grads_params does whenever a layer computes; leave them out": lambda c: (
        c.parallelism.shards_weights and not all(row.works_with_sharded_weights for row in named_passes(c))
    ),
    "--emulate trains nothing, so there is nothing to save, resume or evaluate; leave out --save, --load, "
    "--pretrained-checkpoint, --load-hf, --load-adapter, --save-hf, --save-adapter "
    "and --eval-iters": lambda c: c.training.emulate is not None and any(value_of(c, name) for name in _WITH_WEIGHTS),
    "--finetune starts at step 0 and --save {c.checkpoint.save} would mix its checkpoints with those that it starts from; give "
    "another --save": lambda c: c.checkpoint.finetune and _same_run(c.checkpoint.load, c.checkpoint.save),
    "--pretrained-checkpoint starts at step 0 and --save {c.checkpoint.save} would mix its checkpoints with those that it starts "
    "from; give another --save": lambda c: _same_run(c.checkpoint.pretrained_checkpoint, c.checkpoint.save),
    **{
        f"{flag} {{c.checkpoint.{name}}} is for a run that starts from those weights and goes on from its own checkpoints, but "
        "--load {c.checkpoint.load} is not where --save writes; make --load and --save the same folder, or leave "
        f"{flag} or --load out": partial(_goes_on_elsewhere, name)
        for name, flag in (("pretrained_checkpoint", "--pretrained-checkpoint"), ("load_hf", "--load-hf"))
    },
}
"""Messages, as format strings over `c`, the configuration -> condition."""
