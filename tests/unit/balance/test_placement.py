"""Placement of encoders and generators: examples, and arrays against the same rules atom by atom."""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.balance.algorithms.cut_evenly import cut_evenly
from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.balance_options import BalanceOptions, Granularity
from multimodal.balance.batch_work import BatchWork, list_items
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.balance.placement import Groups, drop_idle_samples, follow_llm, place_every_unit, place_generators
from multimodal.cost.flops import unit_flops
from multimodal.cost.unit_load import item_load, sample_load
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.arrays.rows import row_starts
from multimodal.values.assignment import Assignment, Atom, Microbatch, MicrobatchPlace, PlacedAtoms
from multimodal.values.errors import AssignmentError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.validate import validate_assignment
from tests.unit.plan.planners.planning_cases import THREE, TWO_ENCODERS, random_lengths

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "llm": {"role": "backbone", **SHAPE},
            **{name: {"role": "generator", **SHAPE} for name in ("painter", "engraver")},
        }
    }
)
LENGTHS = tuple(
    SampleLengths(sample, tuple(ItemLengths(unit, 4, 0) for unit in units), 5, 5)
    for sample, units in enumerate([("painter",), (), ("engraver", "painter"), ("painter", "painter"), ("engraver",)])
)
LLM = (((Atom(0), Atom(1)), (Atom(4),)), ((Atom(2), Atom(3)),))


@pytest.fixture(scope="module")
def plan(build_plan):
    return build_plan(llm=2, painter=1, engraver=3)


@pytest.fixture(scope="module")
def generators(plan):
    placed = place_generators(PlacedAtoms.of_replicas(LLM), graph=GRAPH, plan=plan)
    return {unit: atoms.replicas for unit, atoms in placed.items()}


def test_a_generator_keeps_the_llms_placement_where_replicas_have_unequally_many_microbatches(build_plan) -> None:
    llm = (((Atom(0),),), ((Atom(1),), (Atom(2),)), ((Atom(3),), (Atom(4),)))
    placed = place_generators(PlacedAtoms.of_replicas(llm), graph=GRAPH, plan=build_plan(llm=3, painter=3, engraver=1))
    assert placed["painter"].replicas == llm
    assert placed["engraver"].replicas == (tuple((Atom(sample),) for sample in (0, 1, 3, 2, 4)),)


def test_samples_without_work_are_dropped_and_so_are_empty_microbatches(plan, generators) -> None:
    assignment = Assignment({"llm": LLM, **generators})
    kept = drop_idle_samples(assignment, graph=GRAPH, lengths=LENGTHS)
    assert kept.units["llm"] == LLM
    assert kept.units["painter"] == (((Atom(0),), (Atom(2), Atom(3))),)
    assert kept.units["engraver"] == ((), ((Atom(2),),), ((Atom(4),),))
    for each in (assignment, kept):
        validate_assignment(each, LENGTHS, graph=GRAPH, plan=plan)
    routes = kept.routes(GRAPH).from_source
    assert [route.target.unit for route in routes[MicrobatchPlace("llm", 0, 0)]] == ["painter"]
    assert [route.target.unit for route in routes[MicrobatchPlace("llm", 1, 0)]] == ["engraver", "painter"]


def test_a_sample_with_work_must_be_placed(plan) -> None:
    units = {"llm": LLM, "painter": (((Atom(0),), (Atom(3),)),), "engraver": (((Atom(2), Atom(4)),), (), ())}
    with pytest.raises(AssignmentError, match="unit 'painter': sample 2 is placed nowhere"):
        validate_assignment(Assignment(units), LENGTHS, graph=GRAPH, plan=plan)


Case = tuple[ModelGraph, Plan, list[SampleLengths], list[list[list[int]]], BalanceOptions]


@st.composite
def batches(draw: st.DrawFn) -> Case:
    """A model, a plan, samples, and any microbatches of them over the replicas of the LLM."""
    graph = draw(st.sampled_from((THREE, TWO_ENCODERS)))
    sizes = {name: UnitSizes(data_parallel_size=draw(st.integers(1, 3))) for name in graph.unit_names}
    plan = plan_disaggregated(graph, sizes=sizes, world_size=sum(size.num_ranks or 0 for size in sizes.values()))
    lengths = list(random_lengths(graph, count=draw(st.integers(1, 9)), seed=draw(st.integers(0, 99))))
    replicas: list[list[list[int]]] = [[] for _ in plan.units["llm"].replicas]
    for sample in draw(st.permutations(range(len(lengths)))):
        replica = replicas[draw(st.integers(0, len(replicas) - 1))]
        if not replica or draw(st.booleans()):
            replica.append([])
        replica[-1].append(sample)
    encoders = [unit.name for unit in graph.encoders]
    costs = {name: LengthCost(draw(st.sampled_from(CostForm)), 0.01) for name in encoders if draw(st.booleans())}
    most = {name: draw(st.integers(1, 3)) for name in encoders if draw(st.booleans())}
    granularity = draw(st.sampled_from(Granularity))
    options = BalanceOptions(unit_costs=costs, encoder_micro_batch_sizes=most, granularity=granularity, vocab_size=512)
    return graph, plan, draw(st.permutations(lengths)), replicas, options


def amount_of(graph: ModelGraph, sample: SampleLengths, atom: Atom, unit: str, options: BalanceOptions) -> float:
    item = sample.items[atom.item_index] if atom.item_index >= 0 else None
    load = item_load(item.num_tokens, item.num_output_tokens) if item else sample_load(graph.unit(unit), sample)
    return load.num_tokens if unit in options.unit_costs else unit_flops(graph, unit, vocab_size=512).of(load)


def by_time(replicas: Sequence[Sequence[Microbatch]]) -> list[Microbatch]:
    rounds = range(max(map(len, replicas), default=0))
    return [replica[index] if index < len(replica) else () for index in rounds for replica in replicas]


def dealt(microbatches: Sequence[Microbatch], num_replicas: int) -> tuple[tuple[Microbatch, ...], ...]:
    return tuple(tuple(filter(None, microbatches[replica::num_replicas])) for replica in range(num_replicas))


def plain_assignment(case: Case, *, balances: bool) -> Assignment:
    """Place encoders and generators beside the LLM, or balance encoders, atom by atom."""
    graph, plan, lengths, replicas, options = case
    by_sample = {sample.sample_id: sample for sample in lengths}
    llm = tuple(tuple(tuple(map(Atom, microbatch)) for microbatch in replica) for replica in replicas)
    needed = by_time(llm)
    units = {"llm": llm}
    for unit in graph.generators:
        units[unit.name] = dealt(needed, plan.units[unit.name].data_parallel_size)
    for unit in (unit.name for unit in graph.encoders):
        num_replicas, size = plan.units[unit].data_parallel_size, options.encoder_micro_batch_sizes.get(unit)
        items = [list_items(microbatch, unit=unit, lengths_by_sample=by_sample) for microbatch in needed]
        flat = [atom for microbatch in items for atom in microbatch]
        amounts = {atom: amount_of(graph, by_sample[atom.sample_id], atom, unit, options) for atom in flat}
        if not balances:
            cut = items if size is None else [tuple(flat[first : first + size]) for first in range(0, len(flat), size)]
            units[unit] = dealt(cut, num_replicas)
            continue
        together: dict[object, list[Atom]] = {}
        for atom in sorted(flat):
            together.setdefault(atom if options.granularity is Granularity.ITEM else atom.sample_id, []).append(atom)
        scale = 1.0
        if unit not in options.unit_costs:
            flops = unit_flops(graph, unit, vocab_size=512)
            scale = 1024 / (flops.of(item_load(1, 0)._replace(num_squared=0, num_sequences=0)))
        of_groups = [round(scale * sum(amounts[atom] for atom in group)) for group in together.values()]
        cost = options.unit_costs.get(unit, LengthCost())
        bin_of_group = post_balance(of_groups, num_bins=num_replicas, cost=cost) if flat else np.zeros(0)
        scaled = {atom: round(scale * amounts[atom]) for atom in flat}
        groups, count = list(together.values()), -(-sum(map(bool, items)) // num_replicas)
        made = []
        for replica in range(num_replicas):
            members = np.flatnonzero(bin_of_group == replica)
            atoms = sorted((atom for index in members for atom in groups[index]), key=flat.index)
            of_atoms = [1 if size else scaled[atom] for atom in atoms]
            most = -(-len(atoms) // size) if size else count
            starts, _ = cut_evenly(np.array(of_atoms, np.int64), np.array([0, len(atoms)]), np.array([most]))
            made.append(tuple(tuple(atoms[first:last]) for first, last in pairwise(starts)))
        units[unit] = tuple(made)
        if flat and size is None:
            ordered = sorted(zip(groups, of_groups, strict=True), key=lambda pair: min(map(flat.index, pair[0])))
            in_rounds = plain_rounds(ordered, cost, num_rounds=count, num_replicas=num_replicas, order=flat)
            units[unit] = min(units[unit], in_rounds, key=lambda placed: busiest(placed, scaled, cost))
    return Assignment({unit: units[unit] for unit in (*(each.name for each in graph.encoders), *units)})


def cost_of(amounts: Sequence[int], cost: LengthCost) -> float:
    return float(cost.row_costs(np.array([0, len(amounts)]), np.array(amounts, np.int64))[0])


def busiest(replicas: Sequence[Sequence[Microbatch]], amounts: Mapping[Atom, int], cost: LengthCost) -> float:
    costs = [[cost_of([amounts[atom] for atom in microbatch], cost) for microbatch in replica] for replica in replicas]
    return max(map(sum, costs)) + max(map(max, filter(None, costs)))


def plain_rounds(
    groups: Sequence[tuple[list[Atom], int]], cost: LengthCost, *, num_rounds: int, num_replicas: int, order: list[Atom]
) -> tuple[tuple[Microbatch, ...], ...]:
    """Groups in the order of need, cut into rounds, each of which is balanced over the replicas."""
    amounts = [amount for _, amount in groups]
    starts, _ = cut_evenly(np.array(amounts), np.array([0, len(groups)]), np.array([num_rounds]))
    made: list[list[Microbatch]] = [[] for _ in range(num_replicas)]
    totals = [0.0] * num_replicas
    for first, last in pairwise(starts):
        bins = post_balance(amounts[first:last], num_bins=num_replicas, cost=cost)
        members = [first + np.flatnonzero(bins == number) for number in range(num_replicas)]
        costs = [cost_of([amounts[index] for index in own], cost) for own in members]
        idlest = sorted(range(num_replicas), key=totals.__getitem__)
        for owner, number in zip(idlest, sorted(range(num_replicas), key=lambda each: -costs[each]), strict=True):
            totals[owner] += costs[number]
            atoms = sorted((atom for index in members[number] for atom in groups[index][0]), key=order.index)
            made[owner] += [tuple(atoms)] if atoms else []
    return tuple(map(tuple, made))


@pytest.mark.parametrize(("place", "balances"), [(follow_llm, False), (place_every_unit, True)])
@settings(max_examples=60)
@given(case=batches())
def test_units_are_placed_as_atom_by_atom(place, balances: bool, case: Case) -> None:
    graph, plan, lengths, replicas, options = case
    microbatches = list(chain.from_iterable(replicas))
    atoms = np.array(list(chain.from_iterable(microbatches)), np.int64)
    groups = Groups(atoms, row_starts(list(map(len, microbatches))), row_starts(list(map(len, replicas))))
    found = place(groups, BatchWork(graph, lengths, options), plan=plan)
    assert found == plain_assignment(case, balances=balances)
    validate_assignment(found, lengths, graph=graph, plan=plan)


@settings(max_examples=30)
@given(case=batches())
def test_work_is_counted_as_atom_by_atom(case: Case) -> None:
    graph, _, lengths, _, options = case
    work = BatchWork(graph, lengths, options)
    in_order = sorted(lengths, key=lambda sample: sample.sample_id)
    whole = [0.0] * len(lengths)
    for unit in (*graph.encoders, graph.backbone, *graph.generators):
        flops = unit_flops(graph, unit.name, vocab_size=512)
        for number, sample in enumerate(in_order):
            atoms = [Atom(sample.sample_id)]
            if unit in graph.encoders:
                atoms = list(list_items(atoms, unit=unit.name, lengths_by_sample={sample.sample_id: sample}))
            loads = [
                item_load(*sample.items[atom.item_index][1:3]) if atom.item_index >= 0 else sample_load(unit, sample)
                for atom in atoms
            ]
            whole[number] += sum((sum(map(flops.forward.of, loads)), sum(map(flops.backward.of, loads))))
    assert work.whole_sample_flops().tolist() == pytest.approx(whole, rel=1e-15)
