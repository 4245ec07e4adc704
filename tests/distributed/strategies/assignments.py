"""Random samples: their items and texts."""

from collections.abc import Sequence

from hypothesis import strategies as st

from multimodal.values.assignment import Assignment, Atom, Microbatch
from multimodal.values.model_graph import ModelGraph, Role, Unit
from multimodal.values.plan import Plan
from tests.distributed.random_source import RandomSource, SampleShape

VOCAB_SIZE = 12
MAX_AUDIO_TOKENS = 6


@st.composite
def samples(draw: st.DrawFn, units: Sequence[Unit]) -> tuple[SampleShape, ...]:
    """One to seven samples with up to three items; some without items, some without target tokens, but not all."""
    found = []
    for _ in range(draw(st.integers(1, 7))):
        takers = [draw(st.sampled_from(units)) for _ in range(draw(st.integers(0, 3)) if units else 0)]
        items = [
            (unit.name, draw(st.integers(3, 2 * MAX_AUDIO_TOKENS)), 1)
            if unit.audio is not None
            else (unit.name, draw(st.integers(1, 2)), draw(st.integers(1, 3)))
            for unit in takers
        ]
        found.append(SampleShape(tuple(items), draw(st.integers(2, 6)), draw(st.integers(0, 2))))
    if not any(sample.num_target_tokens for sample in found):
        found[0] = SampleShape(found[0].items, found[0].num_text_tokens, 1)
    return tuple(found)


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
