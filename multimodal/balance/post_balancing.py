"""Balances the drawn batch: the LLM's samples alone, or every unit on its own (OrchMLLM)."""

from collections.abc import Callable, Mapping, Sequence

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.encoder_placement import Replicas, balance_items, follow_samples, in_time
from multimodal.balance.generator_samples import place_generators
from multimodal.balance.post_balance import post_balance
from multimodal.balance.unit_cost import UnitCost
from multimodal.balance.validate_inputs import validate_inputs
from multimodal.values.assignment import Assignment, Atom, Microbatch
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


def balance_llm_only(lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
    """Balance the LLM's work over its replicas and their microbatches; encoders take the items of the samples as they lie.

    This is what balancing before the batch is drawn can do at best ("pre-balancing", OrchMLLM 3.2): one phase is balanced, the
    others are not. Ties go by sample id. Raises AssignmentError as `validate_inputs` does.
    """
    validate_inputs(lengths, graph=graph, options=options)
    work = BatchWork(graph, lengths, options)
    return follow_llm(balance_samples(work, plan=plan), work, plan=plan)


def balance_whole_samples(
    lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions
) -> Assignment:
    """Balance what samples ask of all units together over replicas and microbatches; each stays whole, with its items.

    Like `balance_llm_only`, but a sample weighs the FLOPs of all its parts. Units that share lanes, or form one interleaved
    chain, are as busy as the sum of their microbatches of one number, and wait for nobody else's. Declared costs of units do
    not count here, since they have no common measure. Ties go by sample id. Raises AssignmentError as `validate_inputs` does.
    """
    validate_inputs(lengths, graph=graph, options=options)
    work = BatchWork(graph, lengths, options)
    return follow_llm(balance_samples(work, plan=plan, is_whole=True), work, plan=plan)


def balance_every_unit(lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan, options: BalanceOptions) -> Assignment:
    """Balance every unit's work over its own replicas (OrchMLLM's post-balancing), and inside each over its microbatches.

    The LLM's samples go over its replicas by their work, and each replica's over its microbatches. An encoder's items (or the
    items of a sample together, by `options.granularity`) go over its own replicas by their own work, wherever their samples are:
    what leaves the encoder is routed straight to its consumer, which is OrchMLLM's composition of two rearrangements.

    The result does not depend on the order of `lengths`. Raises AssignmentError as `validate_inputs` does.
    """
    validate_inputs(lengths, graph=graph, options=options)
    work = BatchWork(graph, lengths, options)
    return place_every_unit(balance_samples(work, plan=plan), work, plan=plan)


def follow_llm(llm: Replicas, work: BatchWork, *, plan: Plan) -> Assignment:
    """Place encoders and generators beside the LLM's microbatches."""
    return _place(follow_samples, llm, work, plan=plan)


def place_every_unit(llm: Replicas, work: BatchWork, *, plan: Plan) -> Assignment:
    """Balance encoders by themselves, in the order in which these microbatches of the LLM need them; generators follow."""
    return _place(balance_items, llm, work, plan=plan)


def _place(place_encoder: Callable[..., Replicas], llm: Replicas, work: BatchWork, *, plan: Plan) -> Assignment:
    graph, needed = work.graph, in_time(llm)
    encoders = {
        unit.name: place_encoder(needed, work, unit=unit.name, num_replicas=plan.units[unit.name].data_parallel_size)
        for unit in graph.encoders
    }
    return Assignment({**encoders, graph.backbone.name: llm, **place_generators(llm, graph=graph, plan=plan)})


def balance_samples(work: BatchWork, *, plan: Plan, is_whole: bool = False) -> Replicas:
    """Balance the LLM's samples over its replicas, then over equally many microbatches in each (fewer where samples are few).

    is_whole: by what they ask of all units, not of the LLM alone.
    """
    backbone = work.graph.backbone.name
    samples = [Atom(sample_id) for sample_id in work.lengths_by_sample]
    num_replicas = plan.units[backbone].data_parallel_size
    count = work.options.count_microbatches(len(samples), num_replicas=num_replicas)
    amounts = work.whole_amounts(samples) if is_whole else work.amounts(backbone, [(sample,) for sample in samples])
    weights = dict(zip(samples, amounts, strict=True))
    cost = UnitCost() if is_whole else work.cost(backbone)
    replicas = _partition(samples, weights, cost=cost, num_bins=num_replicas)
    return tuple(
        tuple(filter(None, _partition(replica, weights, cost=cost, num_bins=min(count, len(replica))))) for replica in replicas
    )


def _partition(atoms: Sequence[Atom], weights: Mapping[Atom, int], *, cost: UnitCost, num_bins: int) -> tuple[Microbatch, ...]:
    """Partition atoms; inside a bin they keep their order."""
    if not atoms:
        return ((),) * num_bins
    bins = post_balance([weights[atom] for atom in atoms], num_bins=num_bins, cost=cost)
    return tuple(tuple(atoms[index] for index in sorted(members)) for members in bins)
