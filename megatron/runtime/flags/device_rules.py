"""Combinations of flags that this machine, its packages or its layers do not support: message -> condition."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import flag_of
from multimodal.cost.run_options import FLOAT64, OVERLAP, SEGMENTS, SHARDED_WEIGHTS, EngineLimit, LayerUse
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES, PassRow

Condition = Callable[[RunConfig], bool]
"""Returns True for an unsupported combination."""


@dataclass(frozen=True)
class NeedsLocal:
    """Layers of Transformer Engine where they cannot be."""

    name: str
    """As the table of defaults in docs/gpu.md has it."""
    is_met: Condition

    def __call__(self, config: RunConfig) -> bool:
        """Return True if the configuration asks for such layers."""
        return config.model.transformer_impl == "transformer_engine" and self.is_met(config)


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


def _lacks(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def _misses(field: str, package: str, config: RunConfig) -> bool:
    return getattr(config.logging, field) is not None and _lacks(package)


def _limited(limit: EngineLimit) -> NeedsLocal:
    def is_met(config: RunConfig) -> bool:
        use = LayerUse(
            config.training.dtype,
            BUILDERS[config.training.schedule].runs_segments,
            _splits_backwards(config),
            config.parallelism.tp_comm_overlap,
            config.parallelism.shards_weights,
            config.model.fp8_format is not None,
        )
        return limit.is_met(use)

    return NeedsLocal(limit.name, is_met)


_SPLITTING_SCHEDULES = ", ".join(f"--schedule {name}" for name, row in BUILDERS.items() if row.splits_backwards)
_SPLITTING_PASSES = ", ".join(name for name, row in PASSES.items() if row.splits_backwards)

DEVICE_RULES: Mapping[str, Condition] = {
    "--profile starts CUDA's profiler, and there is no CUDA device; add --use-pytorch-profiler": lambda c: (
        c.logging.profile and not c.logging.use_pytorch_profiler and not _has_cuda()
    ),
    **{
        f"{flag_of(field)} {{c.logging.{field}}}: the package {package} is not installed; install it "
        f"(pip install 'braid[{package}]'), or leave it out": partial(_misses, field, package)
        for field, package in (("wandb_project", "wandb"), ("mlflow_experiment", "mlflow"))
    },
    "--transformer-impl transformer_engine: Transformer Engine is not installed; "
    "install it or use --transformer-impl local": NeedsLocal("it is not installed", lambda c: _lacks("transformer_engine")),
    "--transformer-impl transformer_engine needs a CUDA device; use --transformer-impl local on a CPU": lambda c: (
        c.model.transformer_impl == "transformer_engine" and not _has_cuda()
    ),
    "--transformer-impl transformer_engine has no float64; use --transformer-impl local for exact checks": _limited(FLOAT64),
    f"--transformer-impl transformer_engine splits backwards into input and weight gradients, as {_SPLITTING_SCHEDULES} and "
    f"--schedule-passes {_SPLITTING_PASSES} do, from version 2.3 on; install that, or use --transformer-impl local, or another "
    "schedule": NeedsLocal(
        "split backwards with a version before 2.3", lambda c: _splits_backwards(c) and not can_delay_weight_gradients()
    ),
    "--schedule {c.training.schedule} runs pieces of layers, whose products are not in FP8; leave out --fp8-format, or use "
    "another schedule": _limited(SEGMENTS),
    "--fp8-format {c.model.fp8_format} needs a CUDA device; leave it out on a CPU": lambda c: (
        c.model.fp8_format is not None and not _has_cuda()
    ),
    "--fp8-format {c.model.fp8_format} runs by Transformer Engine's recipes, and that is not installed; install it, or leave the "
    "flag out": lambda c: c.model.fp8_format is not None and _lacks("transformer_engine"),
    "--fp8-format {c.model.fp8_format} needs layers of Transformer Engine; use --transformer-impl transformer_engine": lambda c: (
        c.model.fp8_format is not None and "transformer_impl" in c.given and c.model.transformer_impl == "local"
    ),
    "--fp8-recipe delayed takes scales from forwards before, and a forward that --recompute-granularity full repeats would count "
    "twice; use --fp8-recipe tensorwise, "
    "or leave out recomputation": lambda c: c.model.fp8_recipe == "delayed" and c.training.recompute_granularity == "full",
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
    "--tp-comm-overlap cuts the collectives of --transformer-impl local; Transformer Engine's layers have an overlap of their "
    "own, in user buffers that Braid does not set up; use --transformer-impl local, or leave it out": _limited(OVERLAP),
    "--emulate waits as long as its table says, with or without --tp-comm-overlap; leave one of them out": lambda c: (
        c.parallelism.tp_comm_overlap and c.training.emulate is not None
    ),
    "--data-parallel-sharding-strategy optim_grads_params takes a layer's weights away between its forward and its backward, but "
    "layers of Transformer Engine keep copies of them in FP8, and give gradients of split backwards after that; use "
    "--transformer-impl local, --data-parallel-sharding-strategy optim, "
    "or a --schedule with whole backwards and no --fp8-format": _limited(SHARDED_WEIGHTS),
    "--load-hf and --load-adapter need the package 'safetensors'; "
    "install it (pip install 'braid[hf]') or leave it out": lambda c: (
        (c.checkpoint.load_hf or c.checkpoint.load_adapter) is not None and _lacks("safetensors")
    ),
}
