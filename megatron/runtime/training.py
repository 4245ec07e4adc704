"""The training loop: load -> assign -> schedule -> execute -> update -> report, with evaluation and checkpoints."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.runtime import platform
from megatron.runtime.assembly import RankRuntime, assemble
from megatron.runtime.checkpoint import find_newest_checkpoint, load_checkpoint, save_checkpoint
from megatron.runtime.configuration import RunConfig
from megatron.runtime.data_sets import DIGITS, DataSets, build_data_sets, padded_vocab_size
from megatron.runtime.device_peak import find_peak_tflops
from megatron.runtime.distributed_setup import World
from megatron.runtime.freezing import apply_freezing
from megatron.runtime.learning_rate import build_scheduler
from megatron.runtime.reporting import ConsoleReporter, Reporter, SilentReporter
from megatron.runtime.run_plan import build_plan
from megatron.runtime.step_loader import load_steps
from megatron.runtime.step_planner import ScheduleCache, StepPlanner
from megatron.runtime.timeline_gathering import gather_timeline
from megatron.runtime.trainer import EvaluationReport, Trainer
from megatron.runtime.unit_optimizer import build_optimizer_config, build_unit_optimizer
from multimodal.balance import BALANCERS
from multimodal.data.blank_images import BlankImages
from multimodal.data.global_batches import GlobalBatches
from multimodal.data.sample_source import SampleSource
from multimodal.model.transformer_config import BuildOptions, Precision
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import CheckpointError, PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """Everything of one rank's run."""

    config: RunConfig
    world: World
    graph: ModelGraph
    plan: Plan
    data: DataSets
    runtime: RankRuntime
    optimizers: Mapping[str, MegatronOptimizer]
    scheduler: OptimizerParamScheduler
    trainer: Trainer
    done_steps: int = 0
    """Steps done before, when resumed."""


@dataclass(frozen=True)
class RunSummary:
    """How a run ended."""

    done_steps: int
    evaluation: EvaluationReport | None
    blank_evaluation: EvaluationReport | None


def prepare_run(config: RunConfig, world: World) -> Run:
    """Build model, data and optimizers of this rank, and resume when asked to; raises BraidErrors."""
    graph = apply_freezing(ModelGraph.from_file(config.model.model), config)
    plan = build_plan(config, graph, world.size)
    data = build_data_sets(config, graph)
    vocab_size = padded_vocab_size(data.tokenizer, config)
    _check_vocabulary(vocab_size, graph, plan)
    dtype = getattr(torch, config.training.dtype)
    options = BuildOptions(
        Precision(dtype),
        sequence_parallel=config.parallelism.sequence_parallel,
        transformer_impl=config.model.transformer_impl,
        recompute=config.training.recompute_granularity,
    )
    timeout = timedelta(minutes=config.training.distributed_timeout_minutes)
    runtime = assemble(
        graph,
        plan,
        rank=world.rank,
        world_size=world.size,
        options=options,
        vocab_size=vocab_size,
        seed=config.training.seed,
        timeout=timeout,
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
    run = Run(config, world, graph, plan, data, runtime, optimizers, scheduler, trainer)
    _resume(run)
    return run


def train(run: Run) -> RunSummary:
    """Train up to --train-iters, evaluating, saving and reporting on the way."""
    reporter = _build_reporter(run)
    reporter.say(describe_run(run))
    last_step = _last_step(run.config, run.done_steps)
    evaluation: tuple[EvaluationReport | None, EvaluationReport | None] = (None, None)
    evaluated_step = saved_step = None
    for number, step in enumerate(load_steps(_train_planner(run), range(run.done_steps, last_step), num_workers=run.config.data.num_workers), run.done_steps + 1):
        report, events = run.trainer.train_step(step, number=number)
        reporter.step(number, report)
        if _wants_timeline(run.config, number, last_step):
            timeline = gather_timeline(events, origin_seconds=run.runtime.executor.clock.origin_seconds, plan=run.plan, rank=run.world.rank)
            if timeline is not None:
                reporter.timeline(number, timeline)
        if _is_multiple(number, run.config.evaluation.eval_interval) and run.config.evaluation.eval_iters:
            evaluation, evaluated_step = _evaluate(run, reporter, number), number
        if _is_multiple(number, run.config.checkpoint.save_interval):
            saved_step = _save(run, number)
    if run.config.checkpoint.save and saved_step != last_step and last_step > run.done_steps:
        _save(run, last_step)
    if run.config.evaluation.eval_iters and evaluated_step != last_step:
        evaluation = _evaluate(run, reporter, last_step)
    summary = RunSummary(last_step, *evaluation)
    reporter.close()
    reporter.say(describe_end(run, summary))
    return summary


def describe_run(run: Run) -> str:
    """What runs where, in a few lines."""
    lines = []
    for name, unit in run.plan.units.items():
        ranks = sorted(unit.ranks)
        frozen = ", frozen" if run.graph.unit(name).freeze_module else ""
        lines.append(
            f"{name}: dp {unit.data_parallel_size} x pp {len(unit.replicas[0].stages)} x tp {unit.tensor_parallel_size} "
            f"on ranks {ranks[0]}-{ranks[-1]}{frozen}"
        )
    samples = f"{len(run.data.train)} training samples, {run.config.training.global_batch_size} a step"
    resumed = f"; resumed after step {run.done_steps}" if run.done_steps else ""
    return f"{'; '.join(lines)}\n{samples}, {run.config.training.dtype}, schedule {run.config.training.schedule}{resumed}"


def describe_end(run: Run, summary: RunSummary) -> str:
    """One line: how good, and where everything is."""
    places = []
    logging_config = run.config.logging
    if run.config.checkpoint.save:
        newest = find_newest_checkpoint(run.config.checkpoint.save)
        places.append(f"checkpoint {newest}")
    if logging_config.report_dir:
        places.append(f"pictures {logging_config.report_dir}/loss.png and {logging_config.report_dir}/timeline.png")
    if logging_config.log_json:
        places.append(f"log {logging_config.log_json}")
    results = f"step {summary.done_steps} done"
    if summary.evaluation:
        results += f": {summary.evaluation.answer_accuracy:.1%} of held-out answers right"
    if summary.blank_evaluation:
        results += f" ({summary.blank_evaluation.answer_accuracy:.1%} with blank images)"
    return "; ".join([results, *places])


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


def _train_planner(run: Run) -> StepPlanner:
    training = run.config.training
    return _planner(run, run.data.train, seed=training.seed, shuffle=run.config.data.data_path != DIGITS, forward_only=False)


def _planner(run: Run, source: SampleSource, *, seed: int, shuffle: bool, forward_only: bool) -> StepPlanner:
    training = run.config.training
    return StepPlanner(
        source,
        batches=GlobalBatches(len(source), training.global_batch_size, seed, shuffle=shuffle),
        schedules=ScheduleCache(run.graph, run.plan, BUILDERS[training.schedule], forward_only=forward_only),
        balancer=BALANCERS[training.balancer.replace("-", "_")],
        rank=run.world.rank,
        micro_batch_size=training.micro_batch_size,
        encoder_micro_batch_sizes=training.encoder_micro_batch_sizes,
    )


def _evaluate(run: Run, reporter: Reporter, number: int) -> tuple[EvaluationReport, EvaluationReport | None]:
    evaluation = _evaluate_on(run, run.data.valid)
    reporter.evaluation(number, "held out", evaluation)
    if not run.config.evaluation.eval_blank_images:
        return evaluation, None
    blank = _evaluate_on(run, BlankImages(run.data.valid, graph=run.graph))
    reporter.evaluation(number, "held out, blank images", blank)
    return evaluation, blank


def _evaluate_on(run: Run, source: SampleSource) -> EvaluationReport:
    planner = _planner(run, source, seed=0, shuffle=False, forward_only=True)
    steps = range(run.config.evaluation.eval_iters)
    return run.trainer.evaluate(load_steps(planner, steps, num_workers=run.config.data.num_workers))


def _run_state(config: RunConfig) -> dict[str, Any]:
    return {
        "seed": config.training.seed,
        "global_batch_size": config.training.global_batch_size,
        "data_path": config.data.data_path,
        "dtype": config.training.dtype,
    }


def _save(run: Run, number: int) -> int:
    assert run.config.checkpoint.save is not None
    save_checkpoint(
        run.config.checkpoint.save,
        step=number,
        graph=run.graph,
        plan=run.plan,
        runtime=run.runtime,
        optimizers=run.optimizers,
        schedulers_state=run.scheduler.state_dict(),
        run_state=_run_state(run.config),
        keep_last=run.config.checkpoint.keep_last_checkpoints,
    )
    return number


def _resume(run: Run) -> None:
    checkpoint = run.config.checkpoint
    if checkpoint.load is None:
        return
    if find_newest_checkpoint(checkpoint.load) is None:
        if checkpoint.load == checkpoint.save:
            logger.info("%s holds no checkpoint yet: starting anew", checkpoint.load)
            return
        raise CheckpointError(
            f"--load {checkpoint.load}: no complete checkpoint there; give a folder that --save wrote to, or leave --load out "
            "(with --load equal to --save, a run without a checkpoint starts anew)"
        )
    loaded = load_checkpoint(
        checkpoint.load,
        graph=run.graph,
        plan=run.plan,
        runtime=run.runtime,
        optimizers=run.optimizers,
        load_optimizer=checkpoint.load_optim,
        load_rng=checkpoint.load_rng,
    )
    _check_same_data(run.config, loaded.run_state)
    if checkpoint.load_optim:
        run.scheduler.load_state_dict(dict(loaded.schedulers_state))
    else:
        run.scheduler.step(increment=loaded.step)
    run.done_steps = loaded.step


def _check_same_data(config: RunConfig, saved: Mapping[str, Any]) -> None:
    for name in ("seed", "global_batch_size"):
        now = _run_state(config)[name]
        if saved.get(name, now) != now:
            flag = "--" + name.replace("_", "-")
            raise CheckpointError(
                f"--load {config.checkpoint.load}: it was trained with {flag} {saved[name]}, this run has {now}, so the data would not "
                f"go on where it stopped; use {flag} {saved[name]}"
            )


def _check_vocabulary(vocab_size: int, graph: ModelGraph, plan: Plan) -> None:
    tensor_parallel_size = plan.units[graph.backbone.name].tensor_parallel_size
    if vocab_size % tensor_parallel_size:
        raise PlanError(
            f"the padded vocabulary of {vocab_size} is not divisible by the LLM's tensor parallel size {tensor_parallel_size}; "
            f"set --make-vocab-size-divisible-by to a multiple of {tensor_parallel_size}"
        )


def _build_reporter(run: Run) -> Reporter:
    if run.world.rank != 0:
        return SilentReporter()
    return ConsoleReporter(run.config.logging, train_iters=run.config.training.train_iters, first_step=run.done_steps)


def _last_step(config: RunConfig, done_steps: int) -> int:
    last = max(done_steps, config.training.train_iters)
    interval = config.training.exit_interval
    return min(last, (done_steps // interval + 1) * interval) if interval else last


def _wants_timeline(config: RunConfig, number: int, last_step: int) -> bool:
    return config.logging.report_dir is not None and (number == last_step or _is_multiple(number, config.logging.timeline_interval))


def _is_multiple(number: int, interval: int | None) -> bool:
    return interval is not None and number % interval == 0
