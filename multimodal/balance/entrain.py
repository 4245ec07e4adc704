"""Balances the encoders' and the LLM's microbatches apart by deferring LLM work (Entrain 4.5)."""

from collections.abc import Sequence

from multimodal.balance.algorithms.entrain_assignment import assign_entrain
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork, list_items, read_batch
from multimodal.balance.orchmllm import balance_every_unit
from multimodal.balance.placement import follow_llm
from multimodal.values.assignment import Assignment, Microbatch
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
    num_replicas, num_samples = plan.units[graph.backbone.name].data_parallel_size, len(work.samples)
    if num_samples < num_replicas:
        return balance_every_unit(lengths, graph=graph, plan=plan, options=options)
    assigned = assign_entrain(
        work.amounts(graph.backbone.name, [(sample,) for sample in work.samples]),
        encoder_loads=[_encoder_loads(work, unit=unit.name) for unit in graph.encoders] or [[0] * num_samples],
        num_replicas=num_replicas,
        num_microbatches=options.count_microbatches(num_samples, num_replicas=num_replicas),
    )
    # Equally many each, empty ones at the end, or dealing would give an encoder's replica those of another number.
    num_rounds = max(len(replica.encoder_microbatches) for replica in assigned)
    encoded = [_microbatches(replica.encoder_microbatches, work) for replica in assigned]
    encoded = [microbatches + ((),) * (num_rounds - len(microbatches)) for microbatches in encoded]
    llm = tuple(tuple(filter(None, _microbatches(replica.llm_microbatches, work))) for replica in assigned)
    return follow_llm(llm, work, plan=plan, encoded=encoded)


def _encoder_loads(work: BatchWork, *, unit: str) -> list[int]:
    items = [list_items((sample,), unit=unit, lengths_by_sample=work.lengths_by_sample) for sample in work.samples]
    return work.amounts(unit, items)


def _microbatches(indices: Sequence[Sequence[int]], work: BatchWork) -> tuple[Microbatch, ...]:
    return tuple(tuple(work.samples[index] for index in microbatch) for microbatch in indices)
