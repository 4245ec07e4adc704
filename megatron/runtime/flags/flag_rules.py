"""Combinations of flags that are refused, also by this machine, its packages or its layers; `cross_checks` reads them."""

import importlib.util
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from megatron.runtime.checkpoint.folder import folder_of_run
from megatron.runtime.flags.configuration import DIGITS, RunConfig
from megatron.runtime.flags.field_flags import flag_of, value_of
from megatron.runtime.flags.ignored_flags import Condition
from multimodal.balance import BALANCERS
from multimodal.balance.algorithms.entrain_assignment import NEEDS_KERNELS
from multimodal.cost.engine_limits import ENGINE_LIMITS, FP8_SCALES, EngineLimit, Instead, LayerUse
from multimodal.data.global_batches import parse_split
from multimodal.data.sample_source import DIGITS_PROGRAM, PILLOW_MAX_PIXELS
from multimodal.kernels import kernels
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES


def can_delay_weight_gradients() -> bool:
    """Return True if the installed Transformer Engine has `delay_wgrad_compute`."""
    from importlib.metadata import PackageNotFoundError, version  # only here, as it imports more than all of these rules

    try:
        found = version("transformer_engine").split(".")
    except PackageNotFoundError:
        return False
    return tuple(int(part) for part in found[:2]) >= (2, 3)


def _has_cuda() -> bool:
    import torch  # only here, so that reading flags does not wait for it

    return torch.cuda.is_available()


def _lacks(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def _misses(field: str, package: str, config: RunConfig) -> bool:
    return value_of(config, field) is not None and _lacks(package)


def _needs_local(limit: EngineLimit, config: RunConfig) -> bool:
    return config.model.transformer_impl == "transformer_engine" and limit.is_met(_layer_use(config))


def _layer_use(config: RunConfig) -> LayerUse:
    return LayerUse(
        is_installed=not _lacks("transformer_engine"),
        has_cuda=_has_cuda(),
        delays_gradients=not config.training.splits_backwards or can_delay_weight_gradients(),
        dtype=config.training.dtype if "dtype" in config.given else "bfloat16",
        fp8_recipe=None if config.model.fp8_format is None else config.model.fp8_recipe,
        recompute=config.training.recompute_granularity,
        runs_segments=BUILDERS[config.training.schedule].runs_segments,
        splits_backwards=config.training.splits_backwards,
        tp_comm_overlap=config.parallelism.tp_comm_overlap,
        has_user_buffers=config.parallelism.tp_comm_overlap_rows is not None,
        sequence_parallel=config.parallelism.sequence_parallel,
        is_elastic=config.parallelism.elastic,
        shards_weights=config.parallelism.shards_weights,
    )


def _same_run(source: Path | None, save: Path | None) -> bool:
    return source is not None and _same_folder(folder_of_run(source), save)


def _same_folder(first: Path, second: Path | None) -> bool:
    return second is not None and os.path.abspath(first) == os.path.abspath(second)


def _goes_on_elsewhere(name: str, c: RunConfig) -> bool:
    """Return True if a run starts from the weights of this field, and --load names a folder that is not its own."""
    return bool(value_of(c, name) and c.checkpoint.load and not _same_folder(c.checkpoint.load, c.checkpoint.save))


_LOCAL = [limit for limit in ENGINE_LIMITS if limit.instead is Instead.LOCAL]
_ONCE_A_STEP = " and ".join(name for name, row in PASSES.items() if not row.works_with_sharded_weights)

_PACKAGES = (
    ("tensorboard_dir", "tensorboard", "tensorboard"),
    ("wandb_project", "wandb", "wandb"),
    ("mlflow_experiment", "mlflow", "mlflow"),
    ("load_hf", "safetensors", "hf"),
    ("load_adapter", "safetensors", "hf"),
)
"""Field -> a package that it needs, and Braid's extra that installs it."""

RULES: Mapping[str, Condition] = {
    "--producers decode for those who know their token; add --producer-token FILE, "
    "the one that they were started with": lambda c: bool(c.data.producers) and c.data.producer_token is None,
    f"--balance {{c.training.balance}}: {NEEDS_KERNELS}, or choose another": lambda c: (
        kernels is None and BALANCERS[c.training.balance].needs_kernels
    ),
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
    "as 969,30,1": lambda c: not parse_split(c.data.split) or not (parse_split(c.data.split)[0] > 0 or c.training.skip_train),
    f"--max-image-pixels {{c.data.max_image_pixels}} is more than {PILLOW_MAX_PIXELS}, beyond which Pillow opens no image; lower "
    "it, and scale larger images down": lambda c: c.data.max_image_pixels > PILLOW_MAX_PIXELS,
    "--eval-iters {c.evaluation.eval_iters} needs validation samples, but --split {c.data.split} leaves none; use a second "
    "proportion above 0, --valid-data-path or --eval-iters 0": lambda c: (
        c.evaluation.eval_iters > 0
        and not c.evaluation.valid_data_path
        and c.data.sample_program is None
        and not any(parse_split(c.data.split)[1:2])
    ),
    "--packing-seq-length {c.training.packing_seq_length} has no room for samples of --seq-length {c.data.seq_length}; raise the "
    "former or lower the latter": lambda c: c.data.seq_length > (c.training.packing_seq_length or c.data.seq_length),
    "--balance-num-microbatches effective makes microbatches as large as the longest sample's, whatever "
    "{c.training.most_microbatch_tokens} tokens a microbatch allow (--tokens-per-microbatch, --packing-seq-length); leave one of "
    "them out": lambda c: c.training.most_microbatch_tokens is not None and c.training.balance_num_microbatches == "effective",
    "--data-path {c.data.data_path}: a program's samples (digits, FILE.py) are no part of a mixture; "
    "give it alone, or paths": lambda c: (
        len(c.data.data_path) > 1 and any(word == DIGITS or word.endswith(".py") for word in c.data.data_path)
    ),
    "--sample-loss-weight {c.training.sample_loss_weight}: expected a weight for each data set of --data-path, which must be "
    "several (a common factor changes nothing); correct it or leave it out": lambda c: (
        len(c.training.sample_loss_weight) not in (0, len(c.data.mixture)) or len(c.training.sample_loss_weight) == 1
    ),
    "--num-epochs: data sets that are drawn by weights have no end in common; give --train-iters N in its place": lambda c: (
        c.training.num_epochs is not None and any(each.weight is not None or each.repetitions != 1 for each in c.data.mixture)
    ),
    "--data-path {c.data.data_path[0]} is a program, which does whatever it likes; add --allow-callbacks "
    "if you trust it": lambda c: c.data.sample_program not in (None, DIGITS_PROGRAM) and not c.model.allow_callbacks,
    "--profile-step-start {c.logging.profile_step_start} is not before --profile-step-end {c.logging.profile_step_end}: no step "
    "is profiled; raise the latter": lambda c: c.logging.profile and c.logging.profile_step_start >= c.logging.profile_step_end,
    "--profile starts CUDA's profiler, and there is no CUDA device; add --use-pytorch-profiler": lambda c: (
        c.logging.profile and not c.logging.use_pytorch_profiler and not _has_cuda()
    ),
    **{
        f"{flag_of(field)}: the package {package} is not installed; install it (pip install 'braid[{extra}]'), or leave the flag "
        "out": partial(_misses, field, package)
        for field, package, extra in _PACKAGES
    },
    **{limit.message: partial(_needs_local, limit) for limit in _LOCAL},
    "--tp-comm-overlap-rows {c.parallelism.tp_comm_overlap_rows} would be ignored: it is for layers of Transformer Engine, and "
    "these are local; give --transformer-impl transformer_engine, or leave it out": lambda c: (
        c.parallelism.tp_comm_overlap_rows is not None
        and c.model.transformer_impl == "local"
        and ("transformer_impl" in c.given or any(limit.is_met(_layer_use(c)) for limit in _LOCAL))
    ),
    "--fp8-format {c.model.fp8_format} needs a CUDA device; leave it out on a CPU": lambda c: (
        c.model.fp8_format is not None and not _has_cuda()
    ),
    "--fp8-format {c.model.fp8_format} runs by Transformer Engine's recipes, and that is not installed; install it, or leave the "
    "flag out": lambda c: c.model.fp8_format is not None and _lacks("transformer_engine"),
    "--fp8-format {c.model.fp8_format} needs layers of Transformer Engine; use --transformer-impl transformer_engine": lambda c: (
        c.model.fp8_format is not None and "transformer_impl" in c.given and c.model.transformer_impl == "local"
    ),
    FP8_SCALES.message: lambda c: FP8_SCALES.is_met(_layer_use(c)),
    "--attention-backend flash cannot evaluate --attention-mask {c.model.attention_mask}; "
    "use --attention-backend triton": lambda c: c.model.attention_backend == "flash" and c.model.attention_mask != "causal",
    "--attention-backend flash needs a CUDA device and --bf16; use --attention-backend sequences": lambda c: (
        # bfloat16 is the default on CUDA
        c.model.attention_backend == "flash" and not (_has_cuda() and ("dtype" not in c.given or c.training.dtype == "bfloat16"))
    ),
    "--attention-backend sequences cannot evaluate --attention-mask {c.model.attention_mask}; "
    "use --attention-backend blocks": lambda c: c.model.attention_backend == "sequences" and c.model.attention_mask != "causal",
    "--attention-backend {c.model.attention_backend} needs a CUDA device to train; "
    "use --attention-backend blocks on a CPU": lambda c: c.model.attention_backend in ("flex", "triton") and not _has_cuda(),
    "--attention-backend triton: Triton is not installed; install it (pip install 'braid[triton]') or use --attention-backend "
    "blocks": lambda c: c.model.attention_backend == "triton" and _lacks("triton"),
    "--attention-backend triton has no float64; use --attention-backend blocks for exact checks": lambda c: (
        c.model.attention_backend == "triton" and c.training.dtype == "float64"
    ),
    "--elastic needs templates to make plans of, for whatever nodes are there; write them with tools/plan.py --planner oobleck "
    "--fault-tolerance F --output templates.yaml, "
    "and give --plan templates.yaml": lambda c: c.parallelism.elastic and c.parallelism.plan is None,
    "--elastic goes by templates for every number of nodes, which --plan auto does not plan; write them with tools/plan.py "
    "--planner oobleck --fault-tolerance F --output templates.yaml, "
    "and give --plan templates.yaml": lambda c: c.parallelism.elastic and c.parallelism.plans_itself,
    "--emulate waits as its table says for the stages of one plan, so there is nothing for --plan auto to choose; leave one of "
    "them out": lambda c: c.parallelism.plans_itself and c.training.emulate is not None,
    "--elastic: samples that are exchanged once they are decoded (--lengths-from decode) would be lost with a rank; use "
    "--lengths-from index": lambda c: c.parallelism.elastic and c.data.lengths_from == "decode",
    "--elastic needs whole weights on every replica, which --data-parallel-sharding-strategy optim_grads_params shares; use "
    "--data-parallel-sharding-strategy optim": lambda c: c.parallelism.elastic and c.parallelism.shards_weights,
    "--num-distributed-optimizer-instances {c.parallelism.num_distributed_optimizer_instances}: templates of --elastic say how "
    "many copies there are (tools/plan.py --replicas-per-copy), and --emulate has none; leave it out": lambda c: (
        c.parallelism.num_state_copies is not None and (c.parallelism.elastic or c.training.emulate is not None)
    ),
    "--async-save would finish a checkpoint with ranks that may be lost meanwhile; leave it or --elastic out": lambda c: (
        c.parallelism.elastic and c.checkpoint.async_save
    ),
    "--emulate has no weights to gather, so --data-parallel-sharding-strategy optim_grads_params would show nothing; leave one "
    "of them out": lambda c: c.parallelism.shards_weights and c.training.emulate is not None,
    f"--schedule-passes {{c.training.schedule_passes}}: {_ONCE_A_STEP} move weights and gradients of a stage once a step, but "
    "--data-parallel-sharding-strategy optim_grads_params does whenever a layer computes; leave them out": lambda c: (
        c.parallelism.shards_weights and not all(row.works_with_sharded_weights for row in c.training.passes)
    ),
    "--finetune starts at step 0 and --save {c.checkpoint.save} would mix its checkpoints with those that it starts from; give "
    "another --save": lambda c: c.checkpoint.finetune and _same_run(c.checkpoint.load, c.checkpoint.save),
    "--pretrained-checkpoint starts at step 0 and --save {c.checkpoint.save} would mix its checkpoints with those that it starts "
    "from; give another --save": lambda c: _same_run(c.checkpoint.pretrained_checkpoint, c.checkpoint.save),
    **{
        f"{flag} {{c.checkpoint.{name}}} is for a run that starts from those weights and goes on from its own checkpoints, but "
        "--load {c.checkpoint.load} is not where --save writes; make --load and --save the same folder, or leave "
        f"{flag} or --load out": partial(_goes_on_elsewhere, name)
        for name in ("pretrained_checkpoint", "load_hf", "load_megatron")
        for flag in [f"--{name.replace('_', '-')}"]
    },
}
"""Messages, as format strings over `c`, the configuration -> condition."""
