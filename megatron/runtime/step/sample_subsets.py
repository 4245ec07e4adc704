"""The sample subsets that a microbatch runs as."""

from multimodal.values.assignment import Assignment, Microbatch, MicrobatchPlace
from multimodal.values.model_graph import ModelGraph
from multimodal.values.schedule_form import ScheduleForm, parts_of


def sample_subsets(
    place: MicrobatchPlace, *, form: ScheduleForm, graph: ModelGraph, assignment: Assignment
) -> tuple[Microbatch, ...]:
    """The atoms of each subset: one per consumer where the schedule cuts the microbatch's backward, else all in one.

    A microbatch that is cut runs its forward subset by subset, too, so that each has an autograd graph of its own. Packed samples
    do not see each other, so that changes no number.
    """
    return parts_of(place, graph, assignment) if place in form.num_parts else (assignment.atoms(place),)
