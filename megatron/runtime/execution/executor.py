"""Runs a rank's lane of a schedule with Braid's own stages."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.execution.step_messages import RankResources
from megatron.runtime.step.step import Step, StepResult
from multimodal.values.errors import ConfigError


class Executor(RankResources):
    """Executes steps with a rank's resources, which are the same for all steps."""

    def execute(self, step: Step) -> StepResult:
        """Run this rank's lane of `step.schedule`; gradients accumulate in the stages' parameters if it has backwards."""
        return self.start(step)()

    def start(self, step: Step) -> Callable[[], StepResult]:
        """Do the same, and let a device go on with it: what is returned waits for the results, before the next step.

        Raises ConfigError if the schedule splits backwards of Transformer Engine layers that do not delay weight gradients, or
        runs segments of such layers, and if work is placed in waits that --tp-comm-overlap removes.
        """
        self._check_implementation(step)
        for stage in self.stages.values():
            stage.train(not step.shape.forward_only)
            stage.set_is_first_microbatch()  # layers in FP8 quantise their weights in the next forward, and keep them so
            stage.num_step_tokens = step.num_tokens
        running, has_cuda, memory_before = RunningStep(self, step), torch.cuda.is_available(), 0
        if has_cuda:  # whose allocator counts the memory that autograd keeps
            torch.cuda.reset_peak_memory_stats()
            memory_before = torch.cuda.memory_allocated()
        self.clock.start_step()
        running.run(step.schedule.entries(self.lane))
        peak_bytes = torch.cuda.max_memory_allocated() - memory_before if has_cuda else running.store.peak_bytes
        return partial(self._result, running, peak_bytes)

    def _check_implementation(self, step: Step) -> None:
        options = [stage.options for stage in self.stages.values()]
        if step.cuts.split and any(each.transformer_impl != "local" and not each.delays_weight_gradients for each in options):
            raise ConfigError(
                "the schedule splits backwards into input and weight gradients, but layers of Transformer Engine were built "
                "without delay_wgrad_compute; use --transformer-impl local, or a --schedule with whole backwards"
            )
        for unit, _, stage, _ in step.cuts.segments:
            if (unit, stage) in self.stages:
                self.stages[unit, stage].segments()
        if step.schedule.has_inside and any(stage.options.num_overlapped_parts > 1 for stage in self.stages.values()):
            raise ConfigError(
                "the schedule runs work inside the waits for tensor parallel collectives, but --tp-comm-overlap leaves no such "
                "waits: it cuts the collectives into parts beside products of their own layer; leave out one of the two"
            )
        if step.schedule.has_inside and self.sharded:
            raise ConfigError(
                "the schedule runs work inside the waits for tensor parallel collectives, but replicas that share weights must "
                "all gather them in one order; leave out --data-parallel-sharding-strategy optim_grads_params, or use a "
                "--schedule without such work"
            )

    def _count_correct(self, running: RunningStep) -> tuple[int, dict[int, bool]]:
        """Return (target tokens of this rank that greedy decoding gets right; sample id -> True if all of its tokens are)."""
        step, num_correct = running.step, 0
        atoms = (atom for place, _ in running.correct for atom in step.assignment.atoms(place))
        flags = {atom.sample_id: True for atom in atoms if step.lengths[atom.sample_id].num_target_tokens}
        for place, is_correct in running.correct:
            for sample_id, flag in zip(step.target_samples[place], is_correct.tolist(), strict=True):
                if sample_id in flags:
                    num_correct += flag
                    flags[sample_id] = flags[sample_id] and flag
        group = self.groups[self.graph.backbone.name].cp
        if flags and group.size() > 1:  # a sample is correct if it is on all ranks that share it; the first of them reports it
            whole = torch.tensor(list(flags.values()), dtype=torch.uint8, device=self.device)
            dist.all_reduce(whole, op=dist.ReduceOp.MIN, group=group)
            flags = dict(zip(flags, map(bool, whole.tolist()), strict=True)) if group.rank() == 0 else {}
        return num_correct, flags

    def _sum_by_data_set(self, running: RunningStep) -> Sequence[Tensor]:
        """Return the sum of the losses of this rank's target tokens for each data set; empty unless the step has several."""
        if not running.token_losses:
            return ()
        step = running.step
        owners = [step.lengths[sample].data_set for place, _ in running.token_losses for sample in step.target_samples[place]]
        losses = torch.cat([losses for _, losses in running.token_losses]).double()
        sums = losses.new_zeros(len(step.data_set_divisors))
        return sums.index_add_(0, torch.tensor(owners, dtype=torch.int64, device=losses.device), losses).unbind()

    def _result(self, running: RunningStep, peak_activation_bytes: int) -> StepResult:
        reported = ((unit, losses) for unit, losses in running.loss_sums.items() if self.groups[unit].tp.rank() == 0)
        found: dict[str | int, Tensor] = {unit: torch.stack(losses).double().sum() for unit, losses in reported}
        has_answers = self.graph.backbone.name in found
        found |= enumerate(self._sum_by_data_set(running) if has_answers else ())
        values = torch.stack([*found.values()]).tolist() if found else []  # the host waits once
        num_correct, correct_samples = self._count_correct(running) if has_answers else (0, {})
        loss_sums = dict(zip(found, values, strict=True))
        return StepResult(loss_sums, num_correct, correct_samples, self.clock.events(), peak_activation_bytes)
