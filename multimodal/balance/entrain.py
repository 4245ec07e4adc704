"""Balances the encoders' and the LLM's microbatches apart by deferring LLM work (Entrain 4.5)."""

from collections.abc import Sequence

import numpy as np

from multimodal.balance.algorithms.entrain_assignment import assign_entrain
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import read_batch
from multimodal.balance.orchmllm import balance_every_unit
from multimodal.balance.placement import Groups, follow_llm
from multimodal.values.arrays.rows import group_rows, row_starts
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


def balance_entrain(lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
    """Let a sample's LLM part run one microbatch after its encoder part where that evens out both (Entrain, Alg. 4).

    Samples move whole: an encoder's microbatch k holds the items of the samples that a replica of the LLM encodes in its round k,
    dealt over the encoder's replicas. Several encoders are balanced each for itself. Best with the `eager-1f1b` builder and the
    `split-backward` pass, which keep a deferred sample from holding up the others. A batch with fewer samples than replicas is
    balanced like `balance_every_unit`.

    The result does not depend on the order of `lengths`. Raises AssignmentError as `validate_inputs` does.
    """
    work = read_batch(lengths, graph=graph, options=options)
    num_replicas, num_samples = plan.units[graph.backbone.name].data_parallel_size, work.num_samples
    if num_samples < num_replicas:
        return balance_every_unit(lengths, graph=graph, plan=plan, options=options)
    encoder_loads = [work.sample_amounts(unit.name) for unit in graph.encoders] or [np.zeros(num_samples, np.int64)]
    replicas, encoded, run, counts = assign_entrain(
        work.amounts(graph.backbone.name),
        encoder_loads=np.stack(encoder_loads),
        num_replicas=num_replicas,
        num_microbatches=options.count_microbatches(num_samples, num_replicas=num_replicas),
    )
    num_rounds = max(counts)
    first_of_sample = num_rounds * np.asarray(replicas, np.int64)
    in_encoders, in_llm = (
        group_rows(first_of_sample + np.asarray(each), np.arange(num_samples), num_replicas * num_rounds)
        for each in (encoded, run)
    )
    microbatch_starts = num_rounds * np.arange(num_replicas + 1)
    is_busy = np.diff(in_llm[0]) > 0
    busy_before = row_starts(is_busy)
    llm = Groups(in_llm[1], np.append(in_llm[0][:-1][is_busy], num_samples), busy_before[microbatch_starts])
    return follow_llm(llm, work, plan=plan, encoded=Groups(in_encoders[1], in_encoders[0], microbatch_starts))
