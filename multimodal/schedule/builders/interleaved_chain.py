"""Interleaved 1F1B of several units that share lanes: one chain of virtual stages on one grid of lanes."""

from collections.abc import Iterator, Sequence

import numpy as np

from multimodal.schedule.builders.unit_order import Step
from multimodal.values.action import Action, ActionKind
from multimodal.values.plan import Plan
from multimodal.values.shape import StepShape

Position = tuple[tuple[str, int], ...]
"""The (unit, virtual stage) pairs that a lane runs in sequence as one chunk: several if one unit ends in it."""


def chain_of_replica(shape: StepShape, replica: int) -> tuple[Position, ...] | None:
    """Return the virtual stages of all units as one chain if lanes hold them in turn as Megatron deals model chunks; else None.

    Position c P + s of the chain is chunk c of lane s of P lanes (Optimus, Appendix B). All units must lie on these lanes
    together, have the same microbatches in this replica, and more than one chunk in each lane. Units without microbatches do
    not count, unless none has any.
    """
    held = [name for name in shape.graph.unit_names if replica < shape.plan.units[name].data_parallel_size]
    units = [name for name in held if shape.num_microbatches(name, replica)] or held
    is_coupled = len({shape.num_microbatches(unit, replica) for unit in units}) == 1
    is_coupled = is_coupled and all(_is_straight(shape, *edge) for edge in shape.graph.edges)
    return dealt_positions(units, shape.plan, replica) if is_coupled else None


def dealt_positions(units: Sequence[str], plan: Plan, replica: int) -> tuple[Position, ...] | None:
    """Return the virtual stages of units, upstream first, as one chain dealt to one grid of lanes in turn; else None."""
    if any(replica >= plan.units[name].data_parallel_size for name in units):
        return None
    places = [
        (name, stage.index, lanes)
        for name in units
        for stage in plan.units[name].replicas[replica].virtual_stages
        for lanes in [plan.lanes_of_stage(name, replica, stage.index)]
    ]
    lanes_in_turn: list[int] = []
    positions: list[list[tuple[str, int]]] = []
    for unit, stage, lanes in places:
        if len(lanes) > 1:
            return None
        if not positions or lanes[0] != lanes_in_turn[-1]:
            positions.append([])
            lanes_in_turn.append(lanes[0])
        positions[-1].append((unit, stage))
    num_lanes = len(set(lanes_in_turn))
    is_dealt = lanes_in_turn == lanes_in_turn[:num_lanes] * (len(positions) // num_lanes)
    if not is_dealt or len(positions) == num_lanes or num_lanes == 1:
        return None
    return tuple(tuple(position) for position in positions)


def chain_actions(
    steps: list[Step], positions: tuple[Position, ...], *, replica: int, lane: int, num_lanes: int
) -> Iterator[Action]:
    """Yield the actions of one lane's steps; lane: its number in the chain's order."""
    for step in steps:
        position = positions[step.chunk * num_lanes + lane]
        for unit, stage in position if step.kind is ActionKind.FORWARD else reversed(position):
            yield Action(step.kind, unit, replica, stage, step.microbatch)


def _is_straight(shape: StepShape, source: str, target: str) -> bool:
    """Return True if each microbatch of one unit leads only to the microbatch of the same number of another one."""
    ends = shape.routes.of_edge(source, target)
    counts = [shape.counts[unit] for unit in (source, target)]
    return all(
        np.array_equal(*(getattr(counted, name)[end] for counted, end in zip(counts, ends, strict=True)))
        for name in ("replica_of_microbatch", "index_in_replica")
    )
