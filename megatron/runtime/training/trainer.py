"""One rank's trainer: runs steps, updates the weights with Megatron's learning rate schedule, evaluates."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron.runtime import platform
from megatron.runtime.execution.step_clock import seconds_by_resource
from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.report.reporting import EvaluationReport, StepReport
from megatron.runtime.session import Session
from megatron.runtime.step.step import LossMeans, Step, StepResult
from multimodal.attention.context_parallel import all_gather_single
from multimodal.cost.flops import step_flops
from multimodal.values.errors import ConfigError
from multimodal.values.timeline import TimelineEvent
from multimodal.values.units.unit import MOE_KINDS


@dataclass(frozen=True)
class Outcome:
    """The result of a step, the same on all ranks; a rank that knows it can update the weights without the others."""

    number: int
    loss: float
    generator_loss: float
    grad_norm: float


class _Executed(NamedTuple):
    """A step of this rank whose gradients are reduced."""

    step: Step
    result: StepResult
    losses: LossMeans
    expert_losses: float
    learning_rate: float
    start: float
    """Start by `time.perf_counter`; the end of the schedule is by the same clock."""
    end: float


@dataclass(eq=False)
class Trainer:
    """Steps of one rank. All methods are collective, except `finish` and `last_report`."""

    session: Session
    scheduler: OptimizerParamScheduler
    settings: OptimizerSettings
    peak_tflops: float
    """Of this rank's device."""
    check: Callable[[], None] = lambda: None
    """Raises if other ranks' messages cannot be trusted."""
    outcome: Outcome | None = None
    """The outcome of the last step in the weights of this rank."""
    updates_alone: bool = False
    """True if parameters that a sharded optimizer updates are gathered in the next step: an update then needs no other rank."""
    compute_seconds: list[float] = field(default_factory=list)
    """The computing time of each rank in the last step."""
    _executed: _Executed | None = None
    _running: int | None = None

    def __post_init__(self) -> None:
        self.meet()

    def meet(self) -> None:
        """Exchange, over all ranks, the facts that reports need; also called after the session has entered a plan."""
        (self._world_peak_tflops,) = self._sum([self.peak_tflops])
        self.scheduler.step(increment=0)  # gives new optimizers the coming step's learning rate

    def train_step(self, step: Step, *, number: int) -> tuple[StepReport, tuple[TimelineEvent, ...]]:
        """Forward, backward, reduce, clip, update; number: of the step, for messages. Also returns this rank's events.

        The update is queued before the host waits for anything. Where ranks may be lost, it waits for the norm, the last value
        that they need from each other: a rank that has it finishes the step, and others can when they receive it (`finish`).
        """
        start = time.perf_counter()
        norm: Tensor | None = None
        self._running, self._executed = number, None
        try:
            finish = self.session.start(step)
            self.session.finish_gradients()
            if not self.updates_alone:
                norm = self.session.gradient_norm()
                self.session.step_optimizers(norm, gathers_later=step.cuts.gathers_parameters)
            result = finish()
        finally:
            self._running = None
        clock = self.session.executor.clock
        executed = clock.origin_seconds + max((event.end_seconds for event in result.events), default=0.0)
        losses, expert_losses = self._means(result.loss_sums, step.loss_counts, self.session.take_expert_losses())
        rates = {"max_lr": self.settings.lr, "min_lr": self.settings.min_lr}  # also on a rank that trains nothing
        learning_rate = float(self.scheduler.get_lr(rates))
        self._executed = _Executed(step, result, losses, expert_losses, learning_rate, start, executed)
        known = float(self.session.gradient_norm() if norm is None else norm)
        self.check()
        self.finish(Outcome(number, losses.total, losses.generators, known), is_updated=norm is not None)
        report = self._report(self._executed, end=time.perf_counter())
        if not (math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
            raise ConfigError(
                f"step {number}: the loss is {report.loss} and the gradient norm {report.grad_norm}; lower --lr (now "
                f"{self.settings.lr}), lengthen --lr-warmup-iters or set --clip-grad, and resume from the last checkpoint"
            )
        return report, result.events

    def place_in_step(self) -> tuple[int, int] | None:
        """Return the current step and the number of its finished actions, or None; may be called from another thread."""
        number, executor = self._running, self.session.__dict__.get("executor")
        return None if number is None or executor is None else (number, len(executor.clock.spans))

    def finish(self, outcome: Outcome, *, is_updated: bool = False) -> None:
        """Update the weights by this rank's gradients, complete once any rank knows the outcome; not if its norm is not finite.

        is_updated: the weights are updated already.
        """
        if math.isfinite(outcome.grad_norm):
            if not is_updated:
                norm = torch.tensor([outcome.grad_norm], dtype=torch.float64, device=platform.device())
                self.session.step_optimizers(norm, gathers_later=True)
            self.scheduler.step(increment=1)
        self.outcome = outcome

    def last_report(self) -> tuple[StepReport, Step]:
        """Return a report of the last step from this rank's figures only, with the losses that all know."""
        assert self._executed is not None
        return self._report(self._executed, end=self._executed.end, is_alone=True), self._executed.step

    def evaluate(self, steps: Iterable[Step]) -> EvaluationReport:
        """Forward only, over forward-only steps (at least one)."""
        self.session.complete_parameters()
        sums, counts = Counter[str | int](), Counter[str | int]()
        num_correct_tokens, num_right_answers, num_tokens, num_samples = 0, 0, 0, 0
        with torch.no_grad():
            for step in steps:
                result = self.session.executor.execute(step)
                sums.update(result.loss_sums)  # type: ignore[arg-type]  # adds them
                counts.update(step.loss_counts)  # type: ignore[arg-type]
                num_correct_tokens += result.num_correct_tokens
                in_words = step.samples_in_words
                num_right_answers += sum(is_right for sample, is_right in result.correct_samples.items() if sample in in_words)
                num_tokens += step.num_target_tokens  # of all ranks, which every rank knows
                num_samples += len(in_words)
        correct_tokens, right_answers = self._sum([num_correct_tokens, num_right_answers])
        means, _ = self._means(sums, counts)
        return EvaluationReport(
            loss=means.total,
            generator_loss=means.generators,
            data_set_losses=means.by_data_set,
            token_accuracy=correct_tokens / num_tokens,
            answer_accuracy=right_answers / num_samples if num_samples else math.nan,
        )

    def _report(self, done: _Executed, *, end: float, is_alone: bool = False) -> StepReport:
        """Return the report of a step; end: of the step; is_alone: use only this rank's figures."""
        assert self.outcome is not None
        step, result = done.step, done.result
        split = seconds_by_resource(result.events)
        means = [split["compute"], split["communication"], split["waiting"], end - done.end]
        largest = [end - done.start, float(result.peak_activation_bytes), float(platform.memory_bytes())]
        if not is_alone:
            ranks = self._gather([*means, *largest])
            self.compute_seconds = ranks[0]
            means, largest = [fmean(values) for values in ranks[:4]], [max(values) for values in ranks[4:]]
        step_seconds, peak_bytes, memory_bytes = largest
        flops = step.flops or step_flops(step.graph, tuple(step.lengths.values()), vocab_size=self.session.options.vocab_size)
        num_moe_layers = sum(map(step.graph.backbone.layers.count, MOE_KINDS))
        return StepReport(
            loss=self.outcome.loss,
            generator_loss=self.outcome.generator_loss,
            data_set_losses=done.losses.by_data_set,
            load_balancing_loss=done.expert_losses / step.num_tokens / max(1, num_moe_layers),
            grad_norm=self.outcome.grad_norm,
            learning_rate=done.learning_rate,
            num_samples=len(step.lengths),
            num_tokens=step.num_tokens,
            num_target_tokens=step.num_target_tokens,
            step_seconds=step_seconds,
            compute_seconds=means[0],
            communication_seconds=means[1],
            waiting_seconds=means[2],
            optimizer_seconds=means[3],
            tokens_per_second=step.num_tokens / step_seconds,
            mfu=flops / step_seconds / (self._world_peak_tflops * 1e12),
            tflops_per_device=flops / step_seconds / dist.get_world_size() / 1e12,
            peak_activation_bytes=int(peak_bytes),
            memory_bytes=int(memory_bytes),
        )

    def _means(self, sums: Mapping[Any, float], counts: Mapping[Any, float], of_experts: float = 0.0) -> tuple[LossMeans, float]:
        """Return the means over all ranks, and the sum of their experts' losses; sums, of_experts: this rank's; collective."""
        *totals, expert_losses = self._sum([*(sums.get(key, 0.0) for key in counts), of_experts])
        found = dict(zip(counts, totals, strict=True))
        return LossMeans.of(found, counts, backbone=self.session.graph.backbone.name), expert_losses

    def _sum(self, values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=platform.device())
        dist.all_reduce(tensor)
        return list(tensor.tolist())

    def _gather(self, values: list[float]) -> list[list[float]]:
        """Return, for each value, those of all ranks."""
        own = torch.tensor(values, dtype=torch.float64, device=platform.device())
        gathered = own.new_empty(dist.get_world_size() * len(values))
        all_gather_single(gathered, own)
        return list(gathered.view(-1, len(values)).T.tolist())


class _Scheduler(OptimizerParamScheduler):
    """A scheduler whose parameter groups may have a warm-up of their own."""

    lr_warmup_steps: int

    def get_lr(self, param_group: dict[str, Any]) -> float:
        common = self.lr_warmup_steps
        self.lr_warmup_steps = param_group.get("lr_warmup_steps", common)
        try:
            return float(super().get_lr(param_group))
        finally:
            self.lr_warmup_steps = common


def build_scheduler(settings: OptimizerSettings, session: Session, *, train_iters: int) -> OptimizerParamScheduler:
    """Build a scheduler that counts optimizer steps (Megatron counts samples: the same with a constant global batch size)."""
    return _Scheduler(
        session,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=settings.lr_decay_iters or train_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=train_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=settings.lr_wsd_decay_iters,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )
