"""One rank's run: model, data, optimizers and trainer as the flags ask for them, resumed where they ask for that."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.runtime import platform
from megatron.runtime.checkpoint.claim import FolderClaim
from megatron.runtime.emulation.table import EmulationTable
from megatron.runtime.execution.assembly import RankRuntime, assemble
from megatron.runtime.feed.data_sets import DataSets, build_data_sets, padded_vocab_size
from megatron.runtime.feed.run_data import RunData
from megatron.runtime.feed.sample_exchange import SampleExchange
from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.freezing import apply_freezing
from megatron.runtime.flags.run_plan import build_plan
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config, build_unit_optimizer
from megatron.runtime.launch.distributed_setup import World
from megatron.runtime.launch.failure import Ending
from megatron.runtime.launch.stop_requests import StopRequests
from megatron.runtime.profiling.device_peak import find_peak_tflops
from megatron.runtime.report.reporting import check_places
from megatron.runtime.training.learning_rate import build_scheduler
from megatron.runtime.training.start_values import collect_start_values
from megatron.runtime.training.trainer import Trainer
from multimodal.attention.bitfield import MaskMode
from multimodal.model.transformer_config import BuildOptions, Precision
from multimodal.schedule.passes import passes_named
from multimodal.values.errors import CheckpointError, ModelError, PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


@dataclass
class Run:
    """Everything of one rank's run."""

    config: RunConfig
    world: World
    graph: ModelGraph
    plan: Plan
    data: DataSets
    vocab_size: int
    """Padded."""
    runtime: RankRuntime
    optimizers: Mapping[str, MegatronOptimizer]
    scheduler: OptimizerParamScheduler
    trainer: Trainer
    done_steps: int = 0
    """Steps done before, when resumed."""
    exchanges: tuple[SampleExchange, SampleExchange] | None = None
    """Of raw samples, where lengths come from decoding: one for training, one for evaluation, which goes on beside it."""
    emulation: EmulationTable | None = None
    """What computations are replaced with, in an emulated run."""
    claim: FolderClaim | None = None
    """Keeps other runs from writing to --save."""
    described_data: RunData = field(default_factory=dict)
    """What its checkpoints say of its data."""
    stop_requests: StopRequests = field(default_factory=lambda: StopRequests(Ending()))
    """What may ask this rank to stop early."""


def prepare_run(config: RunConfig, world: World, *, stop_requests: StopRequests) -> Run:
    """Build model, data and optimizers of this rank, newly initialised; raises BraidErrors.

    First whatever this rank can tell alone, then, once all ranks have found the same, what is collective.
    """
    if config.checkpoint.save:
        _check_writable(config.checkpoint.save)
    if world.rank == 0:
        check_places(config.logging)
    graph = apply_freezing(ModelGraph.from_file(config.model.model), config)
    _check_units(graph)
    plan = build_plan(config, graph, world.size)
    data = build_data_sets(config, graph)
    vocab_size = padded_vocab_size(data.tokenizer, config)
    _check_vocabulary(vocab_size, graph, plan)
    emulation = EmulationTable.from_file(config.training.emulate, plan=plan) if config.training.emulate else None
    world.agree(collect_start_values(config, graph=graph, plan=plan, data=data, vocab_size=vocab_size))
    world.connect(backend=config.training.distributed_backend)
    dtype = getattr(torch, config.training.dtype)
    options = BuildOptions(
        Precision(dtype),
        sequence_parallel=config.parallelism.sequence_parallel,
        transformer_impl=config.model.transformer_impl,
        recompute=config.training.recompute_granularity,
        attention_backend=config.model.attention_backend,
        attention_mask=MaskMode(config.model.attention_mask),
        num_overlapped_parts=config.parallelism.num_overlapped_parts,
    )
    runtime = assemble(
        graph,
        plan,
        rank=world.rank,
        world_size=world.size,
        options=options,
        vocab_size=vocab_size,
        seed=config.training.seed,
        timeout=world.timeout,
        seconds=emulation.seconds if emulation else None,
        shards_weights=config.parallelism.shards_weights,
        reduces_by_layer=any(row.reduces_by_layer for row in passes_named(config.training.schedule_passes)),
    )
    optimizers = _build_optimizers(config, runtime, dtype)
    scheduler = build_scheduler(config.optimizer, optimizers.values(), train_iters=config.training.train_iters)
    trainer = Trainer(
        runtime,
        optimizers=optimizers,
        scheduler=scheduler,
        settings=config.optimizer,
        vocab_size=vocab_size,
        peak_tflops=config.logging.peak_tflops or find_peak_tflops(dtype),
        device=platform.device(),
    )
    exchanges = None
    if config.data.lengths_from == "decode":
        build = partial(SampleExchange, rank=world.rank, world_size=world.size, timeout=world.timeout)
        exchanges = build(), build()
    return Run(
        config,
        world,
        graph,
        plan,
        data,
        vocab_size,
        runtime,
        optimizers,
        scheduler,
        trainer,
        exchanges=exchanges,
        emulation=emulation,
        stop_requests=stop_requests,
    )


def _build_optimizers(config: RunConfig, runtime: RankRuntime, dtype: torch.dtype) -> dict[str, MegatronOptimizer]:
    settings = config.optimizer
    optimizer_config = build_optimizer_config(
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        dtype=dtype,
    )
    built = {name: build_unit_optimizer(unit, config=optimizer_config) for name, unit in runtime.gradients.items()}
    return {name: optimizer for name, optimizer in built.items() if optimizer is not None}


def _check_units(graph: ModelGraph) -> None:
    """A generator without an image can be simulated, but there is nothing that it could be trained to make."""
    if blind := [unit.name for unit in graph.generators if unit.image is None]:
        raise ModelError(
            f"unit '{blind[0]}' has the role generator, but the model does not say what it makes; give it an 'image' with "
            "patch_size and in_channels, as an encoder has"
        )


def _check_vocabulary(vocab_size: int, graph: ModelGraph, plan: Plan) -> None:
    tensor_parallel_size = plan.units[graph.backbone.name].tensor_parallel_size
    if vocab_size % tensor_parallel_size:
        raise PlanError(
            f"the padded vocabulary of {vocab_size} is not divisible by the LLM's tensor parallel size {tensor_parallel_size}; "
            f"set --make-vocab-size-divisible-by to a multiple of {tensor_parallel_size}"
        )


def _check_writable(folder: Path) -> None:
    """Better now than when there is something to lose."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise CheckpointError(f"--save {folder}: cannot be made ({problem.strerror}); give another folder") from problem
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CheckpointError(f"--save {folder}: no permission to write there; change it or give another folder")
