"""Errors that a run can meet whatever its plan: samples and where they go, losses, masks, sums of gradients, generators."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from megatron.runtime.execution import step_messages
from megatron.runtime.execution.activation_store import ActivationStore
from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.execution.step_messages import StepInputs
from megatron.runtime.feed import step_planner
from megatron.runtime.gradients import gradients
from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.session import Session
from megatron.runtime.step.step import Step
from multimodal.attention.core_attention import CoreAttention
from multimodal.attention.packed_lengths import PackedLengths
from multimodal.model.layers.backbone_ends import LanguageHead
from multimodal.model.layers.generator_ends import GeneratorProjector
from multimodal.model.layers.layer_kind import StagePass
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.model.weight_gradient_queue import LinearWeightGradient
from multimodal.values.action import Place
from multimodal.values.assignment import Assignment, Atom

Error = Callable[[], AbstractContextManager[Any]]
"""Enters an error."""


def replaced(owner: Any, name: str, wrong: Callable[..., Any]) -> Error:
    """Return an error that calls `wrong` in place of a function, with the right one before its arguments."""

    def enter() -> AbstractContextManager[Any]:
        right = getattr(owner, name)
        return patch.object(owner, name, lambda *args, **keywords: wrong(right, *args, **keywords))

    return enter


def reassigned(change: Callable[[Assignment], Assignment]) -> Error:
    """Run another assignment than the one that was decided, past its validation."""

    @contextmanager
    def enter() -> Iterator[None]:
        right = step_planner.plan_step

        def planned(*args: Any, assignment: Assignment, **keywords: Any) -> Step:
            return right(*args, assignment=change(assignment), **keywords)

        with patch.object(step_planner, "validate_assignment"), patch("tests.distributed.gradient_case.plan_step", planned):
            yield

    return enter


def without_last_sample(assignment: Assignment) -> Assignment:
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
    first, *others = assignment.units["llm"]
    return Assignment({**assignment.units, "llm": ((*first, first[0]), *others)})


def rows_of_other_samples(right: Any, step: Step, route: Any) -> torch.Tensor:
    """Encode the items where they were assigned, but send each to the sample of another one of its size."""
    exchange = {Atom(0, 0): Atom(1, 0), Atom(1, 0): Atom(0, 0)}
    replicas = tuple(
        tuple(tuple(exchange.get(atom, atom) for atom in microbatch) for microbatch in replica)
        for replica in step.assignment.units["vision"]
    )
    rows: torch.Tensor = right(replace(step, assignment=Assignment({**step.assignment.units, "vision": replicas})), route)
    return rows


items_of_other_samples = replaced(Step, "source_rows", rows_of_other_samples)


def gradient_of_other_samples(right: Any, *args: Any) -> Any:
    """Forwards are right, but a gradient comes back to another sample's item."""

    def of_others(inputs: StepInputs, route: Any) -> torch.Tensor:
        with items_of_other_samples():
            placement, end = inputs._step.placement, route.source.unit
            return placement.output_rows(route, rank=inputs._step.plan.units[end].context_parallel_rank(inputs._rank))

    with patch.object(StepInputs, "output_rows", of_others):
        return right(*args)


def scaled_loss(scale: Callable[[Any, Any, Any], float]) -> Error:
    """Multiply every rank's loss by what `scale` returns for the run, the action and the loss."""

    def closed(right: Any, run: Any, action: Any, output: Any) -> tuple[Any, Any]:
        loss, given = right(run, action, output)
        return None if loss is None else loss * scale(run, action, loss), given

    return replaced(RunningStep, "_close", closed)


def mean_of_means(run: Any, action: Any, loss: torch.Tensor) -> float:
    """Each microbatch's loss as its mean over target tokens, and of these means the mean."""
    assignment, step = run.step.assignment, run.step
    num_microbatches = sum(len(replica) for replica in assignment.units[action.unit])
    atoms = assignment.units[action.unit][action.replica][action.microbatch]
    num_targets = sum(step.lengths[atom.sample_id].num_target_tokens for atom in atoms)
    return float(step.num_target_tokens / (num_targets * num_microbatches))


def mean_over_replicas(run: Any, action: Any, loss: torch.Tensor) -> float:
    return 1 / len(run.step.assignment.units[action.unit])


def over_target_tokens(run: Any, action: Any, loss: torch.Tensor) -> float:
    if action.unit == "llm":
        return 1.0
    return float(run.step.num_generated_values[action.unit]) / float(run.step.num_target_tokens)


def one_norm_not_summed(right: Any, found: UnitGradients, stage_index: int, layers: Any = None) -> Any:
    """Over tensor parallel ranks, under sequence parallelism."""
    norms = [p for n, p in found.stages[stage_index].named_parameters() if n.endswith("input_layernorm.weight")]
    for parameter in norms[:1]:
        parameter.sequence_parallel = False  # type: ignore[attr-defined]
    return right(found, stage_index)


def across_samples(right: Any, self: CoreAttention, backend: str, *given: Any) -> Any:
    """Packed samples as one."""
    *tensors, packed = given
    return right(self, backend, *tensors, PackedLengths(lengths=(sum(packed.lengths),)))


OF_TENSOR_PARALLEL_RANKS: Mapping[str, Error] = {
    "a norm is not summed under sequence parallelism": replaced(UnitGradients, "start_reduction", one_norm_not_summed),
}
IN_ANY_PLAN: Mapping[str, Error] = {
    "a sample is dropped": reassigned(without_last_sample),
    "a sample runs twice": reassigned(with_a_sample_twice),
    "an image goes to another sample": items_of_other_samples,
    "a gradient goes to another sample": replaced(RunningStep, "collect_output_gradient", gradient_of_other_samples),
    "the loss is a mean of means": scaled_loss(mean_of_means),
    "the loss is averaged over replicas": scaled_loss(mean_over_replicas),
    "gradients are not summed over replicas": replaced(gradients, "start_gradient_reduction", lambda *_: lambda: None),
    "gradients of tied embeddings are not summed": lambda: patch.object(Session, "finish_gradients"),
    "gradients stop at a stage's border": lambda: patch.object(step_messages, "_gradient_of", torch.zeros_like),
    "packed samples attend to each other": replaced(CoreAttention, "_attend", across_samples),
}


def in_other_subset(right: Any, store: ActivationStore, key: Any, value: Any, *, size_bytes: int) -> None:
    """Forwards keep another sample subset's graph than the one whose gradient comes back."""
    if key[0] == "open" and key[1] == Place("vision", 0, 0, 0):  # the one with two subsets
        key = (*key[:2], 1 - key[2])
    right(store, key, value, size_bytes=size_bytes)


IN_CUT_BACKWARDS: Mapping[str, Error] = {
    "weight gradients are forgotten": replaced(LinearWeightGradient, "compute", lambda right, pending: None),
    "weight gradients are computed twice": replaced(
        LinearWeightGradient, "compute", lambda right, pending: (right(pending), right(pending))
    ),
    "gradients of biases are forgotten": replaced(
        LinearWeightGradient, "compute", lambda right, pending: right(pending._replace(bias=None))
    ),
    "a gradient goes to another sample subset": replaced(ActivationStore, "put", in_other_subset),
}


def for_other_images(right: Any, self: GeneratorProjector, hidden: None, given: StagePass) -> Any:
    """Every image is made from what the LLM said of another one of the microbatch."""
    rows = len(given.item_embeddings) - 1 - given.batch.condition_rows
    return right(self, hidden, replace(given, batch=replace(given.batch, condition_rows=rows)))


def a_token_late(right: Any, self: LanguageHead, hidden: torch.Tensor, given: StagePass) -> Any:
    """The LLM hands on the hidden state of the token behind the right one."""
    rows = given.batch.generator_rows
    return right(self, hidden, replace(given, batch=replace(given.batch, generator_rows=None if rows is None else rows + 1)))


def not_from_generators(right: Any, run: Any, action: Any, shape: torch.Size) -> torch.Tensor:
    """The LLM's last stage gets no gradient."""
    gradient: torch.Tensor = right(run, action, shape)
    return torch.zeros_like(gradient) if action.unit == "llm" and run.stage(action.place).is_last else gradient


OF_GENERATORS: Mapping[str, Error] = {
    "an image is made for another one's words": replaced(GeneratorProjector, "forward", for_other_images),
    "an image is made from the token behind": replaced(LanguageHead, "forward", a_token_late),
    "the LLM gets no gradient from its generator": replaced(RunningStep, "collect_output_gradient", not_from_generators),
    "the images' loss is divided by target tokens": scaled_loss(over_target_tokens),
}


def items_forgotten(right: Any, stage: UnitStage, batch: PackedInput) -> Any:
    """What a stage behind the first derives its attention mask from."""
    return right(stage, replace(batch, packed=None) if stage.is_first else replace(batch, items=(), packed=None))


def items_a_token_late(right: Any, stage: UnitStage, batch: PackedInput) -> Any:
    """What every stage derives its attention mask from."""
    items = tuple(item._replace(start=item.start + 1, num_tokens=item.num_tokens - 1) for item in batch.items)
    return right(stage, replace(batch, items=items, packed=None))


OF_MASKS: Mapping[str, Error] = {
    "a later stage forgets where items are": replaced(UnitStage, "_position_inputs", items_forgotten),
    "an item's first token counts as text": replaced(UnitStage, "_position_inputs", items_a_token_late),
}
