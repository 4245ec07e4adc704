"""A stage whose computations are timed waits, and its microbatches of the right sizes: all around it is the real runtime."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron.runtime.step.step import Step
from megatron.runtime.step.token_placement import WHOLE
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.layers.registry import kind_of
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.model.weight_gradient_queue import active_queue
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.assignment import MicrobatchPlace

Seconds = Callable[[Action], float]
"""Returns the seconds that a computation takes."""


@dataclass(frozen=True)
class EmulatedInput(PackedInput):
    """A microbatch without data."""

    place: MicrobatchPlace | None = None
    num_output_rows: int = 0
    """Rows that leave the unit's last stage on this rank."""
    hands_on: bool = False
    """True if anything leaves it; else it gives only a loss."""
    fraction: float = 1.0
    """Its part of the microbatch's tokens, where that runs in sample subsets."""


class EmulatedStage(UnitStage):
    """Takes and gives tensors of the right shapes, waits as long as the real stage would compute, and trains one number a layer.

    seconds: duration of an action; stage_index: which virtual stage this is; stage: what UnitStage takes.
    """

    def __init__(
        self,
        *,
        seconds: Seconds,
        stage_index: int,
        **stage: Any,
    ) -> None:
        super().__init__(**stage)
        self._seconds, self._stage_index = seconds, stage_index

    @property
    def shared_embedding_weight(self) -> Tensor | None:
        """None: nothing is tied here."""
        return None

    def forward(self, hidden: Tensor | None, batch: PackedInput, item_embeddings: Tensor | None = None) -> Tensor | HeadOutput:
        """Wait; the same shapes in and out as a real stage."""
        assert isinstance(batch, EmulatedInput) and batch.place is not None
        weight = next(iter(self.parameters()))
        rows = self.num_rows(batch.num_tokens)
        if self.is_last:
            rows = batch.num_output_rows if batch.hands_on else 1
        last = kind_of(self.unit, self.layer_range.stop - 1)
        width = last.output_size(self.context)
        shape = (rows, width) if self.is_last else (rows, 1, width)
        place = Place(batch.place.unit, batch.place.replica, self._stage_index, batch.place.microbatch)

        def seconds(kind: ActionKind) -> float:
            return batch.fraction * self._seconds(Action(kind, *place))

        output: Tensor = _TimedWait.apply(weight, hidden, item_embeddings, seconds, shape)  # type: ignore[no-untyped-call]
        if last.gives_loss:
            is_correct = None if self.training or not last.picks_tokens else torch.zeros(0, dtype=torch.bool)
            return HeadOutput(output.sum(), is_correct, conditions=output if batch.hands_on else None)
        return output

    def _build_layer(self, index: int) -> Module:
        return _Number(self.options.precision.params_dtype)


class _Number(Module):
    """The weight of an emulated layer, so that there is a gradient to reduce."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(1, dtype=dtype))


class _TimedWait(torch.autograd.Function):
    """A computation that is only as long as one."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        weight: Tensor,
        hidden: Tensor | None,
        embeddings: Tensor | None,
        seconds: Callable[[ActionKind], float],
        shape: tuple[int, ...],
    ) -> Tensor:
        wait(seconds(ActionKind.FORWARD))
        ctx.inputs, ctx.seconds, ctx.weight, ctx.queue = (hidden, embeddings), seconds, weight, active_queue()
        return weight.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        inputs = (None if tensor is None else torch.zeros_like(tensor) for tensor in ctx.inputs)
        if ctx.queue is not None:
            wait(ctx.seconds(ActionKind.INPUT_GRADIENT))
            ctx.queue.put(_PendingWait(ctx.weight, ctx.seconds(ActionKind.WEIGHT_GRADIENT)))
            return (None, *inputs, None, None)
        wait(ctx.seconds(ActionKind.BACKWARD))
        return (torch.zeros_like(ctx.weight), *inputs, None, None)


class _PendingWait(NamedTuple):
    """A weight gradient that is only as long as one."""

    weight: Tensor
    seconds: float

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """None are kept."""
        return ()

    def compute(self) -> None:
        """Wait, and give the weight a gradient."""
        wait(self.seconds)
        torch.autograd.backward((self.weight,), (torch.zeros_like(self.weight),))


def wait(seconds: float) -> None:
    """Sleep: a waiting rank costs no core, so many of them fit on few."""
    if seconds > 0:
        time.sleep(seconds)


def with_emulated_inputs(step: Step, *, rank: int) -> Step:
    """The same step with inputs that hold sizes alone, for the microbatches that pass through this rank."""
    inputs: dict[MicrobatchPlace, PackedInput] = {}
    subset_inputs: dict[MicrobatchPlace, tuple[PackedInput, ...]] = {}
    for unit, unit_plan in step.plan.units.items():
        context_rank = unit_plan.context_parallel_rank(rank) if rank in unit_plan.ranks else 0
        for replica_index, replica in enumerate(unit_plan.replicas):
            if rank not in replica.ranks:
                continue
            for microbatch in range(step.assignment.num_microbatches(unit, replica_index)):
                place = MicrobatchPlace(unit, replica_index, microbatch)
                if place in step.cuts.num_subsets:
                    parts = range(len(step.subsets(place)))
                    subset_inputs[place] = tuple(_input(step, place, part, rank=context_rank) for part in parts)
                else:
                    inputs[place] = _input(step, place, WHOLE, rank=context_rank)
    return step.changed(inputs=inputs, target_samples=dict.fromkeys(inputs, ()), subset_inputs=subset_inputs)


def _input(step: Step, place: MicrobatchPlace, part: int, *, rank: int) -> EmulatedInput:
    """Returns one context parallel rank's tokens and rows of a sample subset, or of the whole microbatch."""
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
