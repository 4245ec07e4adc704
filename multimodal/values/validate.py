"""Checks of plans and assignments: that they fit a model, the ranks and a global batch."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from multimodal.values.arrays.rows import Integers
from multimodal.values.assignment import Assignment, Atom, PlacedAtoms
from multimodal.values.errors import AssignmentError, PlanError
from multimodal.values.file_form import at_line
from multimodal.values.model_graph import Experts, ModelGraph, Role, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.sample_lengths import LengthArrays, LengthBatch, SampleLengths
from multimodal.values.typed_reader import Plain


def read_plan(path: str | Path, *, graph: ModelGraph, world_size: int | None = None) -> Plan:
    """Read a plan file, which a user may have edited, and check it; a PlanError names the line.

    world_size: number of processes; None: as many as the plan uses.
    """
    plan = Plan.from_file(path)
    try:
        validate_plan(plan, graph=graph, world_size=plan.num_ranks if world_size is None else world_size)
    except PlanError as problem:
        raise at_line(path, problem) from None
    return plan


def validate_plan(plan: Plan, *, graph: ModelGraph, world_size: int) -> None:
    """Check that a plan fits the model and the ranks; raises PlanError with the place and the fix."""
    at = Plain(None, "the plan", PlanError, ("units",))
    if missing := [name for name in graph.unit_names if name not in plan.units]:
        raise PlanError(
            f"the plan says nothing of unit '{missing[0]}'; the model's units are {', '.join(graph.unit_names)}", place=at.place
        )
    if unknown := [name for name in plan.units if name not in graph.unit_names]:
        raise PlanError(
            f"the plan is for a unit '{unknown[0]}' that the model lacks (its units are {', '.join(graph.unit_names)}); "
            "use the plan that belongs to this model",
            place=("units", unknown[0]),
        )
    for name in graph.unit_names:
        of_unit = at.inner(name, None, where=f"unit '{name}'")
        _validate_unit(plan.units[name], graph.unit(name), at=of_unit)
        _validate_shares(plan, graph=graph, name=name, at=of_unit.inner("microbatch_shares", None, where=of_unit.where))
    used = {rank for unit in plan.units.values() for rank in unit.ranks}
    if len(used) != world_size or min(used) < 0 or max(used) >= world_size:
        idle = (rank for rank in range(world_size) if rank not in used)
        beyond = sorted(rank for rank in used if not 0 <= rank < world_size)
        problem = f"ranks {_first_of(beyond)} do not exist" if beyond else f"ranks {_first_of(idle)} have nothing to do"
        stages = (each for name, unit in plan.units.items() for each in _stages(unit, at.inner(name, None)))
        raise PlanError(
            f"the plan uses {len(used)} ranks but the run has {world_size}: {problem}; "
            f"launch {len(used)} processes or change the plan",
            place=next((place_of().place for place_of, stage in stages if beyond and beyond[0] in stage.ranks), at.place),
        )


def _first_of(ranks: Iterable[int]) -> str:
    first = list(islice(ranks, 17))
    return f"[{', '.join(map(str, first[:16]))}{', ...' * (len(first) > 16)}]"


def _stages(unit: UnitPlan, at: Plain) -> Iterator[tuple[Callable[[], Plain], Stage]]:
    """Yield the stages of a unit with functions that return their places, of which only errors need one."""
    for replica_index, replica in enumerate(unit.replicas):
        for index, stage in enumerate(replica.stages):
            yield partial(_stage_place, at, replica_index, index), stage


def _stage_place(at: Plain, replica_index: int, index: int) -> Plain:
    of_replica = _replica_place(at, replica_index)
    return of_replica.inner("stages", None).inner(index, None, where=f"{of_replica.where}, stage {index}")


def _replica_place(at: Plain, index: int) -> Plain:
    return at.inner("replicas", None).inner(index, None, where=f"{at.where}, replica {index}")


def _validate_unit(unit: UnitPlan, described: Unit, *, at: Plain) -> None:
    num_layers = len(described.layers)
    for what in ("tensor_parallel_size", "context_parallel_size"):
        if (size := getattr(unit, what)) < 1:
            at.inner(what, None, where=at.where).fail(f"{what} is {size}; set it to at least 1")
    _validate_tensor_size(unit, unit.tensor_parallel_size, described, at=at, at_unit=at)
    if unit.expert_parallel_size != 1 and (problem := _problem_of_experts(unit, described.transformer.experts)):
        at.inner("expert_parallel_size", None, where=at.where).fail(problem)
    seen: set[int] = set()
    for place_of, stage in _stages(unit, at):
        before = len(seen)
        seen.update(stage.ranks)
        if len(seen) < before + len(stage.ranks):
            problem = "a rank appears in two of its stages; each rank may hold one stage of a unit"
            replace(place_of(), where=at.where).fail(problem)
    stages = _stages(unit, at)
    for replica_index, replica in enumerate(unit.replicas):
        for place_of, stage in islice(stages, len(replica.stages)):
            _validate_ranks(unit, stage, described, place_of=place_of, at_unit=at)
        if not _covers(replica, num_layers):
            ranges = [list(pair) for stage in replica.stages for pair in stage.layer_ranges]
            _replica_place(at, replica_index).fail(
                f"its layer ranges {ranges} must cover layers 0 to {num_layers - 1} once each "
                f"({described.layers[0]}, {described.transformer.num_layers} transformer layers, {described.layers[-1]})"
            )


def _problem_of_experts(unit: UnitPlan, experts: Experts | None) -> str:
    size = unit.expert_parallel_size
    if size < 1:
        return f"expert_parallel_size is {size}; set it to at least 1"
    if experts is None:
        return f"expert parallel size {size} is for units with experts, which this one lacks; leave it out"
    if experts.num_experts % size:
        return f"expert parallel size {size} does not divide its {experts.num_experts} experts; choose one that does"
    if unit.is_unlike:
        return f"expert parallel size {size} is for replicas that are alike, and these differ in their stages; give all the same"
    if unit.data_parallel_size % size:
        return (
            f"expert parallel size {size} groups neighbouring replicas, and does not divide the {unit.data_parallel_size} that "
            "there are; change one of the two (--expert-model-parallel-size, data parallel size)"
        )
    grids = [[rank for stage in replica.stages for rank in stage.ranks] for replica in unit.replicas]
    if any(first >= second for pair in pairwise(grids) for first, second in zip(*pair, strict=True)):
        return "replicas that share experts must be listed in the order of their ranks, in every stage; list them so"
    return ""


def _validate_tensor_size(unit: UnitPlan, size: int, described: Unit, *, at: Plain, at_unit: Plain) -> None:
    """Check a tensor parallel size; at: the unit's place, or that of a stage with a size of its own."""
    name, at_size = described.name, at.inner("tensor_parallel_size", None, where=at_unit.where)
    for what, divided in described.divided_widths.items():
        if divided % size:
            at_size.fail(
                f"{what} {divided} is not divisible by tensor parallel size {size}; "
                f"choose a --{name.replace('_', '-')}-tensor-model-parallel-size that divides it (in a plan file, "
                "tensor_parallel_size)"
            )
    if described.module is not None and size * unit.context_parallel_size > 1:
        (at_size if size > 1 else at_unit.inner("context_parallel_size", None, where=at_unit.where)).fail(
            f"tp {size} x cp {unit.context_parallel_size} would cut a module of transformers, which is one piece; "
            "give it replicas instead (tp 1, cp 1)"
        )


def _validate_ranks(unit: UnitPlan, stage: Stage, described: Unit, *, place_of: Callable[[], Plain], at_unit: Plain) -> None:
    size = unit.tensor_parallel_size
    if stage.tensor_parallel_size is not None:
        size = stage.tensor_parallel_size
        if size < 1:
            place_of().fail(f"tensor_parallel_size is {size}; set it to at least 1")
        _validate_tensor_size(unit, size, described, at=place_of(), at_unit=at_unit)
    if len(stage.ranks) != size * unit.context_parallel_size:
        place_of().fail(
            f"tp {size} x cp {unit.context_parallel_size} needs {size * unit.context_parallel_size} ranks, found "
            f"{len(stage.ranks)} {list(stage.ranks)}"
        )
    if list(stage.ranks) != sorted(set(stage.ranks)):
        place_of().fail(f"ranks {list(stage.ranks)} must be listed in ascending order")


def _validate_shares(plan: Plan, *, graph: ModelGraph, name: str, at: Plain) -> None:
    shares, llm = plan.units[name].microbatch_shares, graph.backbone.name
    num_replicas, of_llm = plan.units[name].data_parallel_size, plan.units[llm].data_parallel_size
    if not shares:
        return
    if name == llm:
        if len(shares) != num_replicas:
            at.fail(f"found {len(shares)} microbatch_shares for {num_replicas} replicas; give one for each")
        if min(shares) < 1:
            at.fail(f"microbatch_shares are {list(shares)}; give every replica of the LLM a share of at least 1")
        return
    if graph.unit(name).role is not Role.ENCODER:
        at.fail("microbatch_shares are for encoders and the LLM alone; leave them out")
    if (wanted := of_llm * len(shares)) != num_replicas:
        at.fail(
            f"{len(shares)} microbatch_shares for each of the {of_llm} replicas of '{llm}' are for {wanted} replicas, found "
            f"{num_replicas}; give one share for each replica of '{name}' that serves one replica of '{llm}'"
        )
    if not any(shares):
        at.fail("microbatch_shares are all 0; give one replica at least something to do")


def _covers(replica: Replica, num_layers: int) -> bool:
    """Return True if a replica's layer ranges, none empty, hold every layer once; lists no layers, since a range may be huge."""
    ranges = [stage.layers for stage in replica.virtual_stages]
    bounds = [0, *(layers.stop for layers in ranges)]
    return bounds[-1] == num_layers and all(
        layers.start == first < layers.stop for first, layers in zip(bounds, ranges, strict=False)
    )


def validate_assignment(assignment: Assignment, lengths: Sequence[SampleLengths], *, graph: ModelGraph, plan: Plan) -> None:
    """Check that every atom of a global batch is placed exactly once, in a replica that exists, and that no microbatch is empty.

    A generator need not be assigned samples without anything for it to generate.
    """
    arrays = LengthBatch.of(lengths).arrays
    for name in graph.unit_names:
        if name not in assignment.placed:
            raise AssignmentError(f"the assignment says nothing of unit '{name}'")
        placed, num_replicas = assignment.placed[name], plan.units[name].data_parallel_size
        if placed.num_replicas != num_replicas:
            raise AssignmentError(f"unit '{name}': the assignment has {placed.num_replicas} replicas, the plan {num_replicas}")
        if not np.diff(placed.atom_starts).all():
            raise AssignmentError(f"unit '{name}': a microbatch is empty; leave it out")
        if problem := _misplaced(placed, arrays, role=graph.unit(name).role, unit=name):
            raise AssignmentError(f"unit '{name}': {problem}")


def _misplaced(placed: PlacedAtoms, arrays: LengthArrays, *, role: Role, unit: str) -> str:
    """Describe an error in the places of a unit's atoms; empty if there is none. O(atoms log)."""
    items = arrays.items_of(unit)
    of_items, indices = arrays.sample_ids[arrays.sample_of_item[items]], arrays.index_of_item[items]
    whole = np.full(len(arrays), -1)
    expected = _in_order(of_items, indices) if role is Role.ENCODER else _in_order(arrays.sample_ids, whole)
    found = _in_order(placed.sample_ids, placed.item_indices)
    if np.array_equal(found, expected):
        return ""
    atoms = {Atom(*row) for row in found.tolist()}
    if len(atoms) < len(found):
        repeated, count = next(each for each in sorted(Counter(map(tuple, found.tolist())).items()) if each[1] > 1)
        return f"{_describe(Atom(*repeated))} is placed {count} times; place it once"
    wanted = {Atom(*row) for row in expected.tolist()}
    needed = wanted if role is not Role.GENERATOR else {Atom(sample) for sample in of_items.tolist()}
    if missing := sorted(needed - atoms):
        return f"{_describe(missing[0])} is placed nowhere ({len(missing)} such)"
    if unknown := sorted(atoms - wanted):
        return f"{_describe(unknown[0])} is not in the global batch or not for this unit"
    return ""


def _in_order(sample_ids: Integers, item_indices: Integers) -> Integers:
    """Return atoms as rows, [num_atoms, 2], sorted."""
    order = np.lexsort((item_indices, sample_ids))
    return np.column_stack((sample_ids[order], item_indices[order]))


def _describe(atom: Atom) -> str:
    return f"sample {atom.sample_id}" if atom.item_index < 0 else f"item {atom.item_index} of sample {atom.sample_id}"
