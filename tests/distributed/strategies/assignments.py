"""Random assignments of samples and items to replicas and microbatches."""

from collections.abc import Sequence

from hypothesis import strategies as st

from multimodal.values.assignment import Assignment, Atom, Microbatch
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from tests.distributed.random_source import RandomSource


@st.composite
def assignments(draw: st.DrawFn, graph: ModelGraph, plan: Plan, source: RandomSource) -> Assignment:
    """Any grouping of every unit's atoms, in any order, on any replica, apart from all other units'.

    Generators are given all samples, or only those that have something for them.
    """
    atoms: dict[str, list[Atom]] = {name: [] for name in graph.unit_names}
    gives_all = draw(st.booleans())
    for index in range(len(source)):
        atoms["llm"].append(Atom(index))
        items = source.lengths(index).items
        for generator in graph.generators:
            if gives_all or any(item.unit == generator.name for item in items):
                atoms[generator.name].append(Atom(index))
        for item, lengths in enumerate(items):
            for name in lengths.units if graph.unit(lengths.unit).role is Role.ENCODER else ():
                atoms[name].append(Atom(index, item))
    return Assignment({name: draw(_groupings(atoms[name], plan.units[name].data_parallel_size)) for name in graph.unit_names})


@st.composite
def _groupings(draw: st.DrawFn, atoms: Sequence[Atom], num_replicas: int) -> tuple[tuple[Microbatch, ...], ...]:
    replicas: list[list[list[Atom]]] = [[] for _ in range(num_replicas)]
    for atom in draw(st.permutations(atoms)):
        replica = replicas[draw(st.integers(0, num_replicas - 1))]
        if not replica or draw(st.booleans()):
            replica.append([])
        replica[-1].append(atom)
    return tuple(tuple(map(tuple, replica)) for replica in replicas)
