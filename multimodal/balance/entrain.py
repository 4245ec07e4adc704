"""Balances the encoders' and the LLM's microbatches apart by deferring LLM work (Entrain 4.5)."""

from collections.abc import Sequence

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.encoder_items import list_items
from multimodal.balance.encoder_placement import follow_samples, in_time
from multimodal.balance.entrain_assignment import assign_entrain
from multimodal.balance.generator_samples import place_generators
from multimodal.balance.post_balancing import balance_every_unit
from multimodal.balance.validate_inputs import validate_inputs
from multimodal.values.assignment import Assignment, Atom, Microbatch
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
    validate_inputs(lengths, graph=graph, options=options)
    work = BatchWork(graph, lengths, options)
    backbone = graph.backbone.name
    num_replicas = plan.units[backbone].data_parallel_size
    samples = [Atom(sample_id) for sample_id in work.lengths_by_sample]
    if len(samples) < num_replicas:
        return balance_every_unit(lengths, graph=graph, plan=plan, options=options)
    placed = assign_entrain(
        work.amounts(backbone, [(sample,) for sample in samples]),
        encoder_loads=[_encoder_loads(samples, work, unit=unit.name) for unit in graph.encoders] or [[0] * len(samples)],
        num_replicas=num_replicas,
        num_microbatches=options.count_microbatches(len(samples), num_replicas=num_replicas),
        sample_ids=[sample.sample_id for sample in samples],
    )
    encoded = [_microbatches(replica.encoder_microbatches, samples) for replica in placed.replicas]
    llm = tuple(tuple(filter(None, _microbatches(replica.llm_microbatches, samples))) for replica in placed.replicas)
    encoders = {
        unit.name: follow_samples(in_time(encoded), work, unit=unit.name, num_replicas=plan.units[unit.name].data_parallel_size)
        for unit in graph.encoders
    }
    return Assignment({**encoders, backbone: llm, **place_generators(llm, graph=graph, plan=plan)})


def _encoder_loads(samples: Sequence[Atom], work: BatchWork, *, unit: str) -> list[int]:
    items = [list_items((sample,), unit=unit, lengths_by_sample=work.lengths_by_sample) for sample in samples]
    return work.amounts(unit, items)


def _microbatches(indices: Sequence[Sequence[int]], samples: Sequence[Atom]) -> tuple[Microbatch, ...]:
    return tuple(tuple(samples[index] for index in microbatch) for microbatch in indices)
