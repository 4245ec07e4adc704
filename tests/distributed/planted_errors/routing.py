"""Errors of which sample goes where: dropped, run twice, exchanged."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.execution.step_inputs import StepInputs
from megatron.runtime.feed import step_planner
from megatron.runtime.step.step import Step
from multimodal.values.assignment import Assignment, Atom


@contextmanager
def reassigned(change: Callable[[Assignment], Assignment]) -> Iterator[None]:
    """Run another assignment than the one that was decided, past its validation."""
    original = step_planner.plan_step

    def planned(*args: Any, assignment: Assignment, **kwargs: Any) -> Step:
        return original(*args, assignment=change(assignment), **kwargs)

    with patch.object(step_planner, "validate_assignment"), patch("tests.distributed.gradient_case.plan_step", planned):
        yield


def without_last_sample(assignment: Assignment) -> Assignment:
    """Leave the sample with the highest number out of every unit."""
    last = max(atom.sample_id for replica in assignment.units["llm"] for microbatch in replica for atom in microbatch)
    kept = {
        unit: tuple(
            tuple(
                tuple(atom for atom in microbatch if atom.sample_id != last)
                for microbatch in replica
                if any(atom.sample_id != last for atom in microbatch)
            )
            for replica in replicas
        )
        for unit, replicas in assignment.units.items()
    }
    return Assignment(kept)


def with_a_sample_twice(assignment: Assignment) -> Assignment:
    """Give the LLM's first replica its first microbatch a second time."""
    first, *others = assignment.units["llm"]
    return Assignment({**assignment.units, "llm": ((*first, first[0]), *others)})


def _with_two_items_exchanged(assignment: Assignment) -> Assignment:
    exchange = {Atom(0, 0): Atom(1, 0), Atom(1, 0): Atom(0, 0)}
    replicas = tuple(
        tuple(tuple(exchange.get(atom, atom) for atom in microbatch) for microbatch in replica)
        for replica in assignment.units["vision"]
    )
    return Assignment({**assignment.units, "vision": replicas})


@contextmanager
def items_of_other_samples() -> Iterator[None]:
    """Encode the items where they were assigned, but send each to the sample of another one of its size."""
    original = Step.source_rows

    def rows(step: Step, route: Any) -> torch.Tensor:
        return original(replace(step, assignment=_with_two_items_exchanged(step.assignment)), route)

    with patch.object(Step, "source_rows", rows):
        yield


@contextmanager
def gradients_of_other_samples() -> Iterator[None]:
    """Forwards are right, but a gradient comes back to another sample's item."""
    original = RunningStep.collect_output_gradient

    def of_others(inputs: StepInputs, route: Any) -> torch.Tensor:
        with items_of_other_samples():
            placement, end = inputs._step.placement, route.source.unit
            return placement.output_rows(route, rank=inputs._step.plan.units[end].context_parallel_rank(inputs._rank))

    def collected(*args: Any) -> Any:
        with patch.object(StepInputs, "output_rows", of_others):
            return original(*args)

    with patch.object(RunningStep, "collect_output_gradient", collected):
        yield
