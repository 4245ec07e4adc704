"""What a rank of an emulated run gets instead of data: microbatches of the right sizes."""

import torch

from megatron.runtime.emulation.emulated_stage import EmulatedInput
from megatron.runtime.step.step import Step
from megatron.runtime.step.token_placement import WHOLE
from multimodal.model.stage_input import PackedInput
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.plan import Plan


def with_emulated_inputs(step: Step, *, plan: Plan, rank: int) -> Step:
    """The same step with inputs that hold sizes alone, for the microbatches that pass through this rank."""
    inputs: dict[MicrobatchPlace, PackedInput] = {}
    subset_inputs: dict[MicrobatchPlace, tuple[PackedInput, ...]] = {}
    for unit, unit_plan in plan.units.items():
        context_rank = unit_plan.context_parallel_rank(rank) if rank in unit_plan.ranks else 0
        for replica_index, replica in enumerate(unit_plan.replicas):
            if rank not in replica.ranks:
                continue
            for microbatch in range(step.assignment.num_microbatches(unit, replica_index)):
                place = MicrobatchPlace(unit, replica_index, microbatch)
                if place in step.form.num_parts:
                    parts = range(len(step.subsets(place)))
                    subset_inputs[place] = tuple(_input(step, place, part, rank=context_rank) for part in parts)
                else:
                    inputs[place] = _input(step, place, WHOLE, rank=context_rank)
    return step.changed(inputs=inputs, target_samples=dict.fromkeys(inputs, ()), subset_inputs=subset_inputs)


def _input(step: Step, place: MicrobatchPlace, part: int, *, rank: int) -> EmulatedInput:
    """Of a sample subset, or of the whole microbatch: the tokens and rows of one context parallel rank."""
    num_tokens, routes = step.num_tokens_of(place), step.routes.from_source.get(place, ())
    if part != WHOLE:
        num_tokens = step.num_tokens_of_subsets(place)[part]
        routes = tuple(route for route in routes if step.part_of(route) == part)
    num_rows = sum(step.placement.num_rows_given(route, rank=rank) for route in routes)
    return EmulatedInput(
        (num_tokens,),
        torch.zeros(0),
        share=step.placement.own_share(place, part=part, rank=rank),
        place=place,
        num_output_rows=num_rows,
        hands_on=bool(routes),
        fraction=num_tokens / step.num_tokens_of(place),
    )
