"""One rank's run: model, data, optimizers and trainer according to the flags, and resumed if requested."""

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch

from megatron.runtime import platform
from megatron.runtime.checkpoint.checkpoint import BackgroundSave
from megatron.runtime.checkpoint.claim import FolderClaim
from megatron.runtime.checkpoint.megatron_weights import check_megatron_target, check_megatron_weights
from megatron.runtime.emulation.emulated_stage import EmulatedStage
from megatron.runtime.feed import data_sets
from megatron.runtime.feed.agreement import BadSamples
from megatron.runtime.feed.data_sets import DataSets, RunData
from megatron.runtime.feed.phase import Phase
from megatron.runtime.feed.sample_exchange import SampleExchange
from megatron.runtime.flags.arguments import build_plan, choose_trained, with_epochs
from megatron.runtime.flags.configuration import OptimizerSettings, RunConfig
from megatron.runtime.flags.schedule_checks import read_templates, with_device_defaults, with_layer_defaults
from megatron.runtime.generation.answering import open_questions
from megatron.runtime.gradients.unit_optimizer import Rates, UnitRates, build_optimizer_config
from megatron.runtime.hugging_face.save_weights import check_adapter_target, check_hugging_face_target, find_folder_to_follow
from megatron.runtime.launch.distributed_setup import StartValues, World, agree_on_start
from megatron.runtime.launch.failure import Ending, StopReason, StopRequests
from megatron.runtime.launch.rank_place import find_ranks_per_node
from megatron.runtime.orchestrator.machine import ranks_on_node
from megatron.runtime.orchestrator.orchestrate import Inputs, orchestrate
from megatron.runtime.orchestrator.plan_review import PlanReview, PlanTrial, watch_plan
from megatron.runtime.profiler import find_peak_tflops
from megatron.runtime.report.reporting import check_places
from megatron.runtime.session import Session, SessionOptions, check_vocabulary
from megatron.runtime.training.prediction import MeasuredCosts, check_memory, predict_layer_seconds, read_emulation
from megatron.runtime.training.start_values import collect_flag_values, collect_start_values
from megatron.runtime.training.trainer import Trainer, build_scheduler
from multimodal.attention.bitfield import MaskMode
from multimodal.cost.cost_table import TableCosts
from multimodal.cost.layers.registry import read_model
from multimodal.kernels import describe_kernels, kernels
from multimodal.model.transformer_config import BuildOptions
from multimodal.plan.plans_of_sizes import describe_placement
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import CheckpointError, ConfigError, DataError, ModelError
from multimodal.values.model_graph import ModelGraph, Role, Unit
from multimodal.values.plan import Plan

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """Everything of one rank's run."""

    config: RunConfig
    world: World
    data: DataSets
    session: Session
    trainer: Trainer
    done_steps: int = 0
    exchanges: tuple[SampleExchange, SampleExchange] | None = None
    """Exchange raw samples if lengths come from decoding: one for training, one for evaluation, which runs beside it."""
    emulation: TableCosts | None = None
    """The waits that replace computations in an emulated run."""
    claim: FolderClaim | None = None
    background_save: BackgroundSave | None = None
    """Writes checkpoints while training continues (--async-save)."""
    phase: Phase = field(default_factory=Phase)
    described_data: RunData = field(default_factory=dict)
    stop_requests: StopRequests = field(default_factory=lambda: StopRequests(Ending()))
    nodes_have_joined: Callable[[], bool] = lambda: False
    """Returns True if nodes wait to be taken into an elastic run."""
    measured: MeasuredCosts | None = None
    """The layers' seconds that steps are decided by, once the run has measured them."""
    review: PlanTrial | PlanReview | None = None
    """The trial or the review of a plan that the run made by itself."""
    decisions_name: str | None = None
    """The name under which a node's ranks share assignments (`NodeDecisions`); None: each rank decides for itself."""
    bad_samples: BadSamples | None = None
    """Leaves out samples that cannot be read (--bad-sample skip)."""
    note_reported: Callable[[int], None] = lambda step: None
    """Called with each step that rank 0 has reported."""

    def num_consumed_samples(self, step: int) -> int:
        """Return the number of training samples up to the end of a step, in all phases."""
        return self.phase.first_sample + (step - self.phase.first_step) * self.config.training.global_batch_size

    def wish_to_stop(self, *, can_leave: bool) -> StopReason:
        """Return this rank's reason to stop now; can_leave: True if waiting nodes are a reason."""
        reason = self.stop_requests.reason(exit_duration_minutes=self.config.training.exit_duration_in_mins)
        return reason or (StopReason.JOIN if can_leave and self.nodes_have_joined() else StopReason.NONE)


@dataclass(frozen=True)
class Prepared:
    """The values that a rank can prepare alone, before it needs the others."""

    config: RunConfig
    data: DataSets
    options: SessionOptions
    plan: Plan
    peak_tflops: float
    emulation: TableCosts | None = None

    @property
    def start_values(self) -> StartValues:
        """Values that must be the same on all ranks."""
        own = self.options
        return collect_start_values(self.config, graph=own.graph, plan=self.plan, data=self.data, vocab_size=own.vocab_size)


def prepare_run(config: RunConfig, world: World, *, stop_requests: StopRequests) -> Run:
    """Build this rank's part of a run: first what it can alone, then what takes all ranks' agreement; raises BraidErrors."""
    inputs = open_inputs(config, world)
    planned, seconds = None, world.timeout.total_seconds()
    if config.parallelism.plans_itself:
        agree_on_start(world.meeting, collect_flag_values(config), timeout_seconds=seconds)
        config = with_layer_defaults(config, has_cuda=torch.cuda.is_available())
        planned = orchestrate(config, world, inputs, build=_build_options(config))
        config = planned.config
    prepared = prepare_plan(config, world, inputs)
    again = "/planned" if planned else ""
    agree_on_start(world.meeting, prepared.start_values, timeout_seconds=seconds, again=again)
    world.connect(backend=config.training.distributed_backend)
    run = build_run(prepared, world, prepared.plan, stop_requests=stop_requests)
    if ranks_on_node() > 1:
        run.decisions_name = world.from_first("decisions", partial(secrets.token_hex, 16))
    if planned:
        run.review = watch_plan(planned, config.parallelism)
    return run


def open_inputs(config: RunConfig, world: World) -> Inputs:
    """Check the output folders, and open the model and the data."""
    if folder := config.checkpoint.save:  # before there is something to lose
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise CheckpointError(f"--save {folder}: cannot be made ({problem.strerror}); give another folder") from problem
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CheckpointError(f"--save {folder}: no permission to write there; change it or give another folder")
    if world.rank == 0:
        check_places(config.logging)
    check_kernels(is_allowed=config.training.allow_python_kernels)
    graph = choose_trained(read_model(config.model.model), config.model)
    if blind := [unit.name for unit in graph.generators if unit.image is None]:
        raise ModelError(
            f"unit '{blind[0]}' has the role generator, but the model does not say what it makes; give it an 'image' with "
            "patch_size and in_channels, as an encoder has"
        )
    if (config.checkpoint.save_hf or config.checkpoint.save_adapter) and world.rank == 0:
        like = find_folder_to_follow(config.model.model, load_hf=config.checkpoint.load_hf)
        if config.checkpoint.save_hf:
            check_hugging_face_target(config.checkpoint.save_hf, graph=graph, like=like)
        if config.checkpoint.save_adapter:
            check_adapter_target(config.checkpoint.save_adapter, graph=graph, like=like)
    if config.checkpoint.save_megatron and world.rank == 0:
        check_megatron_target(config.checkpoint.save_megatron, graph=graph)
    if config.data.latent_cache is not None:
        graph = data_sets.with_cached_latents(graph)
    data = data_sets.build_data_sets(config, graph, in_turn=world.in_turn("index"))
    if prompts := config.evaluation.sample_prompts:
        chat = data_sets.text_settings(config).open()[1] if config.data.sample_program is None else None
        try:  # an error now, not at the first evaluation
            open_questions(prompts, graph=graph, tokenizer=data.tokenizer, chat=chat)
        except DataError as problem:
            raise DataError(f"--sample-prompts {prompts}: {problem}") from problem
    graph = data_sets.with_vocabulary(graph, data.tokenizer)
    return Inputs(graph, data, data_sets.padded_vocab_size(data.tokenizer, config, graph=graph))


def prepare_plan(config: RunConfig, world: World, inputs: Inputs) -> Prepared:
    """Build the plan, and the values from which the run is built under it."""
    graph, vocab_size = inputs.graph, inputs.vocab_size
    config = with_epochs(config, graph=graph, num_samples=inputs.data.num_train)
    if config.training.num_epochs is not None and world.rank == 0:
        logger.info("%g epochs are %d steps", config.training.num_epochs, config.training.train_iters)
    ranks_per_node = find_ranks_per_node(os.environ)
    seconds = predict_layer_seconds(config, inputs)
    plan = build_plan(config, graph, world.size, ranks_per_node=ranks_per_node, layer_seconds=seconds)
    if ranks_per_node is not None and world.rank == 0:
        is_given = config.parallelism.plan is not None
        for line in describe_placement(graph, plan, ranks_per_node=ranks_per_node, is_given=is_given):
            logger.info(line)
    config = with_device_defaults(config, graph=graph, plan=plan, has_cuda=torch.cuda.is_available())
    check_vocabulary(vocab_size, graph=graph, plan=plan)
    emulation = read_emulation(config.training.emulate, plan=plan) if config.training.emulate else None
    options = _session_options(config, graph, vocab_size=vocab_size, timeout=world.timeout, emulation=emulation)
    if emulation is None and not config.training.allow_low_memory:
        check_memory(config, inputs, plan, rank=world.rank, num_copies=options.num_state_copies)
    peak_tflops = config.logging.peak_tflops or find_peak_tflops(getattr(torch, config.training.dtype))
    return Prepared(config, inputs.data, options, plan, peak_tflops, emulation)


def build_run(prepared: Prepared, world: World, plan: Plan, *, stop_requests: StopRequests) -> Run:
    """Build this rank's part of a plan, newly initialised; collective."""
    config = prepared.config
    session = Session(prepared.options, plan=plan)
    if (folder := config.checkpoint.save_megatron) is not None:
        check_megatron_weights(folder, session=session)
    scheduler = build_scheduler(config.optimizer, session, train_iters=config.training.train_iters)
    trainer = Trainer(session, scheduler=scheduler, settings=config.optimizer, peak_tflops=prepared.peak_tflops)
    exchanges = None
    if config.data.lengths_from == "decode":
        per_node = find_ranks_per_node(os.environ)
        build = partial(SampleExchange, rank=world.rank, world_size=world.size, timeout=world.timeout, ranks_per_node=per_node)
        exchanges = build(), build()
    return Run(
        config,
        world,
        prepared.data,
        session,
        trainer,
        exchanges=exchanges,
        emulation=prepared.emulation,
        background_save=BackgroundSave(world.timeout) if config.checkpoint.async_save else None,
        stop_requests=stop_requests,
        bad_samples=BadSamples(config.data.bad_samples_per_thousand) if config.data.bad_sample == "skip" else None,
    )


def change_plan(run: Run, config: RunConfig) -> None:
    """Continue, in the running processes, under another configuration of the same training; collective, between two steps."""
    options = run.session.options
    ranks_per_node = find_ranks_per_node(os.environ)
    plan = build_plan(config, options.graph, run.world.size, ranks_per_node=ranks_per_node)
    config = with_device_defaults(config, graph=options.graph, plan=plan, has_cuda=torch.cuda.is_available())
    changed = _session_options(config, options.graph, vocab_size=options.vocab_size, timeout=options.timeout, emulation=None)
    run.session.change_plan(plan, options=changed)
    run.trainer.meet()
    run.config, run.measured = config, None


def check_kernels(*, is_allowed: bool) -> None:
    """Raise ConfigError if GPUs would wait for decisions by Python references."""
    if kernels is None and torch.cuda.is_available() and not is_allowed:
        raise ConfigError(
            f"without --allow-python-kernels GPUs do not wait for decisions by {describe_kernels()}, or give that flag"
        )


def _session_options(
    config: RunConfig, graph: ModelGraph, *, vocab_size: int, timeout: timedelta, emulation: TableCosts | None
) -> SessionOptions:
    settings, passes = config.optimizer, config.training.passes
    return SessionOptions(
        graph=graph,
        build=_build_options(config),
        vocab_size=vocab_size,
        seed=config.training.seed,
        timeout=timeout,
        optimizer=build_optimizer_config(
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            dtype=getattr(torch, config.training.dtype),
        ),
        rates={unit.name: UnitRates(*_rates(settings, unit)) for unit in graph.units},
        builder=BUILDERS[config.training.schedule],
        passes=passes,
        reduces_by_layer=any(row.reduces_by_layer for row in passes),
        shards_weights=config.parallelism.shards_weights,
        reduces_once=config.parallelism.reduce_gradients_once,
        num_state_copies=(
            read_templates(config, graph).num_state_copies if config.parallelism.elastic else config.parallelism.num_state_copies
        ),
        build_stage=partial(EmulatedStage, cost=emulation.compute) if emulation else None,
    )


def _rates(settings: OptimizerSettings, unit: Unit) -> Iterator[Rates]:
    """Yield those of a unit's module, then of its projector."""
    average_decay = settings.generator_ema_decay if unit.role is Role.GENERATOR else None
    for part in ("", "projector_"):
        lr, weight_decay = (settings.rate(unit.name, f"{part}{name}") for name in ("lr", "weight_decay"))
        warmup = settings.unit_rates.get(f"{unit.name}.{part}lr_warmup_iters")
        yield Rates(lr, settings.min_lr * lr / settings.lr, weight_decay, None if warmup is None else int(warmup), average_decay)


def _build_options(config: RunConfig) -> BuildOptions:
    has_cuda, settings = torch.cuda.is_available(), config.model
    is_bfloat16, is_engine = config.training.dtype == "bfloat16", settings.transformer_impl == "transformer_engine"
    return BuildOptions(
        getattr(torch, config.training.dtype),
        sequence_parallel=config.parallelism.sequence_parallel,
        transformer_impl=settings.transformer_impl,
        recompute=config.training.recompute_granularity,
        fuses_kernels=settings.kernel_fusion and has_cuda,
        # ZeRO-3's sharded weights have no buffers to add to; on a CPU torch adds to those of the weights' own type.
        accumulates_in_products=settings.gradient_accumulation_fusion
        and not config.parallelism.shards_weights
        and (is_bfloat16 if has_cuda else not (is_bfloat16 or is_engine)),
        delays_weight_gradients=is_engine and config.training.splits_backwards,
        fp8_format=settings.fp8_format,
        fp8_recipe=settings.fp8_recipe,
        num_multiprocessors=torch.cuda.get_device_properties(platform.device()).multi_processor_count if has_cuda else 0,
        attention_backend=settings.attention_backend,
        attention_mask=MaskMode(settings.attention_mask),
        num_overlapped_parts=config.parallelism.num_overlapped_parts,
        buffer_rows=config.parallelism.tp_comm_overlap_rows if is_engine else None,
    )
