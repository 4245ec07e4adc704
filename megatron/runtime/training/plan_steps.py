"""Plans and loads the steps of a run, in training and in evaluation."""

import sys
from collections.abc import Generator
from dataclasses import replace

import torch

from megatron.runtime.feed.data_sets import DataSet
from megatron.runtime.feed.step_planner import NodeDecisions, StepOptions, StepPlanner, load_steps, load_steps_in_thread
from megatron.runtime.orchestrator.machine import ranks_on_node
from megatron.runtime.step.step import Step
from megatron.runtime.step.token_placement import ContextSharing
from megatron.runtime.training.prediction import MeasuredCosts, build_predictor
from megatron.runtime.training.run import Run
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.share_tokens import TokenDistribution
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions, Granularity, MicrobatchCount
from multimodal.balance.rearrange_nodes import NodeArrangement
from multimodal.balance.step_predictor import StepPredictor
from multimodal.data.global_batches import GlobalBatches
from multimodal.data.sample_source import SampleSource

MOST_MEASURED = 8
"""Most steps of an interval that are measured: its last ones."""


def load_training_steps(run: Run, steps: range) -> Generator[Step, None, None]:
    """Yield these steps of the training, from 0, as this rank computes them; closing stops loading ahead."""
    size = run.config.training.global_batch_size
    batches = GlobalBatches(run.data.train.parts, size, run.config.training.seed, shuffle=run.config.data.sample_program is None)
    in_order = run.phase.go_on(batches, run.described_data)
    return _load(run, _planner(run, run.data.train.source, batches=in_order, forward_only=False), steps)


def load_evaluation_steps(run: Run, data: DataSet) -> Generator[Step, None, None]:
    """Yield the --eval-iters steps of an evaluation, forward only."""
    batches = GlobalBatches(data.parts, run.config.training.global_batch_size, seed=0, shuffle=False)
    planner = _planner(run, data.source, batches=batches, forward_only=True)
    return _load(run, planner, range(run.config.evaluation.eval_iters))


def balance_options(run: Run, predictor: StepPredictor) -> BalanceOptions:
    """Return the balancer's options, which are also used for evaluations, so that these need no other schedules."""
    training = run.config.training
    return BalanceOptions(
        micro_batch_size=training.micro_batch_size,
        tokens_per_microbatch=training.most_microbatch_tokens,
        encoder_micro_batch_sizes=training.encoder_micro_batch_sizes,
        granularity=Granularity(training.balance_granularity),
        microbatch_count=MicrobatchCount(training.balance_num_microbatches),
        merges_encoders=training.merge_encoders,
        refines_encoders=training.refine_encoders,
        unit_costs=training.declared_costs,
        ranks_per_node=ranks_on_node(),
        vocab_size=run.session.options.vocab_size,
        predictor=predictor,
    )


def _load(run: Run, planner: StepPlanner, steps: range) -> Generator[Step, None, None]:
    try:
        if run.exchanges is not None:
            yield from load_steps_in_thread(planner, steps)
        else:
            yield from load_steps(planner, steps, num_workers=run.config.data.num_workers)
    finally:
        planner.close()


def _planner(run: Run, source: SampleSource, *, batches: GlobalBatches, forward_only: bool) -> StepPlanner:
    training, predictor, waits = run.config.training, predictor_by(run, run.measured), run.emulation
    arrangement = None
    if training.rearrange_nodes:
        num_decoding_ranks = run.world.size if run.exchanges is not None else 0
        size = getattr(torch, training.dtype).itemsize
        arrangement = NodeArrangement(ranks_on_node(), bytes_per_element=size, num_decoding_ranks=num_decoding_ranks)
    balancer, schedules, decisions = BALANCERS[training.balance], run.session.schedules(forward_only=forward_only), None
    if run.decisions_name is not None and (balancer.judges or balancer.needs_costs):  # others take no longer than to share them
        subject = (forward_only, schedules.graph, schedules.plan, run.measured and run.measured.to_dict())
        decisions = NodeDecisions(run.decisions_name, subject=subject)
    flags = run.config.parallelism
    distribution = TokenDistribution(flags.context_parallel_distribution)
    return StepPlanner(
        source,
        batches=batches,
        balancer=balancer,
        balance_options=balance_options(run, predictor),
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
        in_order=range(0) if forward_only else steps_in_order(run),
    )


def measured_after(number: int, *, first: int, interval: int) -> int:
    """Return the earliest step, from `number` on, behind which layers are measured; one that no run reaches for interval 0.

    It is `interval` steps behind `first`, then twice as many, four times, and so on, since each new table has steps decided anew.
    """
    steps = interval or sys.maxsize
    while first + steps < number:
        steps *= 2
    return first + steps


def steps_in_order(run: Run) -> range:
    """Return the steps, from 0, that --balance auto leaves in the data's order, beside which its others are measured."""
    interval = run.config.measuring_interval
    if run.measured or not interval or not BALANCERS[run.config.training.balance].needs_costs:
        return range(0)
    due = measured_after(run.done_steps + 1, first=run.done_steps, interval=interval)
    return range(max(0, due - min(interval, MOST_MEASURED)), due, 2)


def predictor_by(run: Run, measured: MeasuredCosts | None) -> StepPredictor:
    """Return a predictor by these layers; None: by those of --layer-costs, or of the described machine."""
    options, schedules = run.session.options, run.session.schedules()
    copies = options.num_state_copies
    found = build_predictor(run.config, schedules, vocab_size=options.vocab_size, num_state_copies=copies)
    return found if measured is None else replace(found, profile=measured.layers, margin=measured.margin)
