"""Errors planted into a rank's step: each is something that a wrong runtime could do, and that the master test must see."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import torch

from megatron.runtime.communication.broker import RowShares
from megatron.runtime.execution import step_messages
from megatron.runtime.execution.activation_store import ActivationStore
from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.execution.step_inputs import StepInputs
from megatron.runtime.feed import step_inputs, step_planner
from megatron.runtime.gradients import gradients, sharded_layer, unlike_gradients
from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.gradients.sharded_layer import ShardedLayer
from megatron.runtime.gradients.unlike_gradients import PartSum, UnlikeGradients, part_sums, start_sum
from megatron.runtime.session import Session
from megatron.runtime.step.step import Step
from multimodal.attention import context_parallel
from multimodal.attention.core_attention import MaskedAttention, PackedAttention
from multimodal.attention.packed_lengths import ItemParts, PackedLengths
from multimodal.model.layers.backbone_ends import LanguageHead
from multimodal.model.layers.generator_ends import GeneratorProjector
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.model.weight_gradient_queue import LinearWeightGradient
from multimodal.values.action import Place
from multimodal.values.assignment import Assignment, Atom
from tests.distributed.gradient_case import GradientCase, RankGradients, build_session, plan_case, run_step

Error = Callable[[GradientCase], RankGradients]


def planted(name: str) -> Error:
    """What each rank runs instead of `run_on_rank`."""
    return partial(_run_with, name)


def _run_with(name: str, case: GradientCase) -> RankGradients:
    errors = {
        **PLANTED_ERRORS,
        **ERRORS_IN_CUT_BACKWARDS,
        **ERRORS_OF_GENERATORS,
        **ERRORS_OF_MASKS,
        **ERRORS_OF_CONTEXT_PARALLELISM,
        **ERRORS_OF_CUT_ITEMS,
        **ERRORS_OF_SHARDED_WEIGHTS,
        **ERRORS_OF_UNLIKE_REPLICAS,
    }
    with errors[name]():
        return run_step(build_session(case), plan_case(case))


@contextmanager
def _reassigned(change: Callable[[Assignment], Assignment]) -> Iterator[None]:
    """Run another assignment than the one that was decided, past its validation."""
    original = step_planner.plan_step

    def planned(*args: Any, assignment: Assignment, **kwargs: Any) -> Step:
        return original(*args, assignment=change(assignment), **kwargs)

    with patch.object(step_planner, "validate_assignment"), patch("tests.distributed.gradient_case.plan_step", planned):
        yield


def _without_last_sample(assignment: Assignment) -> Assignment:
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


def _with_a_sample_twice(assignment: Assignment) -> Assignment:
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
def _items_of_other_samples() -> Iterator[None]:
    """Encode the items where they were assigned, but send each to the sample of another one of its size."""
    original = Step.source_rows

    def rows(step: Step, route: Any) -> torch.Tensor:
        other = step.schedule.step.with_assignment(_with_two_items_exchanged(step.assignment))
        return original(replace(step, schedule=step.schedule.for_step(other)), route)

    with patch.object(Step, "source_rows", rows):
        yield


@contextmanager
def _gradients_of_other_samples() -> Iterator[None]:
    """Forwards are right, but a gradient comes back to another sample's item."""
    original = RunningStep.collect_output_gradient

    def of_others(inputs: StepInputs, route: Any) -> torch.Tensor:
        with _items_of_other_samples():
            placement, end = inputs._step.placement, route.source.unit
            return placement.output_rows(route, rank=inputs._step.plan.units[end].context_parallel_rank(inputs._rank))

    def collected(*args: Any) -> Any:
        with patch.object(StepInputs, "output_rows", of_others):
            return original(*args)

    with patch.object(RunningStep, "collect_output_gradient", collected):
        yield


@contextmanager
def _loss(scale: Callable[[Any, Any, Any], float]) -> Iterator[None]:
    original = RunningStep._record_loss

    def recorded(run: Any, action: Any, output: Any) -> torch.Tensor:
        loss = original(run, action, output)
        return loss * scale(run, action, loss)

    with patch.object(RunningStep, "_record_loss", recorded):
        yield


def _mean_of_means(run: Any, action: Any, loss: torch.Tensor) -> float:
    assignment, step = run.step.assignment, run.step
    num_microbatches = sum(len(replica) for replica in assignment.units[action.unit])
    atoms = assignment.units[action.unit][action.replica][action.microbatch]
    num_targets = sum(step.lengths[atom.sample_id].num_target_tokens for atom in atoms)
    return float(step.num_target_tokens / (num_targets * num_microbatches))


def _mean_over_replicas(run: Any, action: Any, loss: torch.Tensor) -> float:
    return 1 / len(run.step.assignment.units[action.unit])


@contextmanager
def _no_sum_over_replicas() -> Iterator[None]:
    with patch.object(gradients, "start_gradient_reduction", lambda wrapped: lambda: None):
        yield


@contextmanager
def _one_norm_not_summed_over_tensor_parallel_ranks() -> Iterator[None]:
    original = UnitGradients.start_reduction

    def started(gradients: UnitGradients, stage_index: int) -> Callable[[], None]:
        norms = [p for n, p in gradients.stages[stage_index].named_parameters() if n.endswith("input_layernorm.weight")]
        for parameter in norms[:1]:
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
        return original(gradients, stage_index)

    with patch.object(UnitGradients, "start_reduction", started):
        yield


@contextmanager
def _samples_attend_to_each_other() -> Iterator[None]:
    original = PackedAttention._attend

    def attended(self: PackedAttention, query: Any, key: Any, value: Any, packed: PackedLengths) -> torch.Tensor:
        return original(self, query, key, value, PackedLengths(lengths=(sum(packed.lengths),)))

    with patch.object(PackedAttention, "_attend", attended):
        yield


@contextmanager
def _weight_gradients(compute: Callable[[LinearWeightGradient], None]) -> Iterator[None]:
    with patch.object(LinearWeightGradient, "compute", compute):
        yield


def _computed_twice(pending: LinearWeightGradient) -> None:
    _compute_weight_gradient(pending)
    _compute_weight_gradient(pending)


def _without_bias(pending: LinearWeightGradient) -> None:
    _compute_weight_gradient(pending._replace(bias=None))


_compute_weight_gradient = LinearWeightGradient.compute


@contextmanager
def _subsets_exchanged() -> Iterator[None]:
    """Forwards keep another sample subset's graph than the one whose gradient comes back."""
    original = ActivationStore.put

    def put(store: ActivationStore, key: Any, value: Any, *, size_bytes: int) -> None:
        if key[0] == "open" and key[1] == Place("vision", 0, 0, 0):  # the one with two subsets
            key = (*key[:2], 1 - key[2])
        original(store, key, value, size_bytes=size_bytes)

    with patch.object(ActivationStore, "put", put):
        yield


@contextmanager
def _conditions_of_other_images() -> Iterator[None]:
    """Every image is made from what the LLM said of another one of the microbatch."""
    original = GeneratorProjector.forward

    def projected(self: GeneratorProjector, conditions: torch.Tensor, rows: torch.Tensor, *args: Any) -> torch.Tensor:
        return original(self, conditions, len(conditions) - 1 - rows, *args)

    with patch.object(GeneratorProjector, "forward", projected):
        yield


@contextmanager
def _condition_a_token_late() -> Iterator[None]:
    """The LLM hands on the hidden state of the token behind the right one."""
    original = LanguageHead.forward

    def scored(self: LanguageHead, hidden: torch.Tensor, *, generator_rows: torch.Tensor | None, **kwargs: Any) -> Any:
        late = None if generator_rows is None else generator_rows + 1
        return original(self, hidden, generator_rows=late, **kwargs)

    with patch.object(LanguageHead, "forward", scored):
        yield


@contextmanager
def _no_gradient_from_generators() -> Iterator[None]:
    original = RunningStep.collect_output_gradient

    def collected(run: Any, action: Any, shape: torch.Size) -> torch.Tensor:
        gradient = original(run, action, shape)
        return torch.zeros_like(gradient) if action.unit == "llm" and run.stage(action.place).is_last else gradient

    with patch.object(RunningStep, "collect_output_gradient", collected):
        yield


def _generator_divided_by_target_tokens(run: Any, action: Any, loss: torch.Tensor) -> float:
    if action.unit == "llm":
        return 1.0
    num_values: int = run.step.num_generated_values[action.unit]
    return num_values / float(run.step.num_target_tokens)


@contextmanager
def _inputs_changed(change: Callable[[UnitStage, PackedInput], PackedInput]) -> Iterator[None]:
    """What a stage derives its attention mask from."""
    original = UnitStage._position_inputs

    with patch.object(
        UnitStage, "_position_inputs", lambda stage, batch: original(stage, replace(change(stage, batch), packed=None))
    ):
        yield


def _items_forgotten_behind_the_first_stage(stage: UnitStage, batch: PackedInput) -> PackedInput:
    return batch if stage.is_first else replace(batch, items=())


def _items_a_token_late(stage: UnitStage, batch: PackedInput) -> PackedInput:
    return replace(
        batch, items=tuple(item._replace(start=item.start + 1, num_tokens=item.num_tokens - 1) for item in batch.items)
    )


@contextmanager
def _positions_counted_in_the_share() -> Iterator[None]:
    """Rotary angles as if a rank's tokens were a sequence of their own."""
    original = step_inputs.share_input

    def shared(batch: PackedInput, share: Any) -> PackedInput:
        found = original(batch, share)
        return replace(found, positions=batch.positions[: len(found.positions)])

    with patch.object(step_inputs, "share_input", shared):
        yield


@contextmanager
def _gradients_summed_over_replicas_alone() -> Iterator[None]:
    original = gradients.wrap_in_gradient_buffers

    def wrapped(stage: UnitStage, *, groups: Any, **options: bool) -> Any:
        groups = copy(groups)
        groups.dp_cp = groups.intra_dp_cp = groups.dp
        return original(stage, groups=groups, **options)

    with patch.object(gradients, "wrap_in_gradient_buffers", wrapped):
        yield


@contextmanager
def _key_gradients_not_sent_home() -> Iterator[None]:
    """Each rank keeps what its own queries give its keys and values, and forgets what they give to others'."""

    def kept(own: torch.Tensor, padded: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        own.copy_(padded.chunk(group.size())[group.rank()])
        return Mock()

    with patch.object(context_parallel, "reduce_scatter_single", kept):
        yield


@contextmanager
def _last_gradient_counts() -> Iterator[None]:
    """Where several ranks give gradients of one row, one of them overwrites the others."""
    with patch.object(torch.Tensor, "index_add_", torch.Tensor.index_copy_):
        yield


def _loss_of_first_context_parallel_rank(run: Any, action: Any, loss: torch.Tensor) -> float:
    return float(run.executor.context_parallel_rank(action.unit) == 0)


ERRORS_OF_CONTEXT_PARALLELISM: Mapping[str, Callable[[], Any]] = {
    "positions are counted in a rank's own share": _positions_counted_in_the_share,
    "gradients are not summed over context parallel ranks": _gradients_summed_over_replicas_alone,
    "gradients of keys and values do not come home": _key_gradients_not_sent_home,
    "a row's gradients from several ranks do not add up": _last_gradient_counts,
    "targets count on one rank alone": lambda: _loss(_loss_of_first_context_parallel_rank),
    "encoder outputs go to other tokens of the rank": lambda: patch.object(
        RowShares, "positions_given", lambda rows, *ends: _POSITIONS_GIVEN(rows, *ends).flip(0)
    ),
}
_POSITIONS_GIVEN = RowShares.positions_given


@contextmanager
def _parts_of_items_attend_alone() -> Iterator[None]:
    def alone(attention: MaskedAttention, own: tuple[torch.Tensor, ...], packed: PackedLengths) -> torch.Tensor:
        lengths = (own[0].shape[0],) if own[0].shape[0] else ()
        return attention._attend_alone(own, PackedLengths(lengths=lengths))  # type: ignore[arg-type]

    with patch.object(MaskedAttention, "_attend_across_ranks", alone):
        yield


ERRORS_OF_CUT_ITEMS: Mapping[str, Callable[[], Any]] = {
    "a part of an item attends to itself alone": _parts_of_items_attend_alone,
    "gradients of cut items' keys and values do not come home": _key_gradients_not_sent_home,
    "rows of cut and whole items are exchanged": lambda: patch.object(
        ItemParts, "on", lambda parts, device: parts._replace(places=torch.arange(len(parts.places)))
    ),
}


@contextmanager
def _shares_of_own_gradients_alone() -> Iterator[None]:
    def kept(share: torch.Tensor, whole: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        share.copy_(whole.chunk(group.size())[group.rank()])
        return Mock()

    with patch.object(sharded_layer, "reduce_scatter_single", kept):
        yield


@contextmanager
def _last_microbatch_replaces_the_others() -> Iterator[None]:
    original = ShardedLayer.start_reduction

    def started(layer: ShardedLayer, *, is_joined: bool) -> None:
        layer.finish_reduction()
        assert layer.gradient_share is not None
        layer.gradient_share.zero_()
        original(layer, is_joined=is_joined)

    with patch.object(ShardedLayer, "start_reduction", started):
        yield


@contextmanager
def _sharded_norms_not_summed_over_tensor_parallel_ranks() -> Iterator[None]:
    original = ShardedLayer._take_gradients

    def taken(layer: ShardedLayer, whole: torch.Tensor) -> None:
        with patch.object(layer, "_tensor_parallel_group", Mock(size=lambda: 1)):
            original(layer, whole)

    with patch.object(ShardedLayer, "_take_gradients", taken):
        yield


@contextmanager
def _weights_of_the_rank_before() -> Iterator[None]:
    original = ShardedLayer.finish_gathering

    def finished(layer: ShardedLayer) -> None:
        is_under_way = layer._gathering is not None
        original(layer)
        if is_under_way:
            layer._flat.copy_(layer._flat.roll(layer.share.numel()))

    with patch.object(ShardedLayer, "finish_gathering", finished):
        yield


ERRORS_OF_SHARDED_WEIGHTS: Mapping[str, Callable[[], Any]] = {
    "each rank keeps its share of its own gradients": _shares_of_own_gradients_alone,
    "only the last microbatch's gradients stay": _last_microbatch_replaces_the_others,
    "sharded norms are not summed over tensor parallel ranks": _sharded_norms_not_summed_over_tensor_parallel_ranks,
    "shares of weights come together in another order": _weights_of_the_rank_before,
    "shares of tied embeddings are not summed": lambda: patch.object(Session, "finish_gradients"),
}

ERRORS_OF_MASKS: Mapping[str, Callable[[], Any]] = {
    "a later stage forgets where items are": lambda: _inputs_changed(_items_forgotten_behind_the_first_stage),
    "an item's first token counts as text": lambda: _inputs_changed(_items_a_token_late),
}

ERRORS_OF_GENERATORS: Mapping[str, Callable[[], Any]] = {
    "an image is made for another one's words": _conditions_of_other_images,
    "an image is made from the token behind": _condition_a_token_late,
    "the LLM gets no gradient from its generator": _no_gradient_from_generators,
    "the images' loss is divided by target tokens": lambda: _loss(_generator_divided_by_target_tokens),
}

PLANTED_ERRORS: Mapping[str, Callable[[], Any]] = {
    "a sample is dropped": lambda: _reassigned(_without_last_sample),
    "a sample runs twice": lambda: _reassigned(_with_a_sample_twice),
    "an image goes to another sample": _items_of_other_samples,
    "a gradient goes to another sample": _gradients_of_other_samples,
    "the loss is a mean of means": lambda: _loss(_mean_of_means),
    "the loss is averaged over replicas": lambda: _loss(_mean_over_replicas),
    "gradients are not summed over replicas": _no_sum_over_replicas,
    "gradients of tied embeddings are not summed": lambda: patch.object(Session, "finish_gradients"),
    "a norm is not summed under sequence parallelism": _one_norm_not_summed_over_tensor_parallel_ranks,
    "gradients stop at a stage's border": lambda: patch.object(step_messages, "_gradient_of", torch.zeros_like),
    "packed samples attend to each other": _samples_attend_to_each_other,
}

ERRORS_IN_CUT_BACKWARDS: Mapping[str, Callable[[], Any]] = {
    "weight gradients are forgotten": lambda: _weight_gradients(lambda pending: None),
    "weight gradients are computed twice": lambda: _weight_gradients(_computed_twice),
    "gradients of biases are forgotten": lambda: _weight_gradients(_without_bias),
    "a gradient goes to another sample subset": _subsets_exchanged,
}
"""Those that only a schedule with split backwards and sample subsets can meet."""


@contextmanager
def _parts_not_summed() -> Iterator[None]:
    def started(part: PartSum) -> Callable[[], None]:
        is_part = part.group.size() == 2  # a rank of each replica; what is not cut is held by three
        return (lambda: None) if is_part else start_sum(part)

    with patch.object(unlike_gradients, "start_sum", started):
        yield


@contextmanager
def _other_part_of_whole_matrices() -> Iterator[None]:
    original = unlike_gradients._part_of

    def taken(shard: torch.Tensor, sharding: Any, part: Any, *, rank: int, size: int) -> torch.Tensor:
        mirrored = part._replace(first=part.num_parts - part.end, end=part.num_parts - part.first)
        return original(shard, sharding, part if size > 1 else mirrored, rank=rank, size=size)

    with patch.object(unlike_gradients, "_part_of", taken):
        yield


@contextmanager
def _norms_of_the_first_tensor_parallel_rank() -> Iterator[None]:
    def summed(stage: UnitStage, *args: Any, **options: Any) -> Iterator[PartSum]:
        for part in part_sums(stage, *args, **options):
            is_whole = part.group.size() == 3
            yield part._replace(is_counted=[stage.groups.tp.rank() == 0] * len(part.views)) if is_whole else part

    with patch.object(unlike_gradients, "part_sums", summed):
        yield


@contextmanager
def _tied_embeddings_not_summed() -> Iterator[None]:
    with patch.object(UnlikeGradients, "sum_shared_embeddings", lambda gradients: None):
        yield


@contextmanager
def _only_first_ranges_finished() -> Iterator[None]:
    original = UnlikeGradients._finish

    def finished(gradients: UnlikeGradients, stage_index: int) -> None:
        if stage_index == min(gradients.stages):
            original(gradients, stage_index)

    with patch.object(UnlikeGradients, "_finish", finished):
        yield


ERRORS_OF_UNLIKE_REPLICAS: dict[str, Callable[[], Any]] = {
    "parts are not summed over replicas": _parts_not_summed,
    "a whole matrix gives its other half": _other_part_of_whole_matrices,
    "norms of one tensor parallel rank's tokens alone": _norms_of_the_first_tensor_parallel_rank,
    "tied embeddings of every replica and stage apart": _tied_embeddings_not_summed,
    "sums of a stage's second layer range do not arrive": _only_first_ranges_finished,
}
"""In a case of replicas that differ in TP, PP and virtual stages."""
