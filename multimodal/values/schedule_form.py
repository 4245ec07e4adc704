"""What a schedule does beyond one forward and one backward per microbatch and stage."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from multimodal.values.assignment import Assignment, Atom, MicrobatchPlace
from multimodal.values.model_graph import ModelGraph
from multimodal.values.schedule import ActionKind, Place, Schedule


@dataclass(frozen=True)
class ScheduleForm:
    """How a schedule cuts its backwards and reductions, and whether it gathers parameters.

    Whoever asks for dependencies of a schedule's actions passes this along: the same microbatch may be run either way.
    """

    split: frozenset[Place] = frozenset()
    """Places whose backward is an input gradient and, later, a weight gradient (zero bubble)."""
    num_parts: Mapping[MicrobatchPlace, int] = field(default_factory=dict)
    """Microbatches whose backward is cut into sample subsets, in all stages alike (Entrain 4.5.3)."""

    gathers_parameters: bool = False
    """Whether replicas gather a stage's updated parameters before its first forward (ZeRO-1)."""
    reduced_by_layer: frozenset[tuple[str, int]] = frozenset()
    """(unit, virtual stage) whose gradients are reduced in two parts: 0 layer by layer in the last microbatch's backward, 1 the
    layer that is done last."""

    def parts(self, place: MicrobatchPlace) -> tuple[int, ...]:
        """The values of `Action.part` that this microbatch's backwards carry."""
        num_parts = self.num_parts.get(place, 0)
        return tuple(range(num_parts)) if num_parts else (-1,)

    def gradient_kind(self, place: Place) -> ActionKind:
        """The kind of the action that gives a place's input gradient."""
        return ActionKind.INPUT_GRADIENT if place in self.split else ActionKind.BACKWARD

    def last_kind(self, place: Place) -> ActionKind:
        """The kind of the action after which a place's weight gradients are complete."""
        return ActionKind.WEIGHT_GRADIENT if place in self.split else ActionKind.BACKWARD

    def reduction_parts(self, unit: str, stage: int) -> tuple[int, ...]:
        """The values of `Action.part` that the reductions of a stage carry."""
        return (0, 1) if (unit, stage) in self.reduced_by_layer else (-1,)


PLAIN = ScheduleForm()
"""One backward per microbatch and stage; parameters are there."""


def form_of(schedule: Schedule) -> ScheduleForm:
    """Read a schedule's form from its actions; O(actions)."""
    actions = [action for lane in schedule.lanes for action in lane.actions]
    kinds = {action.kind for action in actions}
    gathers = ActionKind.GATHER_PARAMETERS in kinds
    halves = {ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT} & kinds
    split = {action.place for action in actions if action.kind in halves} if halves else set()
    num_parts: dict[MicrobatchPlace, int] = {}
    by_layer: set[tuple[str, int]] = set()
    for action in (action for action in actions if action.part >= 0):
        if action.kind is ActionKind.REDUCE_GRADIENTS:
            by_layer.add((action.unit, action.stage))
        else:
            place = MicrobatchPlace(action.unit, action.replica, action.microbatch)
            num_parts[place] = max(num_parts.get(place, 0), action.part + 1)
    form = ScheduleForm(frozenset(split), num_parts, gathers, frozenset(by_layer))
    return PLAIN if form == PLAIN else form


def parts_of(place: MicrobatchPlace, graph: ModelGraph, assignment: Assignment) -> tuple[tuple[Atom, ...], ...]:
    """The sample subsets of an encoder's microbatch: its atoms by the downstream microbatch that consumes them.

    Subsets come in the order of their consumers (microbatch, then replica); atoms keep their packing order. One subset per
    consumer, so a subset's gradient arrives in one piece, and subsets of samples that the LLM defers stand last (Entrain 4.5.3).
    """
    routes = assignment.routes(graph).from_source.get(place, ())
    ordered = sorted(routes, key=lambda route: (route.target.microbatch, route.target.replica, route.target.unit))
    position = {atom: index for index, atom in enumerate(assignment.atoms(place))}
    return tuple(tuple(sorted(route.atoms, key=position.__getitem__)) for route in ordered)
