"""Plans and loads the steps of a run, in training and in evaluation."""

import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

import torch

from megatron.runtime.feed.data_sets import DataSet
from megatron.runtime.feed.step_planner import (
    NodeDecisions,
    StepOptions,
    StepPlanner,
    StepPlanners,
    load_steps,
    load_steps_in_thread,
)
from megatron.runtime.orchestrator.machine import ranks_on_node
from megatron.runtime.step.step import Step
from megatron.runtime.step.token_placement import ContextSharing
from megatron.runtime.training.prediction import MeasuredCosts, balance_options, build_predictor
from megatron.runtime.training.run import Run
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.share_tokens import TokenDistribution
from multimodal.balance import BALANCERS
from multimodal.balance.rearrange_nodes import NodeArrangement
from multimodal.balance.step_predictor import StepPredictor
from multimodal.data.global_batches import GlobalBatches
from multimodal.data.sample_source import SampleSource

MOST_MEASURED = 8
"""Most steps of an interval that are measured: its last ones."""


def load_training_steps(
    run: Run, steps: range, *, known_at: Callable[[int], MeasuredCosts | None]
) -> Generator[Step, None, None]:
    """Yield these steps of the training, from 0, as this rank computes them, decided by what is known at each."""
    size = run.config.training.global_batch_size
    batches = GlobalBatches(run.data.train.parts, size, run.config.training.seed, shuffle=run.config.data.sample_program is None)
    in_order = run.phase.go_on(batches, run.described_data)
    planner = partial(_planner, run, run.data.train.source, batches=in_order, forward_only=False)
    return _load(run, planner, steps, known_at)


def load_evaluation_steps(run: Run, data: DataSet) -> Generator[Step, None, None]:
    """Yield the --eval-iters steps of an evaluation, forward only."""
    batches = GlobalBatches(data.parts, run.config.training.global_batch_size, seed=0, shuffle=False)
    planner = partial(_planner, run, data.source, batches=batches, forward_only=True)
    return _load(run, planner, range(run.config.evaluation.eval_iters), lambda step: run.measured)


def _load(
    run: Run, build: Callable[[MeasuredCosts | None], StepPlanner], steps: range, known_at: Callable[[int], MeasuredCosts | None]
) -> Generator[Step, None, None]:
    planners = StepPlanners(build, run.measured)
    try:
        if run.exchanges is not None:
            yield from load_steps_in_thread(planners, steps, known_at=known_at)
        else:
            yield from load_steps(planners, steps, known_at=known_at, num_workers=run.config.data.num_workers)
    finally:
        if run.decisions_name is not None:
            NodeDecisions(run.decisions_name, subject=None).close()


def _planner(
    run: Run, source: SampleSource, measured: MeasuredCosts | None, *, batches: GlobalBatches, forward_only: bool
) -> StepPlanner:
    training, predictor, waits = run.config.training, predictor_by(run, measured), run.emulation
    arrangement = None
    if training.rearrange_nodes:
        num_decoding_ranks = run.world.size if run.exchanges is not None else 0
        size = getattr(torch, training.dtype).itemsize
        arrangement = NodeArrangement(ranks_on_node(), bytes_per_element=size, num_decoding_ranks=num_decoding_ranks)
    balancer, schedules, decisions = BALANCERS[training.balance], run.session.schedules(forward_only=forward_only), None
    if run.decisions_name is not None and (balancer.judges or balancer.needs_costs):  # others take no longer than to share them
        subject = (forward_only, schedules.graph, schedules.plan, measured and measured.to_dict())
        decisions = NodeDecisions(run.decisions_name, subject=subject)
    flags = run.config.parallelism
    distribution = TokenDistribution(flags.context_parallel_distribution)
    return StepPlanner(
        source,
        batches=batches,
        balancer=balancer,
        balance_options=balance_options(training, vocab_size=predictor.vocab_size, predictor=predictor),
        options=StepOptions(
            schedules=schedules,
            rank=run.world.rank,
            seed=training.seed,
            is_emulated=waits is not None,
            shards_weights=flags.shards_weights,
            sharing=ContextSharing(distribution, flags.context_parallel_block_size, MaskMode(run.config.model.attention_mask)),
            costs_of=predictor.costs if waits is None else lambda *_: waits,
            build=run.session.options.build,
            skips_bad=run.bad_samples is not None,
        ),
        exchange=run.exchanges[forward_only] if run.exchanges else None,
        arrangement=arrangement,
        decisions=decisions,
        is_left=partial(is_left_in_order, run, measured, forward_only=forward_only),
    )


def measured_after(number: int, *, first: int, interval: int) -> int:
    """Return the earliest step, from `number` on, behind which layers are measured; one that no run reaches for interval 0.

    It is `interval` steps behind `first`, then twice as many, four times, and so on, since each new table has steps decided anew.
    """
    steps = interval or sys.maxsize
    while first + steps < number:
        steps *= 2
    return first + steps


def is_left_in_order(run: Run, measured: MeasuredCosts | None, step: int, *, forward_only: bool) -> bool:
    """Return True if --balance auto leaves a step, from 0, in the data's order without deciding it.

    That is every other step that is measured, for comparison, and all steps while those that it balanced were not shorter.
    """
    interval = run.config.measuring_interval
    if not interval or not BALANCERS[run.config.training.balance].needs_costs:
        return False
    num_left = measured_after(step + 1, first=run.done_steps, interval=interval) - step
    if not forward_only and num_left <= min(interval, MOST_MEASURED):
        return num_left % 2 == 0
    return measured is not None and measured.keeps_order


def predictor_by(run: Run, measured: MeasuredCosts | None) -> StepPredictor:
    """Return a predictor by these layers; None: by those of --layer-costs, or of the described machine."""
    options, schedules = run.session.options, run.session.schedules()
    copies = options.num_state_copies
    found = build_predictor(run.config, schedules, vocab_size=options.vocab_size, num_state_copies=copies)
    return found if measured is None else replace(found, profile=found.profile or measured.layers, margin=measured.margin)
