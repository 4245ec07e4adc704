"""Combinations of flags that this machine, its packages or its layers do not support, as a table of (condition, message)."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import flag_of
from multimodal.cost.run_options import FLOAT64, OVERLAP, SEGMENTS, SHARDED_WEIGHTS, EngineLimit, LayerUse
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES, PassRow


class Rule(NamedTuple):
    """An unsupported combination."""

    is_broken: Callable[[RunConfig], bool]
    message: str
    """A format string over `c`, the configuration."""
    keeps_local: str | None = None
    """Field of combinations that Transformer Engine's layers cannot have: their name in the table of defaults in docs/gpu.md."""


def _is_half(config: RunConfig) -> bool:
    """Return True if a run on CUDA computes in bfloat16, which is the default there."""
    return "dtype" not in config.given or config.training.dtype == "bfloat16"


def _splits_backwards(config: RunConfig) -> bool:
    return BUILDERS[config.training.schedule].splits_backwards or any(row.splits_backwards for row in named_passes(config))


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


def _engine_rule(limit: EngineLimit, message: str) -> Rule:
    def is_broken(config: RunConfig) -> bool:
        use = LayerUse(
            config.training.dtype,
            BUILDERS[config.training.schedule].runs_segments,
            _splits_backwards(config),
            config.parallelism.tp_comm_overlap,
            config.parallelism.shards_weights,
            config.model.fp8_format is not None,
        )
        return config.model.transformer_impl == "transformer_engine" and limit.is_met(use)

    return Rule(is_broken, message, keeps_local=limit.name)


def _package_rule(field: str, package: str) -> Rule:
    return Rule(
        lambda c: getattr(c.logging, field) is not None and importlib.util.find_spec(package) is None,
        f"{flag_of(field)} {{c.logging.{field}}}: the package {package} is not installed; install it "
        f"(pip install 'braid[{package}]'), or leave it out",
    )


_SPLITTING_SCHEDULES = ", ".join(f"--schedule {name}" for name, row in BUILDERS.items() if row.splits_backwards)
_SPLITTING_PASSES = ", ".join(name for name, row in PASSES.items() if row.splits_backwards)

DEVICE_RULES: tuple[Rule, ...] = (
    Rule(
        lambda c: c.logging.profile and not c.logging.use_pytorch_profiler and not _has_cuda(),
        "--profile starts CUDA's profiler, and there is no CUDA device; add --use-pytorch-profiler",
    ),
    _package_rule("wandb_project", "wandb"),
    _package_rule("mlflow_experiment", "mlflow"),
    Rule(
        lambda c: c.model.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None,
        "--transformer-impl transformer_engine: Transformer Engine is not installed; install it or use --transformer-impl local",
        keeps_local="it is not installed",
    ),
    Rule(
        lambda c: c.model.transformer_impl == "transformer_engine" and not _has_cuda(),
        "--transformer-impl transformer_engine needs a CUDA device; use --transformer-impl local on a CPU",
    ),
    _engine_rule(FLOAT64, "--transformer-impl transformer_engine has no float64; use --transformer-impl local for exact checks"),
    Rule(
        lambda c: c.model.transformer_impl == "transformer_engine" and _splits_backwards(c) and not can_delay_weight_gradients(),
        "--transformer-impl transformer_engine splits backwards into input and weight gradients, as "
        f"{_SPLITTING_SCHEDULES} and --schedule-passes {_SPLITTING_PASSES} do, from version 2.3 on; install that, or use "
        "--transformer-impl local, or another schedule",
        keeps_local="split backwards with a version before 2.3",
    ),
    _engine_rule(
        SEGMENTS,
        "--schedule {c.training.schedule} runs pieces of layers, whose products are not in FP8; leave out --fp8-format, or use "
        "another schedule",
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
    _engine_rule(
        OVERLAP,
        "--tp-comm-overlap cuts the collectives of --transformer-impl local; Transformer Engine's layers have an overlap of "
        "their own, in user buffers that Braid does not set up; use --transformer-impl local, or leave it out",
    ),
    Rule(
        lambda c: c.parallelism.tp_comm_overlap and c.training.emulate is not None,
        "--emulate waits as long as its table says, with or without --tp-comm-overlap; leave one of them out",
    ),
    _engine_rule(
        SHARDED_WEIGHTS,
        "--data-parallel-sharding-strategy optim_grads_params takes a layer's weights away between its forward and its backward, "
        "but layers of Transformer Engine keep copies of them in FP8, and give gradients of split backwards after that; use "
        "--transformer-impl local, --data-parallel-sharding-strategy optim, or a --schedule with whole backwards and no "
        "--fp8-format",
    ),
    Rule(
        lambda c: (
            (c.checkpoint.load_hf or c.checkpoint.load_adapter) is not None and importlib.util.find_spec("safetensors") is None
        ),
        "--load-hf and --load-adapter need the package 'safetensors'; install it (pip install 'braid[hf]') or leave it out",
    ),
)
