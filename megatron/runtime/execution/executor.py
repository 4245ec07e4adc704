"""Runs a rank's lane of a schedule with Braid's own stages, sample subset by sample subset where a backward is cut."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.runtime.execution.activation_store import SavedTensors, size_of
from megatron.runtime.execution.step_messages import RankResources, StepMessages, microbatch_of
from megatron.runtime.step.step import Step, StepResult
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.stage_input import PackedInput
from multimodal.model.weight_gradient_queue import DeferWeightGradients, WeightGradientQueue
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import MicrobatchPlace, Route
from multimodal.values.backward_need import BackwardNeed, has_trainable_output, stage_backward_need
from multimodal.values.dependencies import begins_early
from multimodal.values.errors import ConfigError


@dataclass(frozen=True)
class OpenSubset:
    """A forward's tensors that its backward needs."""

    loss: Tensor | None
    """None where the stage gives none, or where it depends on nothing that is trained: text without items in a frozen LLM."""
    output: GradientEdge | None
    """The edge of the output into the graph, without the tensor, so that it can be freed; None as above."""
    output_shape: torch.Size | None
    """None if the stage hands nothing on."""
    hidden: Tensor | None
    items: tuple[tuple[Route, Tensor], ...]
    queue: WeightGradientQueue | None
    """The queue in which the backward leaves weight gradients; None if it is not split."""


class RunningStep(StepMessages):
    """One step as a rank's stages compute it, with its results."""

    def __init__(self, executor: RankResources, step: Step, *, is_training: bool) -> None:
        super().__init__(executor, step)
        self.is_training = is_training
        self.loss_sums: dict[str, list[Tensor]] = {}
        """The losses of every unit with a loss, microbatch by microbatch."""
        self.correct: list[tuple[MicrobatchPlace, Tensor]] = []

    def before_action(self, position: int) -> None:
        """Take part in what replicas compute whose weights this rank shares."""
        joins = self.step.joins[self.executor.lane] if self.step.joins else {}
        for join in joins.get(position, ()):
            for _ in range(join.num_passes):
                with self.executor.sharded[join.unit, join.stage].collectives(join.kind, is_joined=True):
                    pass

    def forward(self, action: Action) -> None:
        """Collect what the stage needs, run it, hand on what it gives, and keep what the backwards need."""
        need = self._need(action)
        has_backward = self.is_training and need.has_backward
        hidden, items = self.collect_inputs(action)
        self.finish_collective(Action(ActionKind.GATHER_PARAMETERS, *action.place[:3]))
        for route, tensor in items:
            tensor.requires_grad_(has_backward and has_trainable_output(self.step.graph, route.source.unit))
        batches = [_move_input(batch, self.executor.device) for batch in self.step.inputs_of(microbatch_of(action.place))]
        hiddens = self._split_rows(action, hidden, batches)
        with self.clock.span(action), torch.set_grad_enabled(has_backward):
            outputs = []
            for subset, batch, rows in zip(self.step.cuts.subsets(microbatch_of(action.place)), batches, hiddens, strict=True):
                if rows is not None:
                    rows.requires_grad_(has_backward and need.sends_gradient)
                outputs.append(self._run_subset(action._replace(covers=subset), batch, rows, items, has_backward=has_backward))
            if all(output is not None for output in outputs):
                self.publish_outputs(action, [output for output in outputs if output is not None])

    def backward(self, action: Action) -> None:
        """Go from a stage's loss and the gradient of its output to that of its input; weight gradients on the way."""
        self._propagate(action)

    def input_gradient(self, action: Action) -> None:
        """Run the same backward; linear layers leave weight gradients to the queue that was active in the forward."""
        queue = self._propagate(action)
        assert queue is not None, f"the forward of {action} did not know that its backward is split"
        if self._need(action).trains_weights:
            self.store.put(("weight gradients", action.place, action.subset), queue, size_bytes=queue.size_bytes)

    def weight_gradient(self, action: Action) -> None:
        """Compute the weight gradients that an input gradient left."""
        queue: WeightGradientQueue = self.store.take(("weight gradients", action.place, action.subset))
        with self.clock.span(action), self._gathering_weights(action):
            queue.compute()

    def gather_parameters(self, action: Action) -> None:
        """Start gathering a stage's parameters."""
        self.start_collective(action, self.executor.gradients[action.unit].start_gathering)

    def reduce_gradients(self, action: Action) -> None:
        """Start a reduction, or the last part of one after the backward that did the rest; before it, get ready for that."""
        unit = self.executor.gradients[action.unit]
        self.start_collective(action, unit.expect_last_backward if begins_early(action) else unit.start_reduction)

    def _need(self, action: Action) -> BackwardNeed:
        return stage_backward_need(self.step.graph, self.executor.plan, action.unit, action.replica, action.stage)

    def _gathering_weights(self, action: Action) -> AbstractContextManager[None]:
        """Gather weights and reduce gradients while an action computes, where the stage's weights are sharded."""
        sharded = self.executor.sharded.get((action.unit, action.stage))
        return nullcontext() if sharded is None else sharded.collectives(action.kind)

    def _run_subset(
        self,
        action: Action,
        batch: PackedInput,
        hidden: Tensor | None,
        items: tuple[tuple[Route, Tensor], ...],
        *,
        has_backward: bool,
    ) -> Tensor | None:
        """Run one sample subset; returns what the stage hands on, or None when it gives a loss alone."""
        embeddings = torch.cat([tensor for _, tensor in items]) if items else None
        counts_memory = has_backward and self.executor.device.type == "cpu"
        saved = SavedTensors(self.executor.parameter_storages) if counts_memory else None
        queue = WeightGradientQueue() if has_backward and action.place in self.step.cuts.split else None
        with self._gathering_weights(action), saved or nullcontext(), DeferWeightGradients(queue):
            output = self.stage(action.place)(hidden, batch, embeddings)
            loss = self._record_loss(action, output) if isinstance(output, HeadOutput) else None
            given = output.conditions if isinstance(output, HeadOutput) else output
        if has_backward:
            for tensor in (hidden, *(tensor for _, tensor in items if action.subset <= 0)):
                if saved is not None and tensor is not None:
                    saved.add(tensor)
            size_bytes = saved.size_bytes if saved is not None else size_of(hidden)
            opened = OpenSubset(
                loss=loss if loss is not None and loss.requires_grad else None,
                output=get_gradient_edge(given) if given is not None and given.requires_grad else None,
                output_shape=None if given is None else given.shape,
                hidden=hidden,
                items=items,
                queue=queue,
            )
            self.store.put(("open", action.place, action.subset), opened, size_bytes=size_bytes)
        return None if given is None else given.detach()

    def _split_rows(self, action: Action, hidden: Tensor | None, batches: list[PackedInput]) -> list[Tensor | None]:
        """Return each sample subset's hidden states, as leaves of graphs of their own."""
        if hidden is None or len(batches) == 1:
            return [hidden] * len(batches)
        sizes = [self.stage(action.place).num_rows(batch.num_tokens) for batch in batches]
        return [rows.detach() for rows in hidden.split(sizes)]

    def _record_loss(self, action: Action, output: HeadOutput) -> Tensor:
        """Return the microbatch's share of the global loss: LLM tokens and a generator's values count by their own numbers."""
        self.loss_sums.setdefault(action.unit, []).append(output.loss_sum.detach())
        if output.is_correct is not None:
            self.correct.append((microbatch_of(action.place), output.is_correct))
        if action.unit == self.step.graph.backbone.name:
            return output.loss_sum / self.step.num_target_tokens
        return output.loss_sum / self.step.num_generated_values[action.unit]

    def _propagate(self, action: Action) -> WeightGradientQueue | None:
        opened: OpenSubset = self.store.take(("open", action.place, action.subset))
        gradient = None if opened.output_shape is None else self.collect_output_gradient(action, opened.output_shape)
        roots = [(root, each) for root, each in ((opened.loss, None), (opened.output, gradient)) if root is not None]
        with self.clock.span(action), self._gathering_weights(action):
            if roots:
                torch.autograd.backward(*zip(*roots, strict=True))  # type: ignore[arg-type]
        self.publish_input_gradients(action, opened.hidden, opened.items)
        return opened.queue


def _move_input(packed: PackedInput, device: torch.device) -> PackedInput:
    """The same input with its tensors on `device`."""
    if device.type == "cpu":
        return packed
    moved: dict[str, Any] = {
        field.name: value.to(device, non_blocking=True)
        for field in fields(packed)
        if isinstance(value := getattr(packed, field.name), torch.Tensor)
    }
    return replace(packed, **moved)


class Executor(RankResources):
    """Executes steps with what a rank has for all of them."""

    def execute(self, step: Step, *, is_training: bool) -> StepResult:
        """Run this rank's lane of `step.schedule`; gradients accumulate in the stages' parameters.

        A lane that runs a stage together with another lane, or shares weights with one, runs fillers in their places, as both
        must keep one order.
        Raises ConfigError when the schedule splits backwards and Transformer Engine computes them.
        """
        self._check_implementation(step)
        for stage in self.stages.values():
            stage.train(is_training)
        running = RunningStep(self, step, is_training=is_training)
        memory_before = _start_counting_cuda_memory()
        self.clock.start_step()
        lane = step.schedule.lane(self.lane)
        running.run(lane, fillers=frozenset() if self._shares_stages or self.sharded else lane.fillers)
        return self._result(running, memory_before)

    def _check_implementation(self, step: Step) -> None:
        if step.cuts.split and any(stage.options.transformer_impl != "local" for stage in self.stages.values()):
            raise ConfigError(
                "the schedule splits backwards into input and weight gradients, which --transformer-impl transformer_engine "
                "cannot do; use --transformer-impl local, or a --schedule with whole backwards"
            )

    def _count_correct(self, running: RunningStep) -> tuple[int, dict[int, bool]]:
        """(target tokens of this rank that greedy decoding gets right; sample id -> whether it gets all of them right)."""
        step, num_correct = running.step, 0
        atoms = (atom for place, _ in running.correct for atom in step.assignment.atoms(place))
        flags = {atom.sample_id: True for atom in atoms if step.lengths[atom.sample_id].num_target_tokens}
        for place, is_correct in running.correct:
            found = is_correct.tolist()
            num_correct += sum(found)
            for sample_id, flag in zip(step.target_samples[place], found, strict=True):
                flags[sample_id] = flags[sample_id] and flag
        return num_correct, _all_correct(flags, self._groups[self.graph.backbone.name].cp, self.device)

    def _result(self, running: RunningStep, memory_before: int) -> StepResult:
        loss_sums = {
            unit: float(torch.stack(found).double().sum())
            for unit, found in running.loss_sums.items()
            if self._groups[unit].tp.rank() == 0
        }
        backbone = self.graph.backbone.name
        num_correct, correct_samples = self._count_correct(running) if backbone in loss_sums else (0, {})
        return StepResult(
            loss_sum=loss_sums.get(backbone, 0.0),
            generator_loss_sums={unit: loss_sum for unit, loss_sum in loss_sums.items() if unit != backbone},
            num_correct_tokens=num_correct,
            correct_samples=correct_samples,
            events=self.clock.events(),
            peak_activation_bytes=_cuda_memory_peak() - memory_before if torch.cuda.is_available() else running.store.peak_bytes,
        )


def _all_correct(flags: Mapping[int, bool], group: dist.ProcessGroup, device: torch.device) -> dict[int, bool]:
    """Return what is correct on all ranks that share a sample; told by the first of them."""
    if not flags or group.size() == 1:
        return dict(flags)
    whole = torch.tensor(list(flags.values()), dtype=torch.uint8, device=device)
    dist.all_reduce(whole, op=dist.ReduceOp.MIN, group=group)
    return dict(zip(flags, map(bool, whole.tolist()), strict=True)) if group.rank() == 0 else {}


def _start_counting_cuda_memory() -> int:
    """Bytes allocated now; CUDA's allocator knows what autograd keeps, so nothing needs to be counted there."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _cuda_memory_peak() -> int:
    return torch.cuda.max_memory_allocated()
