"""One step as a rank's stages compute it; cut microbatches run by sample subset or by range of segments."""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.runtime.execution.activation_store import SavedTensors, size_of
from megatron.runtime.execution.segment_pass import SegmentPass
from megatron.runtime.execution.step_messages import Inputs, RankResources, StepMessages
from megatron.runtime.step.step import Step
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.stage_input import PackedInput, stack_items
from multimodal.model.weight_gradient_queue import WeightGradientQueue, defer_weight_gradients
from multimodal.schedule.align_replicas import Join
from multimodal.values.action import BACKWARDS, Action, ActionKind, LayerRange, SegmentRange
from multimodal.values.assignment import MicrobatchPlace
from multimodal.values.backward_need import BackwardNeed, has_trainable_output
from multimodal.values.schedule import Entry


@dataclass(frozen=True)
class OpenSubset:
    """A forward's tensors that its backward needs."""

    loss: Tensor | None
    """None if the stage has no loss, or the loss depends on nothing trained: text without items in a frozen LLM."""
    output: GradientEdge | None
    """The edge of the output into the graph, without the tensor, so that it can be freed; None as above."""
    output_shape: torch.Size | None
    """None if the stage hands nothing on."""
    inputs: Inputs
    queue: WeightGradientQueue | None
    """The queue to which the backward defers weight gradients; None if it is not split."""


class RunningStep(StepMessages):
    """One step as a rank's stages compute it, with its results."""

    def __init__(self, executor: RankResources, step: Step) -> None:
        super().__init__(executor, step)
        self._joins: Mapping[int, tuple[Join, ...]] = step.joins[executor.lane] if step.joins else {}
        if executor.sharded:  # alike on all replicas
            actions = (entry.action for entry in step.schedule.entries(executor.lane))
            passes: list[Action | Join] = [*actions, *chain(*self._joins.values())]
            counts = Counter((each.unit, each.stage) for each in passes if each.kind in BACKWARDS)
            for key, stage in executor.sharded.items():
                stage.num_backwards = counts[key]
        self.loss_sums: dict[str, list[Tensor]] = {}
        """The losses of every unit with a loss, microbatch by microbatch."""
        self.correct: list[tuple[MicrobatchPlace, Tensor]] = []
        self.token_losses: list[tuple[MicrobatchPlace, Tensor]] = []
        """The losses of target tokens, of steps with several data sets only."""

    def before_action(self, position: int) -> None:
        """Join computations of replicas that share weights with this rank."""
        for join in self._joins.get(position, ()):
            for _ in range(join.num_passes):
                with self.executor.sharded[join.unit, join.stage].collectives(join.kind):
                    pass

    def forward(self, entry: Entry) -> None:
        """Collect the stage's inputs, run it, hand on its outputs, and keep what the backwards need."""
        action = entry.action
        if action.place in self.step.cuts.segments:
            self._forward_segments(entry)
            return
        need = self._need(action)
        inputs, batches = self._collect(entry)
        of_subsets = [inputs] * len(batches)
        if action.stage > 0 and len(batches) > 1:  # sample subsets have separate graphs, and so leaves of their own
            sizes = [self.stage(action.place).num_rows(batch.num_tokens) for batch in batches]
            ((before, hidden),) = inputs.items()
            of_subsets = [{before: rows.detach()} for rows in hidden.split(sizes)]
        with self.clock.span(action), self._filling_waits(action), torch.set_grad_enabled(need.has_backward):
            outputs = []
            for subset, batch, own in zip(self.step.cuts.subsets(action.microbatch_place), batches, of_subsets, strict=True):
                for hidden in own.values() if action.stage > 0 else ():
                    hidden.requires_grad_(need.has_backward and need.sends_gradient)
                outputs.append(self._run_subset(action._replace(covers=subset), batch, own))
            if all(output is not None for output in outputs):
                self.publish_outputs(entry, [output for output in outputs if output is not None])

    def backward(self, entry: Entry) -> None:
        """Compute gradients from a stage's loss and output gradient to its input, including weight gradients."""
        if entry.action.place in self.step.cuts.segments:
            self._backward_segments(entry)
        else:
            self._propagate(entry)

    def input_gradient(self, entry: Entry) -> None:
        """Run the same backward; linear layers defer weight gradients to the queue that was active in the forward."""
        action, queue = entry.action, self._propagate(entry)
        assert queue is not None, f"the forward of {action} did not know that its backward is split"
        if self._need(action).trains_weights:
            self.store.put(("weight gradients", action.place, action.subset), queue, size_bytes=queue.size_bytes)

    def weight_gradient(self, entry: Entry) -> None:
        """Compute the weight gradients that an input gradient deferred."""
        action = entry.action
        queue: WeightGradientQueue = self.store.take(("weight gradients", action.place, action.subset))
        with self.clock.span(action), self._gathering_weights(action):
            queue.compute()

    def gather_parameters(self, entry: Entry) -> None:
        """Start gathering a stage's parameters."""
        action, unit = entry.action, self.executor.gradients[entry.action.unit]
        self.collectives[action] = unit.start_gathering(action.stage)

    def reduce_gradients(self, entry: Entry) -> None:
        """Start a reduction, or finish one that a backward has begun; or, before that backward, prepare it."""
        action, unit = entry.action, self.executor.gradients[entry.action.unit]
        if self.step.shape.begins_early(action):
            self.collectives[action] = unit.expect_last_backward(action.stage)
        else:
            layers = action.covers if isinstance(action.covers, LayerRange) else None
            self.collectives[action] = unit.start_reduction(action.stage, layers)

    def _forward_segments(self, entry: Entry) -> None:
        """Run a range of segments; the first one collects inputs, the last one hands outputs on."""
        action = entry.action
        covered, need, stage = self._segments_of(action), self._need(action), self.stage(action.place)
        if covered.first > 0:
            running, inputs = self.store.take(("open", action.place, -1))
        else:
            cut = self.step.cuts.segments[action.place]
            inputs, (batch,) = self._collect(entry)
            with torch.set_grad_enabled(need.has_backward):
                hidden, embeddings = _inputs_of_stage(action, inputs)
            if hidden is not None:
                hidden.requires_grad_(need.has_backward and need.sends_gradient)
            running = SegmentPass(
                stage,
                stage.prepare(batch, embeddings),
                bounds=(*cut.forward, *cut.backward),
                hidden=hidden,
                close=partial(self._close, action),
                has_backward=need.has_backward,
                parameter_storages=self.executor.parameter_storages if self.executor.device.type == "cpu" else None,
            )
        with self.clock.span(action):
            running.forward(covered.end)
            self._start_collective_behind(running)
            is_last = covered.end == running.num_segments
            if is_last and (output := running.take_output()) is not None:
                self.publish_outputs(entry, [output])
        if not is_last or running.has_backward:
            self.store.put(("open", action.place, -1), (running, inputs), size_bytes=running.size_bytes)

    def _backward_segments(self, entry: Entry) -> None:
        """Run the backward of a range of segments; the first one to run collects the gradient, the last one hands it back."""
        action, covered = entry.action, self._segments_of(entry.action)
        running, inputs = self.store.take(("open", action.place, -1))
        if covered.end == running.num_segments:
            shape = running.output_shape
            running.start_backward(None if shape is None else self.collect_output_gradient(entry, shape))
        with self.clock.span(action):
            running.backward(covered.first)
            self._start_collective_behind(running)
        if covered.first == 0:
            self.publish_input_gradients(entry, inputs)
        else:
            self.store.put(("open", action.place, -1), (running, inputs), size_bytes=running.size_bytes)

    def _start_collective_behind(self, running: SegmentPass) -> None:
        """Start the collective that ends a piece: at once, or, for a piece inside a wait, when the wait is over."""
        if self.is_filling:
            self.held_back.append(running.start_collective)
        else:
            running.start_collective()

    def _segments_of(self, action: Action) -> SegmentRange:
        if isinstance(action.covers, SegmentRange):
            return action.covers
        return SegmentRange(0, self.step.cuts.segments[action.place].num_segments)

    def _close(self, action: Action, output: Tensor | HeadOutput) -> tuple[Tensor | None, Tensor | None]:
        """Return the loss of a stage's output, as a share of the global loss, and the tensor that is handed on."""
        if not isinstance(output, HeadOutput):
            return None, output
        self.loss_sums.setdefault(action.unit, []).append(output.loss_sum.detach())
        if output.is_correct is not None:
            self.correct.append((action.microbatch_place, output.is_correct))
        if output.token_losses is not None and len(self.step.data_set_divisors) > 1:
            self.token_losses.append((action.microbatch_place, output.token_losses))
        is_backbone = action.unit == self.step.graph.backbone.name
        count = self.step.loss_divisor if is_backbone else self.step.num_generated_values[action.unit]
        return output.loss_sum / (count or 1), output.conditions

    def _collect(self, entry: Entry) -> tuple[Inputs, tuple[PackedInput, ...]]:
        """Take all inputs of a forward: hidden states, upstream outputs, and the data of its sample subsets."""
        action, inputs = entry.action, {key.source: self.collect(key) for key in entry.takes}
        self.finish_collective(Action(ActionKind.GATHER_PARAMETERS, *action.place[:3]))
        has_backward = self._need(action).has_backward
        for place, tensor in inputs.items():
            if place.unit != action.unit:
                tensor.requires_grad_(has_backward and has_trainable_output(self.step.graph, place.unit))
        return inputs, self.data.of(action.microbatch_place)

    def _filling_waits(self, action: Action) -> AbstractContextManager[None]:
        """Let work inside a computation run in its waits for tensor parallel collectives."""
        if not self.inside or self.is_filling:
            return nullcontext()
        return self.stage(action.place).waits.filled_by(self.fill_wait, go_on=self.end_wait)

    def _need(self, action: Action) -> BackwardNeed:
        return self.step.shape.backward_need(*action[1:4])

    def _gathering_weights(self, action: Action) -> AbstractContextManager[None]:
        """Gather weights and reduce gradients while an action computes, if the stage's weights are sharded."""
        sharded = self.executor.sharded.get((action.unit, action.stage))
        return nullcontext() if sharded is None else sharded.collectives(action.kind)

    def _run_subset(self, action: Action, batch: PackedInput, inputs: Inputs) -> Tensor | None:
        """Run one sample subset; returns the tensor that the stage hands on, or None if it only has a loss."""
        has_backward = self._need(action).has_backward
        hidden, embeddings = _inputs_of_stage(action, inputs)
        counts_memory = has_backward and self.executor.device.type == "cpu"
        saved = SavedTensors(self.executor.parameter_storages) if counts_memory else None
        is_deferred = action.place in self.step.cuts.split or self.stage(action.place).delays_weight_gradients
        queue = WeightGradientQueue() if has_backward and is_deferred else None
        with self._gathering_weights(action), saved or nullcontext(), defer_weight_gradients(queue):
            output = self.stage(action.place)(hidden, batch, embeddings)
            loss, given = self._close(action, output)
        if has_backward:
            for tensor in inputs.values():
                if saved is not None and (action.stage > 0 or action.subset <= 0):
                    saved.add(tensor)
            size_bytes = saved.size_bytes if saved is not None else size_of(hidden)
            root = loss if loss is not None and loss.requires_grad else None
            edge = get_gradient_edge(given) if given is not None and given.requires_grad else None
            opened = OpenSubset(root, edge, None if given is None else given.shape, inputs, queue)
            self.store.put(("open", action.place, action.subset), opened, size_bytes=size_bytes)
        return None if given is None else given.detach()

    def _propagate(self, entry: Entry) -> WeightGradientQueue | None:
        action = entry.action
        opened: OpenSubset = self.store.take(("open", action.place, action.subset))
        gradient = None if opened.output_shape is None else self.collect_output_gradient(entry, opened.output_shape)
        roots = [(root, each) for root, each in ((opened.loss, None), (opened.output, gradient)) if root is not None]
        with self.clock.span(action), self._gathering_weights(action), self._filling_waits(action):
            if roots:
                torch.autograd.backward(*zip(*roots, strict=True))  # type: ignore[arg-type]
            # Without an item for a first stage with adapters, no gradient passes the first adapter.
            is_short = not opened.inputs and self.step.graph.unit(action.unit).lora is not None
            if not self.is_filling and (not roots or is_short):
                for number in sorted(self.inside):  # there were fewer waits than planned, because there was less to compute
                    self.fill_wait(number)
                    self.end_wait()
            if action.kind is ActionKind.BACKWARD and opened.queue is not None:
                opened.queue.compute()
        self.publish_input_gradients(entry, opened.inputs)
        return opened.queue


def _inputs_of_stage(action: Action, inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """Return the hidden states that a stage goes on with, and the outputs of other units that its first stage takes."""
    return (next(iter(inputs.values())), None) if action.stage > 0 else (None, stack_items(inputs.values()))
