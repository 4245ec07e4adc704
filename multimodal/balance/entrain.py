"""Balances the microbatches of encoders and LLM separately by deferring LLM work (Entrain 4.5)."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from multimodal.balance.algorithms.entrain_assignment import assign_entrain
from multimodal.balance.balance_options import MicrobatchCount, choose_shortest
from multimodal.balance.batch_work import BatchWork, sum_floats_by
from multimodal.balance.orchmllm import balance_every_unit
from multimodal.balance.placement import Groups, follow_llm
from multimodal.values.arrays.rows import group_rows
from multimodal.values.assignment import Assignment
from multimodal.values.plan import Plan


def balance_entrain(work: BatchWork, *, plan: Plan) -> Assignment:
    """Let a sample's LLM part run one microbatch after its encoder part if that evens out both (Entrain, Alg. 4).

    Samples move whole: an encoder's microbatch k holds the items of the samples that a replica of the LLM encodes in its round k,
    dealt over the encoder's replicas. Several encoders are balanced independently, or by the sum of their work per rank
    (`merges_encoders`). A batch with fewer samples than replicas is balanced like `balance_every_unit`. With
    `MicrobatchCount.PREDICTED` the assignments of K, K / 2, K / 4, ... and K_eff microbatches are predicted, and the shortest is
    taken; K if they tie or there is no predictor.
    """
    if work.num_samples < plan.units[work.graph.backbone.name].data_parallel_size:
        return balance_every_unit(work, plan=plan)
    encoder_loads = _encoder_loads(work, plan)
    candidates = (_assign(work, encoder_loads, plan=plan, fewest=fewest) for fewest in _fewest_microbatches(work, plan))
    return choose_shortest(candidates, work.lengths, work.options.predictor)


def _fewest_microbatches(work: BatchWork, plan: Plan) -> Iterator[int]:
    """Yield the lower bound on a replica's microbatches for each assignment to try."""
    most = work.count_microbatches(plan.units[work.graph.backbone.name].data_parallel_size)
    if work.options.microbatch_count is not MicrobatchCount.EFFECTIVE:
        yield most
    if work.options.microbatch_count is MicrobatchCount.PREDICTED:
        yield from (most >> halvings for halvings in range(1, most.bit_length() - 1))
    if work.options.microbatch_count is not MicrobatchCount.GIVEN:
        yield 1


def _encoder_loads(work: BatchWork, plan: Plan) -> npt.ArrayLike:
    """[num_rows, num_samples]: a row for each encoder, or one row of their seconds together if all ranks are equally fast."""
    encoders = [unit.name for unit in work.graph.encoders]
    if not work.options.merges_encoders:
        return np.stack([work.sample_amounts(unit) for unit in encoders] or [np.zeros(work.num_samples, np.int64)])
    merged = np.zeros((1, work.num_samples))
    for unit in encoders:
        samples = work.of_unit(unit).samples
        for flops in work.flops(unit):
            merged[0] += sum_floats_by(samples, flops, work.num_samples) / len(plan.units[unit].ranks)
    return merged


def _assign(work: BatchWork, encoder_loads: npt.ArrayLike, *, plan: Plan, fewest: int) -> Assignment:
    backbone, num_samples = work.graph.backbone.name, work.num_samples
    num_replicas = plan.units[backbone].data_parallel_size
    replicas, encoded, run, counts = assign_entrain(
        work.amounts(backbone),
        encoder_loads=encoder_loads,
        num_replicas=num_replicas,
        num_microbatches=work.count_microbatches(num_replicas),
        min_num_microbatches=fewest,
    )
    num_rounds = max(counts)
    first_of_sample = num_rounds * np.asarray(replicas, np.int64)
    in_encoders, in_llm = (first_of_sample + np.asarray(each) for each in (encoded, run))
    llm = Groups.of_rounds(np.arange(num_samples), in_llm, num_rounds=num_rounds, num_replicas=num_replicas)
    starts, samples = group_rows(in_encoders, np.arange(num_samples), num_replicas * num_rounds)
    return follow_llm(llm, work, plan=plan, encoded=Groups(samples, starts, num_rounds * np.arange(num_replicas + 1)))
