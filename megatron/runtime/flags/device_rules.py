"""Combinations of flags that this machine, its packages or its layers do not support: message -> condition."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import flag_of
from multimodal.cost.engine_limits import ENGINE_LIMITS, FP8_SCALES, EngineLimit, Instead, LayerUse
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES, PassRow

Condition = Callable[[RunConfig], bool]
"""Returns True for an unsupported combination."""


def can_delay_weight_gradients() -> bool:
    """Return True if the installed Transformer Engine has `delay_wgrad_compute`."""
    try:
        found = importlib.metadata.version("transformer_engine").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in found[:2]) >= (2, 3)


def _has_cuda() -> bool:
    import torch  # only here, so that reading flags does not wait for it

    return torch.cuda.is_available()


def named_passes(config: RunConfig) -> list[PassRow]:
    """List the passes that are named; `check_schedule` reports wrong names."""
    return [PASSES[name] for name in config.training.schedule_passes.split(",") if name in PASSES]


def _lacks(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def _misses(field: str, package: str, config: RunConfig) -> bool:
    return getattr(config.logging, field) is not None and _lacks(package)


def _needs_local(limit: EngineLimit, config: RunConfig) -> bool:
    return config.model.transformer_impl == "transformer_engine" and limit.is_met(_layer_use(config))


def _layer_use(config: RunConfig) -> LayerUse:
    splits = BUILDERS[config.training.schedule].splits_backwards or any(row.splits_backwards for row in named_passes(config))
    return LayerUse(
        is_installed=not _lacks("transformer_engine"),
        has_cuda=_has_cuda(),
        delays_gradients=not splits or can_delay_weight_gradients(),
        dtype=config.training.dtype,
        fp8_recipe=None if config.model.fp8_format is None else config.model.fp8_recipe,
        recompute=config.training.recompute_granularity,
        runs_segments=BUILDERS[config.training.schedule].runs_segments,
        splits_backwards=splits,
        tp_comm_overlap=config.parallelism.tp_comm_overlap,
        shards_weights=config.parallelism.shards_weights,
    )


DEVICE_RULES: Mapping[str, Condition] = {
    "--profile starts CUDA's profiler, and there is no CUDA device; add --use-pytorch-profiler": lambda c: (
        c.logging.profile and not c.logging.use_pytorch_profiler and not _has_cuda()
    ),
    **{
        f"{flag_of(field)} {{c.logging.{field}}}: the package {package} is not installed; install it "
        f"(pip install 'braid[{package}]'), or leave it out": partial(_misses, field, package)
        for field, package in (("wandb_project", "wandb"), ("mlflow_experiment", "mlflow"))
    },
    **{limit.message: partial(_needs_local, limit) for limit in ENGINE_LIMITS if limit.instead is Instead.LOCAL},
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
    "--emulate waits as long as its table says, with or without --tp-comm-overlap; leave one of them out": lambda c: (
        c.parallelism.tp_comm_overlap and c.training.emulate is not None
    ),
    "--load-hf and --load-adapter need the package 'safetensors'; "
    "install it (pip install 'braid[hf]') or leave it out": lambda c: (
        (c.checkpoint.load_hf or c.checkpoint.load_adapter) is not None and _lacks("safetensors")
    ),
}
