"""Placement of encoders and generators: examples, and random batches as golden text."""

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions, Granularity, MicrobatchCount
from multimodal.balance.batch_work import BatchWork, list_items
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.balance.placement import Groups, drop_idle_samples, follow_llm, place_every_unit
from multimodal.cost.flops import unit_flops
from multimodal.cost.unit_load import item_load, sample_load
from multimodal.kernels import kernels
from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.arrays.rows import row_starts
from multimodal.values.assignment import Assignment, Atom, Microbatch, MicrobatchPlace, PlacedAtoms
from multimodal.values.errors import AssignmentError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.validate import validate_assignment
from tests.unit.golden_answers import Kinds, golden_test
from tests.unit.plan.planners.planning_cases import GRAPHS, random_lengths

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


def place(llm: Any, plan: Any) -> Assignment:
    atoms = PlacedAtoms.of_replicas(llm)
    groups = Groups(atoms.sample_ids, atoms.atom_starts, atoms.microbatch_starts)
    return follow_llm(groups, BatchWork(GRAPH, LENGTHS, BalanceOptions()), plan=plan)


def test_a_generator_keeps_the_llms_placement_where_replicas_have_unequally_many_microbatches(build_plan) -> None:
    llm = (((Atom(0),),), ((Atom(1),), (Atom(2),)), ((Atom(3),), (Atom(4),)))
    placed = place(llm, build_plan(llm=3, painter=3, engraver=1)).units
    assert placed["painter"] == llm
    assert placed["engraver"] == (tuple((Atom(sample),) for sample in (0, 1, 3, 2, 4)),)


def test_samples_without_work_are_dropped_and_so_are_empty_microbatches(plan) -> None:
    assignment = place(LLM, plan)
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


def placement_text(assignment: Assignment) -> str:
    """Return samples, and items behind a dot, in their microbatches (|) and replicas (/)."""

    def microbatch_text(microbatch: Microbatch) -> str:
        return " ".join(str(atom.sample_id) + (f".{atom.item_index}" if atom.item_index >= 0 else "") for atom in microbatch)

    texts = {unit: ["|".join(map(microbatch_text, replica)) for replica in each] for unit, each in assignment.units.items()}
    return "; ".join(f"{unit} {' / '.join(replicas)}" for unit, replicas in texts.items())


def place_batch(document: dict[str, Any]) -> str:
    """Place random samples beside the LLM's microbatches, and with every encoder balanced by itself."""
    graph, costs = GRAPHS[document["model"]], document["costs"]
    sizes = {name: UnitSizes(data_parallel_size=size) for name, size in document["replicas"].items()}
    plan = plan_disaggregated(graph, sizes=sizes, world_size=sum(document["replicas"].values()))
    replicas = [[[int(sample) for sample in group.split()] for group in each.split("|")] for each in document["llm"].split("/")]
    lengths = random_lengths(graph, count=sum(map(len, chain.from_iterable(replicas))), seed=document["seed"])
    options = BalanceOptions(
        unit_costs={unit: LengthCost(CostForm(form), 0.01) for unit, form in costs.items()},
        encoder_micro_batch_sizes=document["sizes"],
        granularity=Granularity(document["granularity"]),
        vocab_size=512,
    )
    microbatches = list(chain.from_iterable(replicas))
    atoms = np.array(list(chain.from_iterable(microbatches)), np.int64)
    groups = Groups(atoms, row_starts(list(map(len, microbatches))), row_starts(list(map(len, replicas))))
    found = [place(groups, BatchWork(graph, lengths, options), plan=plan) for place in (follow_llm, place_every_unit)]
    for each in found:
        validate_assignment(each, lengths, graph=graph, plan=plan)
    return " -- ".join(map(placement_text, found))


def place_samples(document: dict[str, Any]) -> str:
    """Balance samples, each a number, its text's tokens and its items' units and tokens; by_tokens: units that tokens cost."""
    units = {name: {"role": "backbone" if name == "llm" else "encoder", **SHAPE} for name in document["replicas"]}
    graph = ModelGraph.from_dict({"units": units})
    sizes = {name: UnitSizes(data_parallel_size=size) for name, size in document["replicas"].items()}
    plan = plan_disaggregated(graph, sizes=sizes, world_size=sum(document["replicas"].values()))
    lengths = [
        SampleLengths(number, tuple(ItemLengths(unit, tokens, -(-tokens // 4)) for unit, tokens in items), text, text)
        for number, text, *items in document["samples"]
    ]
    options = BalanceOptions(unit_costs={unit: LengthCost() for unit in document["by_tokens"]}, **document["options"])
    options = replace(options, microbatch_count=MicrobatchCount(options.microbatch_count))
    found = BALANCERS[document["balancer"]](lengths, graph=graph, plan=plan, options=options)
    validate_assignment(found, lengths, graph=graph, plan=plan)
    return placement_text(found)


SAMPLES = {"balancer": "none", "replicas": {"vision": 1, "audio": 1, "llm": 1}, "samples": [[0, 1]], "by_tokens": []}
BATCH = {"model": "three", "replicas": {"vision": 1, "llm": 1, "generator": 1}, "llm": "0|1", "seed": 0}
PLACEMENTS: Kinds = {
    "batch": ({**BATCH, "costs": {}, "sizes": {}, "granularity": "item"}, place_batch),
    "samples": ({**SAMPLES, "options": {}}, place_samples),
}
needs_kernels = pytest.mark.skipif(kernels is None, reason="their searches find better placements than the references")
test_units_are_placed_as_written = needs_kernels(golden_test("placements.txt", PLACEMENTS))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ["three", "two-encoders"])
def test_work_is_counted_as_atom_by_atom(model: str, seed: int) -> None:
    graph = GRAPHS[model]
    lengths = random_lengths(graph, count=9, seed=seed)
    work = BatchWork(graph, lengths, BalanceOptions(vocab_size=512))
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
