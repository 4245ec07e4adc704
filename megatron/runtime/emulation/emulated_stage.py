"""A stage whose computations are timed waits, and its microbatches with the right sizes; all else is the real runtime."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, ParameterDict

from megatron.runtime.step.step import Step
from megatron.runtime.step.token_placement import WHOLE
from multimodal.attention.packed_lengths import PackedLengths
from multimodal.cost.layers.registry import LAYER_KINDS, count_segments
from multimodal.cost.step_costs import ComputeCost
from multimodal.model.layers.layer_kind import HeadOutput, LayerPart, StagePass, State
from multimodal.model.parameter_sharding import WHOLE as WHOLE_PARAMETER
from multimodal.model.parameter_sharding import ParameterSharding
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import StageSegments, UnitStage
from multimodal.model.weight_gradient_queue import active_queue
from multimodal.schedule.align_replicas import EXCHANGES
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.model_graph import Role
from multimodal.values.parts.cuts import SegmentCut

Cost = Callable[[Action], ComputeCost]
Spend = Callable[[ActionKind], None]
"""Takes as long as the computation of this kind on one piece of work."""


@dataclass(frozen=True)
class EmulatedInput(PackedInput):
    """A microbatch without data."""

    place: MicrobatchPlace | None = None
    num_output_rows: int = 0
    """Rows that leave the unit's last stage on this rank."""
    hands_on: bool = False
    """True if rows leave it; else it only gives a loss."""
    fraction: float = 1.0
    """Its part of the microbatch's tokens, if the microbatch runs in sample subsets."""
    cuts: Mapping[int, SegmentCut] = field(default_factory=dict)
    """Virtual stage -> the microbatch's cut into ranges of segments there."""


class EmulatedStage(UnitStage):
    """Takes and returns tensors of the right shapes, waits as long as the real stage would, and trains one number a layer.

    A computation inside which others run waits in equal intervals, between which they run. cost: of an action.
    """

    def __init__(self, *, cost: Cost, stage_index: int, **stage: Any) -> None:
        super().__init__(**stage)
        self._cost, self._stage_index = cost, stage_index
        kinds = self.unit.layers[self.layer_range.start : self.layer_range.stop]
        self._meets_replicas = self.groups.ep.size() > 1 and any(LAYER_KINDS[kind].exchanges_tokens for kind in kinds)

    @property
    def shared_embedding_weight(self) -> Tensor | None:
        """None: no embeddings are tied here."""
        return None

    def sharding(self, name: str) -> ParameterSharding:
        """Return the sharding of numbers that every rank has for itself."""
        return WHOLE_PARAMETER

    def forward(self, hidden: Tensor | None, batch: PackedInput, item_embeddings: Tensor | None = None) -> Tensor | HeadOutput:
        """Wait; inputs and outputs have the shapes of a real stage."""
        place = self._place(batch)

        def spend(kind: ActionKind) -> None:
            self._spend(Action(kind, *place), fraction=batch.fraction)  # type: ignore[attr-defined]

        return self._finish(_TimedWait.apply(self._weight, hidden, item_embeddings, spend, self._output_shape(batch)), batch)  # type: ignore[no-untyped-call]

    def prepare(self, batch: PackedInput, item_embeddings: Tensor | None) -> StagePass:
        """Return the inputs that segments read: only sizes."""
        return StagePass(batch, item_embeddings, torch.zeros(0), PackedLengths(lengths=batch.lengths), None)

    def segments(self) -> StageSegments:
        """Return as many segments as the real stage has, without collectives."""
        count = count_segments(self.unit, self.layer_range)
        parts = tuple(LayerPart(partial(self._run_segment, number, is_last=number == count - 1)) for number in range(count))
        return StageSegments(parts, (self.layer_range.start,) * count, tuple(range(count + 1)))

    def _run_segment(self, number: int, state: State, given: StagePass, *, is_last: bool) -> State:
        """Wait for a whole range: in the forward in its last segment, in the backward in its first."""
        place = self._place(given.batch)
        cut = given.batch.cuts[self._stage_index]  # type: ignore[attr-defined]
        ends = {covers.end - 1 if covers else -1: covers for covers in cut.forwards}
        begins = {covers.first if covers else 0: covers for covers in cut.backwards}
        ending = number in ends or (is_last and not cut.forward)
        if not (number == 0 or is_last or ending or number in begins):
            return state

        def spend(kind: ActionKind) -> None:
            covered = ends.get(number) if kind is ActionKind.FORWARD else begins.get(number)
            if ending if kind is ActionKind.FORWARD else number in begins:
                self._spend(Action(kind, *place, covers=covered))

        hidden, embeddings = (state[0] if state else None), (given.item_embeddings if number == 0 else None)
        shape = self._output_shape(given.batch) if is_last else (self.num_rows(given.batch.num_tokens), 1, 1)
        weight = self._weight if number == 0 else None
        output: Tensor = _TimedWait.apply(weight, hidden, embeddings, spend, shape)  # type: ignore[no-untyped-call]
        finished = self._finish(output, given.batch) if is_last else output
        return (finished,) if isinstance(finished, Tensor) else finished  # type: ignore[return-value]

    @property
    def _weight(self) -> Tensor:
        return next(iter(self.parameters()))

    def _place(self, batch: PackedInput) -> Place:
        assert isinstance(batch, EmulatedInput) and batch.place is not None
        return Place(batch.place.unit, batch.place.replica, self._stage_index, batch.place.microbatch)

    def _output_shape(self, batch: PackedInput) -> tuple[int, ...]:
        assert isinstance(batch, EmulatedInput)
        width = self.context.graph.width_behind(self.unit.name, self.layer_range.stop - 1)
        if not self.is_last:
            return self.num_rows(batch.num_tokens), 1, width
        return (batch.num_output_rows if batch.hands_on else 1), width

    def _finish(self, output: Tensor, batch: PackedInput) -> Tensor | HeadOutput:
        assert isinstance(batch, EmulatedInput)
        if self.unit.role is Role.ENCODER or not self.is_last:
            return output
        is_correct = None if self.training or not self.unit.is_causal else torch.zeros(0, dtype=torch.bool)
        return HeadOutput(output.sum(), is_correct, conditions=output if batch.hands_on else None)

    def _spend(self, action: Action, *, fraction: float = 1.0) -> None:
        """Take as long as a computation, with other work in its waits; replicas that share experts begin together."""
        cost = self._cost(action)
        if self._meets_replicas and action.kind in EXCHANGES:
            dist.barrier(group=self.groups.ep)
        if not self.waits.are_filled:
            wait(fraction * cost.seconds)
            return
        interval = (cost.seconds - sum(cost.waits)) / (len(cost.waits) + 1)
        now = time.perf_counter()
        for seconds in cost.waits:
            now = _wait_until(now + fraction * interval)
            with self.waits.filled():
                now = max(now + fraction * seconds, time.perf_counter())
                _wait_until(now)
        _wait_until(now + fraction * interval)

    def _build_layer(self, index: int) -> Module:
        return ParameterDict({"weight": torch.zeros(1, dtype=self.options.params_dtype)})


class _TimedWait(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, weight: Tensor | None, hidden: Tensor | None, embeddings: Tensor | None, spend: Spend, shape: tuple[int, ...]
    ) -> Tensor:
        spend(ActionKind.FORWARD)
        ctx.inputs, ctx.spend, ctx.weight, ctx.queue = (hidden, embeddings), spend, weight, active_queue()
        like = weight if weight is not None else hidden
        assert like is not None
        return like.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        inputs = (None if tensor is None else torch.zeros_like(tensor) for tensor in ctx.inputs)
        if ctx.queue is not None:
            ctx.spend(ActionKind.INPUT_GRADIENT)
            ctx.queue.put(_PendingWait(ctx.weight, ctx.spend))
            return (None, *inputs, None, None)
        ctx.spend(ActionKind.BACKWARD)
        return (None if ctx.weight is None else torch.zeros_like(ctx.weight), *inputs, None, None)


class _PendingWait(NamedTuple):
    """A weight gradient that only takes time."""

    weight: Tensor
    spend: Spend

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """None: no tensors are kept."""
        return ()

    def compute(self) -> None:
        """Wait, and give the weight a gradient."""
        self.spend(ActionKind.WEIGHT_GRADIENT)
        torch.autograd.backward((self.weight,), (torch.zeros_like(self.weight),))


def wait(seconds: float) -> None:
    """Sleep: a waiting rank needs no core, so many of them share a few."""
    if seconds > 0:
        time.sleep(seconds)


def _wait_until(moment: float) -> float:
    """Sleep until a moment of the clock, so that delays of sleeping do not add up; returns the moment."""
    wait(moment - time.perf_counter())
    return moment


def with_emulated_inputs(step: Step, *, rank: int) -> Step:
    """Return the same step with inputs that only hold sizes, for the microbatches that pass through this rank."""
    cuts: dict[MicrobatchPlace, dict[int, SegmentCut]] = defaultdict(dict)
    for where, cut in step.cuts.segments.items():
        cuts[where.microbatch_place][where.stage] = cut
    inputs: dict[MicrobatchPlace, tuple[PackedInput, ...]] = {}
    for place in step.places_of(rank):
        context_rank = step.plan.units[place.unit].context_parallel_rank(rank)
        if place in step.cuts.num_subsets:
            parts = range(len(step.subsets(place)))
            inputs[place] = tuple(_input(step, place, part, rank=context_rank) for part in parts)
        else:
            inputs[place] = (replace(_input(step, place, WHOLE, rank=context_rank), cuts=cuts.get(place, {})),)
    return step.changed(inputs=inputs, target_samples=dict.fromkeys(inputs, ()))


def _input(step: Step, place: MicrobatchPlace, part: int, *, rank: int) -> EmulatedInput:
    """Return one context parallel rank's tokens and rows of a sample subset, or of the whole microbatch."""
    num_tokens, routes = step.num_tokens_of(place), step.routes.from_source.get(place, ())
    if part != WHOLE:
        num_tokens = step.num_tokens_of_subsets(place)[part]
        routes = tuple(route for route in routes if step.part_of(route) == part)
    num_rows = sum(len(step.placement.output_rows(route, rank=rank)) for route in routes)
    share, fraction = step.placement.own_share(place, part=part, rank=rank), num_tokens / step.num_tokens_of(place)
    return EmulatedInput(
        (num_tokens,),
        torch.zeros(0),
        share=share,
        place=place,
        num_output_rows=num_rows,
        hands_on=bool(routes),
        fraction=fraction,
    )
