"""One rank's trainer: runs a step of any kind, updates the weights, evaluates. What a step is, others decided."""

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.runtime.execution.assembly import RankRuntime
from megatron.runtime.execution.step_clock import seconds_by_resource
from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.gradients.gradients import clip_gradients, global_gradient_norm
from megatron.runtime.report.step_report import EvaluationReport, StepReport
from megatron.runtime.step.loss_sums import LossSums
from megatron.runtime.step.step import Step, StepResult
from megatron.runtime.training.learning_rate import current_learning_rate
from multimodal.cost.flops import step_flops
from multimodal.values.errors import ConfigError
from multimodal.values.timeline import TimelineEvent


class Trainer:
    """Steps of one rank. All methods are collective."""

    def __init__(
        self,
        runtime: RankRuntime,
        *,
        optimizers: Mapping[str, MegatronOptimizer],
        scheduler: OptimizerParamScheduler,
        settings: OptimizerSettings,
        vocab_size: int,
        peak_tflops: float,
        device: torch.device,
    ) -> None:
        """optimizers: by unit, those this rank has; peak_tflops: of this rank's device."""
        self.runtime, self.optimizers, self.scheduler = runtime, optimizers, scheduler
        self._settings, self._vocab_size, self._device = settings, vocab_size, device
        (self._world_peak_tflops,) = self._sum([peak_tflops])

    def train_step(self, step: Step, *, number: int) -> tuple[StepReport, tuple[TimelineEvent, ...]]:
        """Forward, backward, reduce, clip, update; number: of the step, for messages. Also returns this rank's events."""
        start = time.perf_counter()
        self._zero_gradients()
        if not step.form.gathers_parameters:
            self.runtime.complete_parameters()
        result = self.runtime.executor.execute(step, is_training=True)
        executed = time.perf_counter()
        self.runtime.finish_gradients()
        learning_rate = current_learning_rate(self.scheduler, self._settings)
        norm = self._update(gathers_later=step.form.gathers_parameters)
        end = time.perf_counter()
        report = self._report(step, result, seconds=(end - start, end - executed), norm=norm, learning_rate=learning_rate)
        if not (math.isfinite(report.loss) and math.isfinite(norm)):
            raise ConfigError(
                f"step {number}: the loss is {report.loss} and the gradient norm {norm}; lower --lr (now {self._settings.lr}), "
                "lengthen --lr-warmup-iters or set --clip-grad, and resume from the last checkpoint"
            )
        return report, result.events

    def evaluate(self, steps: Iterable[Step]) -> EvaluationReport:
        """Forward only, over forward-only steps (at least one)."""
        self.runtime.complete_parameters()
        losses = LossSums(self.runtime.executor.graph.backbone.name)
        num_correct_tokens, num_right_answers, num_tokens, num_samples = 0, 0, 0, 0
        with torch.no_grad():
            for step in steps:
                result = self.runtime.executor.execute(step, is_training=False)
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

    def _zero_gradients(self) -> None:
        self.runtime.zero_gradients()
        for optimizer in self.optimizers.values():
            # In an unsharded optimizer `grad` is the gradient buffer itself: left there, a backward would add it twice.
            optimizer.zero_grad()

    def _update(self, *, gathers_later: bool) -> float:
        """Clip and step; returns the gradient norm. gathers_later: the next schedule gathers what a sharded optimizer updates."""
        for optimizer in self.optimizers.values():
            optimizer.prepare_grads()
        counted = [(optimizer, self._counts_in_norm(unit)) for unit, optimizer in self.optimizers.items()]
        norm = global_gradient_norm(counted, device=self._device)
        if not math.isfinite(norm):
            return norm
        for unit, optimizer in self.optimizers.items():
            if self._settings.clip_grad > 0:
                clip_gradients(optimizer.get_parameters(), norm=norm, max_norm=self._settings.clip_grad)
            with self.runtime.gradients[unit].gathering_later() if gathers_later else nullcontext():
                optimizer.step_with_ready_grads()
        self.scheduler.step(increment=1)
        return norm

    def _counts_in_norm(self, unit: str) -> bool:
        optimizer = self.optimizers[unit]
        return optimizer.config.use_distributed_optimizer or self.runtime.memberships[unit].groups.dp_cp.rank() == 0

    def _report(
        self, step: Step, result: StepResult, *, seconds: tuple[float, float], norm: float, learning_rate: float
    ) -> StepReport:
        split = seconds_by_resource(result.events)
        sums = self._sum([split["compute"], split["communication"], split["waiting"], seconds[1]])
        step_seconds, peak_bytes = self._largest([seconds[0], float(result.peak_activation_bytes)])
        means = [total / dist.get_world_size() for total in sums]
        text_loss, generator_loss = LossSums.of_step(step, result).means(self._sum)
        flops = step_flops(step.graph, step.lengths.values(), vocab_size=self._vocab_size)
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
            peak_activation_bytes=int(peak_bytes),
        )

    def _sum(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def _largest(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=operation)
        reduced: list[float] = tensor.tolist()
        return reduced
