"""What a rank of an emulated run gets instead of data: microbatches of the right sizes."""

from dataclasses import replace

import torch

from megatron.runtime.emulated_stage import EmulatedInput
from megatron.runtime.step import Step
from multimodal.model.stage_input import PackedInput
from multimodal.schedule.repeated_work import repeated_places
from multimodal.values.assignment import Microbatch, MicrobatchPlace
from multimodal.values.model_graph import Role
from multimodal.values.plan import Plan


def with_emulated_inputs(step: Step, *, plan: Plan, rank: int) -> Step:
    """The same step with inputs that hold sizes alone, for the microbatches that pass through this rank."""
    inputs: dict[MicrobatchPlace, PackedInput] = {}
    subset_inputs: dict[MicrobatchPlace, tuple[PackedInput, ...]] = {}
    for unit, unit_plan in plan.units.items():
        for replica_index, replica in enumerate(unit_plan.replicas):
            if rank not in replica.ranks:
                continue
            for microbatch in range(step.assignment.num_microbatches(unit, replica_index)):
                place = MicrobatchPlace(unit, replica_index, microbatch)
                if place in step.form.num_parts:
                    subset_inputs[place] = tuple(_input(step, place, subset) for subset in step.subsets(place))
                else:
                    inputs[place] = _input(step, place, step.assignment.atoms(place))
            if step.form.repeats_encoders and step.graph.unit(unit).role is Role.ENCODER:
                repeated = repeated_places(unit, replica_index, graph=step.graph, plan=plan, assignment=step.assignment)
                for place in (MicrobatchPlace(unit, each.replica, each.microbatch) for each in repeated):
                    inputs[place] = _whole_input(step, place)
    return replace(step, inputs=inputs, target_samples=dict.fromkeys(inputs, ()), subset_inputs=subset_inputs)


def _whole_input(step: Step, place: MicrobatchPlace) -> EmulatedInput:
    num_rows = sum(map(step.num_rows_of_route, step.routes.from_source.get(place, ())))
    return EmulatedInput((step.num_tokens_of(place),), torch.zeros(0), place=place, num_output_rows=num_rows)


def _input(step: Step, place: MicrobatchPlace, atoms: Microbatch) -> EmulatedInput:
    whole = step.num_tokens_of(place)
    index = step.subsets(place).index(atoms)
    num_tokens = step.num_tokens_of_subsets(place)[index]
    routes = step.routes.from_source.get(place, ())
    num_rows = sum(step.num_rows_of_route(route) for route in routes if route.atoms[0] in atoms)
    return EmulatedInput((num_tokens,), torch.zeros(0), place=place, num_output_rows=num_rows, share=num_tokens / whole)
