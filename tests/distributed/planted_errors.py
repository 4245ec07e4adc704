"""Errors that runs can meet: samples and where they go, losses, masks, sums of gradients, generators; and those of some plans."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist

from megatron.runtime.communication import units
from megatron.runtime.communication.broker import RowShares
from megatron.runtime.execution import step_messages
from megatron.runtime.execution.activation_store import ActivationStore
from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.execution.segment_pass import SegmentPass
from megatron.runtime.feed import step_inputs, step_planner
from megatron.runtime.gradients import gradients, sharded_layer, unlike_gradients
from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.gradients.sharded_layer import ShardedLayer
from megatron.runtime.gradients.sharded_unit import ShardedUnit
from megatron.runtime.gradients.unlike_gradients import UnlikeGradients
from megatron.runtime.session import Session
from megatron.runtime.step.step import Step
from multimodal.attention import context_parallel
from multimodal.attention.core_attention import CoreAttention
from multimodal.attention.packed_lengths import ItemParts, PackedLengths
from multimodal.cost.layers.layer import Exchange
from multimodal.model import deferrable_linear, expert_mlp
from multimodal.model.collectives import Arriving
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear
from multimodal.model.layers import transformer_segments
from multimodal.model.layers.backbone_ends import LanguageHead
from multimodal.model.layers.generator_ends import GeneratorProjector
from multimodal.model.layers.layer_kind import LayerPart, StagePass
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.model.weight_gradient_queue import LinearWeightGradient
from multimodal.values.action import Place
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.schedule import Entry
from multimodal.values.work.step_work import StepWork

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

    def of_others(run: RunningStep, source: Place, target: Place) -> torch.Tensor:
        from_source = run.step.routes.from_source[source.microbatch_place]
        (route,) = (route for route in from_source if route.target == target.microbatch_place)
        with items_of_other_samples():
            rank = run.step.plan.units[source.unit].context_parallel_rank(run.executor.rank)
            return run.step.placement.output_rows(route, rank=rank)

    with patch.object(RunningStep, "output_rows", of_others):
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


def in_other_subset(right: Any, store: ActivationStore, key: Any, value: Any, *, size_bytes: int) -> None:
    """Forwards keep another sample subset's graph than the one whose gradient comes back."""
    if key[0] == "open" and key[1] == Place("vision", 0, 0, 0):  # the one with two subsets
        key = (*key[:2], 1 - key[2])
    right(store, key, value, size_bytes=size_bytes)


def for_other_images(right: Any, self: GeneratorProjector, hidden: None, given: StagePass) -> Any:
    """Every image is made from what the LLM said of another one of the microbatch."""
    rows = len(given.item_embeddings) - 1 - given.batch.condition_rows
    return right(self, hidden, replace(given, batch=replace(given.batch, condition_rows=rows)))


def a_token_late(right: Any, self: LanguageHead, hidden: torch.Tensor, given: StagePass) -> Any:
    """The LLM hands on the hidden state of the token behind the right one."""
    rows = given.batch.generator_rows
    return right(self, hidden, replace(given, batch=replace(given.batch, generator_rows=None if rows is None else rows + 1)))


def not_from_generators(right: Any, run: Any, entry: Entry, shape: torch.Size) -> torch.Tensor:
    """The LLM's last stage gets no gradient."""
    gradient: torch.Tensor = right(run, entry, shape)
    return torch.zeros_like(gradient) if entry.action.unit == "llm" and run.stage(entry.action.place).is_last else gradient


def items_forgotten(right: Any, stage: UnitStage, batch: PackedInput, embeddings: Any) -> StagePass:
    """What a stage behind the first derives its attention mask from."""
    kept = batch.items if stage.is_first else ()
    return replace(right(stage, replace(batch, items=kept, packed=None), embeddings), batch=batch)


def items_a_token_late(right: Any, stage: UnitStage, batch: PackedInput, embeddings: Any) -> StagePass:
    """What every stage derives its attention mask from."""
    items = tuple(item._replace(start=item.start + 1, num_tokens=item.num_tokens - 1) for item in batch.items)
    return replace(right(stage, replace(batch, items=items, packed=None), embeddings), batch=batch)


def counted_in_the_share(right: Any, batch: PackedInput, share: Any) -> PackedInput:
    """Rotary angles as if a rank's tokens were a sequence of their own."""
    found: PackedInput = right(batch, share)
    return replace(found, positions=batch.positions[: len(found.positions)])


def summed_over_replicas_alone(right: Any, stage: UnitStage, *, groups: Any, **options: bool) -> Any:
    groups = copy(groups)
    groups.dp_cp = groups.intra_dp_cp = groups.dp
    return right(stage, groups=groups, **options)


def only_own(right: Any, share: torch.Tensor, whole: torch.Tensor, *, group: Any, async_op: bool) -> Any:
    """Each rank keeps what it has itself for its share, and forgets what it has for others'."""
    share.copy_(whole.chunk(group.size())[group.rank()])
    return Mock()


def parts_alone(right: Any, attention: CoreAttention, own: tuple[torch.Tensor, ...], packed: PackedLengths) -> Any:
    lengths = (own[0].shape[0],) if own[0].shape[0] else ()
    return attention._attend_alone(own, PackedLengths(lengths=lengths), attention.choice.alone)  # type: ignore[arg-type]


def last_microbatch_alone(right: Any, layer: ShardedLayer) -> None:
    """The last one's gradients replace the others'."""
    layer.finish_reduction()
    assert layer.gradient_share is not None
    layer.gradient_share.zero_()
    right(layer)


def earlier_gradients_forgotten(right: Any, layer: ShardedLayer) -> None:
    layer._unreduced = None
    right(layer)


def norms_not_summed(right: Any, layer: ShardedLayer) -> None:
    with patch.object(layer, "_tensor_parallel_group", Mock(size=lambda: 1)):
        right(layer)


def weights_of_the_rank_before(right: Any, layer: ShardedLayer) -> None:
    """Shares come together in another order."""
    is_under_way = layer._gathering is not None
    right(layer)
    if is_under_way:
        layer._flat.copy_(layer._flat.roll(layer.share.numel()))


def parts_not_summed(right: Any, views: Any, group: dist.ProcessGroup, **options: Any) -> Any:
    """What a rank of each replica has; what is not cut is held by three."""
    return (lambda: None) if group.size() == 2 else right(views, group, **options)


def other_half(right: Any, shard: torch.Tensor, sharding: Any, part: Any, *, rank: int, size: int) -> torch.Tensor:
    mirrored = part._replace(first=part.num_parts - part.end, end=part.num_parts - part.first)
    given: torch.Tensor = right(shard, sharding, part if size > 1 else mirrored, rank=rank, size=size)
    return given


def norms_of_the_first_rank(right: Any, stage: UnitStage, *args: Any, **options: Any) -> Iterator[Callable[[], None]]:
    def started(start: Any, views: Any, group: dist.ProcessGroup, **_: Any) -> Any:
        return start(views, group, is_counted=[stage.groups.tp.rank() == 0] * len(views) if group.size() == 3 else None)

    with replaced(unlike_gradients, "start_sum", started)():
        yield from right(stage, *args, **options)


def first_range_finished(right: Any, found: UnlikeGradients, stage_index: int) -> None:
    if stage_index == min(found.stages):
        right(found, stage_index)


def expert_gradients_alone(right: Any, *args: Any, **options: Any) -> Any:
    """Experts' gradients as a rank's group alone has them."""
    member = right(*args, **options)
    member.groups.expt_dp = member.groups.intra_expt_dp = member.groups.pp
    return member


def rows_of_other_ranks(right: Any, share: torch.Tensor, product: torch.Tensor, **options: Any) -> Any:
    """Every rank is sent the sums of its neighbour's rows."""
    return right(share, product.roll(len(share), 0), **options)


def without(exchange: Exchange, *, is_backward: bool) -> Error:
    def started(right: Any, self: LayerPart, tensor: torch.Tensor, link: Any, **options: Any) -> Any:
        skips = self.behind is exchange and options.get("is_backward", False) is is_backward
        return Arriving(tensor) if skips else right(self, tensor, link, **options)

    return replaced(LayerPart, "start", started)


def swapped_on_one_rank(right: Any, self: LayerPart, tensor: torch.Tensor, link: Any, **options: Any) -> Any:
    """One rank gives the rows of its sums in another order than the others."""
    swaps = self.behind is Exchange.SUM and dist.get_rank() == 1 and not options.get("is_backward", False)
    return right(self, tensor.flip(0) if swaps else tensor, link, **options)


def without_residual_gradients(right: Any, self: SegmentPass, graph: Any) -> None:
    """Where a graph ends between two parts, only the branch gets its gradient."""
    right(self, graph)
    found = self._point.tensors
    if len(found) > 1 and found[0] is not None:
        self._point = self._point._replace(tensors=(torch.zeros_like(found[0]), *found[1:]))


def gradients_twice(right: Any, self: SegmentPass, first: int) -> None:
    right(self, first)
    if first == 0:
        for parameter in self._stage.parameters():
            parameter.main_grad.add_(parameter.main_grad)


ERRORS: Mapping[str, Mapping[str, Error]] = {
    "any plan": {
        "a sample is dropped": reassigned(without_last_sample),
        "a sample runs twice": reassigned(with_a_sample_twice),
        "an image goes to another sample": items_of_other_samples,
        "a gradient goes to another sample": replaced(RunningStep, "collect_output_gradient", gradient_of_other_samples),
        "the loss is a mean of means": scaled_loss(mean_of_means),
        "the loss is averaged over replicas": scaled_loss(
            lambda run, action, loss: 1 / len(run.step.assignment.units[action.unit])
        ),
        "gradients are not summed over replicas": replaced(UnitGradients, "_start_at_once", lambda *_: lambda: None),
        "gradients of tied embeddings are not summed": lambda: patch.object(Session, "finish_gradients"),
        "gradients stop at a stage's border": lambda: patch.object(step_messages, "_gradient_of", torch.zeros_like),
        "packed samples attend to each other": replaced(CoreAttention, "_attend", across_samples),
        "inputs are taken in another order than they are packed for": replaced(
            StepWork, "messages_of", lambda right, *given: [(taken[::-1], gives) for taken, gives in right(*given)]
        ),
    },
    "tensor parallel ranks": {
        "a norm is not summed under sequence parallelism": replaced(UnitGradients, "start_reduction", one_norm_not_summed),
    },
    "cut backwards": {
        "weight gradients are forgotten": replaced(LinearWeightGradient, "compute", lambda right, pending: None),
        "weight gradients are computed twice": replaced(
            LinearWeightGradient, "compute", lambda right, pending: (right(pending), right(pending))
        ),
        "gradients of biases are forgotten": replaced(
            LinearWeightGradient, "compute", lambda right, pending: right(pending._replace(bias=None))
        ),
        "a gradient goes to another sample subset": replaced(ActivationStore, "put", in_other_subset),
    },
    "sharded weights": {
        "each rank keeps its share of its own gradients": replaced(sharded_layer, "reduce_scatter_single", only_own),
        "only the last microbatch's gradients stay": replaced(ShardedLayer, "start_reduction", last_microbatch_alone),
        "sharded norms are not summed over tensor parallel ranks": replaced(ShardedLayer, "start_reduction", norms_not_summed),
        "shares of weights come together in another order": replaced(
            ShardedLayer, "finish_gathering", weights_of_the_rank_before
        ),
    },
    "copies of sharded weights": {
        "each copy keeps its own gradients": replaced(ShardedUnit, "sum_shared_embeddings", lambda *_: None),
    },
    "gradients reduced once": {
        "gradients are not added up until they are reduced": replaced(
            ShardedLayer, "take_gradients", earlier_gradients_forgotten
        ),
        "shares of tied embeddings are not summed": lambda: patch.object(Session, "finish_gradients"),
    },
    "unlike replicas": {
        "parts are not summed over replicas": replaced(unlike_gradients, "start_sum", parts_not_summed),
        "a whole matrix gives its other half": replaced(unlike_gradients, "_part_of", other_half),
        "norms of one tensor parallel rank's tokens alone": replaced(unlike_gradients, "start_sums", norms_of_the_first_rank),
        "tied embeddings of every replica and stage apart": replaced(UnlikeGradients, "sum_shared_embeddings", lambda *_: None),
        "sums of a stage's second layer range do not arrive": replaced(UnlikeGradients, "_finish", first_range_finished),
    },
    "a generator": {
        "an image is made for another one's words": replaced(GeneratorProjector, "forward", for_other_images),
        "an image is made from the token behind": replaced(LanguageHead, "forward", a_token_late),
        "the LLM gets no gradient from its generator": replaced(RunningStep, "collect_output_gradient", not_from_generators),
        "the images' loss is divided by target tokens": scaled_loss(over_target_tokens),
    },
    "context parallelism": {
        "positions are counted in a rank's own share": replaced(step_inputs, "share_input", counted_in_the_share),
        "gradients are not summed over context parallel ranks": replaced(
            gradients, "wrap_in_gradient_buffers", summed_over_replicas_alone
        ),
        "gradients of keys and values do not come home": replaced(context_parallel, "reduce_scatter_single", only_own),
        "a row's gradients from several ranks do not add up": lambda: patch.object(
            torch.Tensor, "index_add_", torch.Tensor.index_copy_
        ),
        "targets count on one rank alone": scaled_loss(
            lambda run, action, loss: float(run.executor.groups[action.unit].cp.rank() == 0)
        ),
        "encoder outputs go to other tokens of the rank": replaced(
            RowShares, "positions_given", lambda right, rows, *ends: right(rows, *ends).flip(0)
        ),
    },
    "cut items": {
        "a part of an item attends to itself alone": replaced(CoreAttention, "_attend_across_ranks", parts_alone),
        "gradients of cut items' keys and values do not come home": replaced(context_parallel, "reduce_scatter_single", only_own),
        "rows of cut and whole items are exchanged": replaced(
            ItemParts, "on", lambda right, parts, device: parts._replace(places=torch.arange(len(parts.places)))
        ),
    },
    "masks": {
        "a later stage forgets where items are": replaced(UnitStage, "prepare", items_forgotten),
        "an item's first token counts as text": replaced(UnitStage, "prepare", items_a_token_late),
    },
    "experts": {
        "gradients of experts are not summed over their copies": replaced(units, "_membership", expert_gradients_alone),
        "rows of experts go back in the order in which they came": lambda: patch.object(
            expert_mlp._Order, "mirrored", property(lambda order: order)
        ),
    },
    "experts of slices": {
        "experts are balanced by a rank's part of a sequence": replaced(
            expert_mlp,
            "sequence_balance_loss",
            lambda right, routing, sequences, **given: right(routing, sequences._replace(groups=()), **given),
        )
    },
    "adapters": {
        "the half that all ranks have is taken for the other": lambda: patch.object(
            DeferrableColumnParallelLinear, "splits_inputs", not DeferrableColumnParallelLinear.splits_inputs
        )
    },
    "overlapped products": {
        "rows are taken for another rank's": replaced(deferrable_linear, "reduce_scatter_single", rows_of_other_ranks)
    },
    "inside waits": {
        "a collective at the end of a forward piece is left out": without(Exchange.SUM, is_backward=False),
        "a collective at the end of a backward piece is left out": without(Exchange.GATHER, is_backward=True),
        "a collective at the end of a forward piece is swapped on one rank": replaced(LayerPart, "start", swapped_on_one_rank),
        "gradients of the residual stream stop between pieces": replaced(SegmentPass, "_retreat", without_residual_gradients),
        "biases are left out at a cut": replaced(
            transformer_segments, "_residual_sum", lambda right, layer, add, branch, bias, residual: residual + branch
        ),
        "gradients of pieces are added twice": replaced(SegmentPass, "backward", gradients_twice),
    },
}
"""Kind of case -> name of an error -> the error. Each error must make the case of its kind (test_planted_errors.py) fail."""
