"""Defaults that depend on the device: on CUDA, options that were not given become the fastest that the run allows."""

from dataclasses import replace
from importlib.util import find_spec

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.flag_rules import RULES
from megatron.runtime.flags.schedule_checks import problems_of_schedule, useful_passes
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


def with_device_defaults(config: RunConfig, *, graph: ModelGraph, plan: Plan, has_cuda: bool) -> RunConfig:
    """Return the configuration with the defaults of this machine; flags that were given stay as they are.

    Raises ConfigError if FP8 is requested and Transformer Engine's layers cannot be used.
    """
    if not has_cuda or config.training.emulate is not None:
        return config
    config = _with_dtype(config)
    if "schedule_passes" not in config.given:
        passes = ",".join(useful_passes(config, graph=graph, plan=plan))
        config = replace(config, training=replace(config.training, schedule_passes=passes))
    engine = _with_engine(config)
    return engine if next(problems_of_schedule(engine, graph, plan), None) is None else config


def with_layer_defaults(config: RunConfig, *, has_cuda: bool) -> RunConfig:
    """Return the configuration with those defaults that depend on no plan: precision and implementation of layers."""
    return _with_engine(_with_dtype(config)) if has_cuda else config


def _with_dtype(config: RunConfig) -> RunConfig:
    return config if "dtype" in config.given else replace(config, training=replace(config.training, dtype="bfloat16"))


def _with_engine(config: RunConfig) -> RunConfig:
    if "transformer_impl" in config.given or find_spec("transformer_engine") is None:
        return config
    engine = replace(config, model=replace(config.model, transformer_impl="transformer_engine"))
    broken = next((message for message, is_broken in RULES.items() if is_broken(engine)), None)
    if broken is None:
        return engine
    if config.model.fp8_format is not None:
        raise ConfigError(broken.format(c=engine))
    return config
