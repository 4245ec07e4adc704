"""The form of a schedule in which every backward is split."""

from multimodal.values.assignment import Assignment
from multimodal.values.backward_need import stage_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Place
from multimodal.values.schedule_form import ScheduleForm


def split_form(graph: ModelGraph, plan: Plan, assignment: Assignment) -> ScheduleForm:
    """Return the form in which every backward is an input gradient and, where something is trained, a weight gradient."""
    return ScheduleForm(
        split=frozenset(
            Place(unit, replica, stage, microbatch)
            for unit in graph.unit_names
            for replica in range(plan.units[unit].data_parallel_size)
            for stage in range(plan.units[unit].num_virtual_stages)
            if stage_backward_need(graph, plan, unit, replica, stage).has_backward
            for microbatch in range(assignment.num_microbatches(unit, replica))
        )
    )
