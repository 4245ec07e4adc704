"""One rank's trainer: runs a step of any kind, updates the weights by Megatron's learning rate schedule, evaluates."""

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.runtime import platform
from megatron.runtime.execution.step_clock import seconds_by_resource
from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.report.reporting import EvaluationReport, StepReport
from megatron.runtime.session import Session
from megatron.runtime.step.step import LossSums, Step, StepResult
from multimodal.cost.flops import step_flops
from multimodal.values.errors import ConfigError
from multimodal.values.plan import Plan
from multimodal.values.timeline import TimelineEvent


class Trainer:
    """Steps of one rank. All methods are collective."""

    def __init__(
        self,
        session: Session,
        *,
        scheduler: OptimizerParamScheduler,
        settings: OptimizerSettings,
        peak_tflops: float,
    ) -> None:
        """peak_tflops: of this rank's device."""
        self.session, self.scheduler, self._settings = session, scheduler, settings
        (self._world_peak_tflops,) = self._sum([peak_tflops])
        self._compute_seconds = 0.0

    def train_step(self, step: Step, *, number: int) -> tuple[StepReport, tuple[TimelineEvent, ...]]:
        """Forward, backward, reduce, clip, update; number: of the step, for messages. Also returns this rank's events."""
        start = time.perf_counter()
        result = self.session.forward_backward(step)
        executed = time.perf_counter()
        self.session.finish_gradients()
        learning_rate = current_learning_rate(self.scheduler, self._settings)
        norm = self.session.update(gathers_later=step.cuts.gathers_parameters)
        if math.isfinite(norm):
            self.scheduler.step(increment=1)
        end = time.perf_counter()
        report = self._report(step, result, seconds=(end - start, end - executed), norm=norm, learning_rate=learning_rate)
        if not (math.isfinite(report.loss) and math.isfinite(norm)):
            raise ConfigError(
                f"step {number}: the loss is {report.loss} and the gradient norm {norm}; lower --lr (now {self._settings.lr}), "
                "lengthen --lr-warmup-iters or set --clip-grad, and resume from the last checkpoint"
            )
        return report, result.events

    def change_plan(self, plan: Plan) -> None:
        """Go on under another plan from the next step on; see `Session.change_plan`."""
        self.session.change_plan(plan)
        self.scheduler.step(increment=0)  # tells the new optimizers the coming step's learning rate

    def evaluate(self, steps: Iterable[Step]) -> EvaluationReport:
        """Forward only, over forward-only steps (at least one)."""
        self.session.complete_parameters()
        losses = LossSums(self.session.graph.backbone.name)
        num_correct_tokens, num_right_answers, num_tokens, num_samples = 0, 0, 0, 0
        with torch.no_grad():
            for step in steps:
                result = self.session.executor.execute(step, is_training=False)
                losses = losses.plus(LossSums.of_step(step, result))
                num_correct_tokens += result.num_correct_tokens
                in_words = step.samples_in_words
                num_right_answers += sum(is_right for sample, is_right in result.correct_samples.items() if sample in in_words)
                num_tokens += step.num_target_tokens  # of all ranks, as everyone knows them
                num_samples += len(in_words)
        correct_tokens, right_answers = self._sum([num_correct_tokens, num_right_answers])
        text_loss, generator_loss = losses.means(self._sum)
        return EvaluationReport(
            loss=text_loss + generator_loss,
            generator_loss=generator_loss,
            token_accuracy=correct_tokens / num_tokens,
            answer_accuracy=right_answers / num_samples if num_samples else math.nan,
        )

    def _report(
        self, step: Step, result: StepResult, *, seconds: tuple[float, float], norm: float, learning_rate: float
    ) -> StepReport:
        split = seconds_by_resource(result.events)
        self._compute_seconds = split["compute"]
        sums = self._sum([split["compute"], split["communication"], split["waiting"], seconds[1]])
        step_seconds, peak_bytes = self._largest([seconds[0], float(result.peak_activation_bytes)])
        means = [total / dist.get_world_size() for total in sums]
        text_loss, generator_loss = LossSums.of_step(step, result).means(self._sum)
        flops = step.flops or step_flops(step.graph, step.lengths.values(), vocab_size=self.session.options.vocab_size)
        return StepReport(
            loss=text_loss + generator_loss,
            generator_loss=generator_loss,
            grad_norm=norm,
            learning_rate=learning_rate,
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
        )

    def gather_compute_seconds(self) -> list[float]:
        """Return, per rank, how long it computed in the last step."""
        own = torch.tensor([self._compute_seconds], dtype=torch.float64, device=platform.device())
        found = own.new_empty(dist.get_world_size())
        dist.all_gather_into_tensor(found, own)
        seconds: list[float] = found.tolist()
        return seconds

    def _sum(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def _largest(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=platform.device())
        dist.all_reduce(tensor, op=operation)
        reduced: list[float] = tensor.tolist()
        return reduced


class _AllGroups:
    """Stands for one optimizer before the scheduler: the parameter groups of all units under the current plan."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Empty on a rank that trains nothing."""
        return [group for optimizer in self._session.optimizers.values() for group in optimizer.param_groups]


def build_scheduler(settings: OptimizerSettings, session: Session, *, train_iters: int) -> OptimizerParamScheduler:
    """Counts optimizer steps (Megatron counts samples: the same for a constant global batch size)."""
    return OptimizerParamScheduler(
        _AllGroups(session),
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


def current_learning_rate(scheduler: OptimizerParamScheduler, settings: OptimizerSettings) -> float:
    """The rate of the coming step, also on a rank that trains nothing."""
    return float(scheduler.get_lr({"max_lr": settings.lr, "min_lr": settings.min_lr}))
