"""Everything of one rank's run that depends on the plan, as one object that can change its plan in the running process."""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor

from megatron.runtime import platform
from megatron.runtime.communication.broker import Broker
from megatron.runtime.communication.message_channel import MessageChannel
from megatron.runtime.communication.units import GroupBook, Membership, build_memberships
from megatron.runtime.execution.executor import Executor
from megatron.runtime.execution.step_clock import gather_timeline
from megatron.runtime.gradients.gradients import UnitGradients, clip_gradients, global_gradient_norm
from megatron.runtime.gradients.sharded_unit import ShardedUnit
from megatron.runtime.gradients.state_shares import StateShares
from megatron.runtime.gradients.unit_optimizer import OptimizerKey, UnitRates, build_unit_optimizers, describe_groups
from megatron.runtime.gradients.unlike_gradients import UnlikeGradients
from megatron.runtime.state.handover import hold_state, take_over
from megatron.runtime.state.held_tensors import TrainedState
from megatron.runtime.step.step import Step, StepResult
from multimodal.model.collectives import open_user_buffers
from multimodal.model.expert_mlp import ExpertMLP
from multimodal.model.initialization import initialize_parameters
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.unit_stage import UnitStage
from multimodal.plan.communicators import message_partners
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS, ScheduleRow
from multimodal.schedule.passes import Pass
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.parts.state_copies import EVERY_REPLICA
from multimodal.values.plan import Plan
from multimodal.values.timeline import Timeline, TimelineEvent
from multimodal.values.validate import validate_plan


@dataclass(frozen=True)
class SessionOptions:
    """Everything that a session is built from besides the plan; the same on every rank, and under every plan."""

    graph: ModelGraph
    build: BuildOptions
    vocab_size: int
    """Padded."""
    seed: int = 0
    timeout: timedelta = timedelta(minutes=10)
    optimizer: OptimizerConfig | None = None
    """None: nothing is updated."""
    rates: Mapping[str, UnitRates] = field(default_factory=dict)
    """Unit -> its learning rates and weight decays; by default those of the optimizer."""
    builder: ScheduleRow = BUILDERS["1f1b"]
    passes: Sequence[Pass] = ()
    reduces_by_layer: bool = False
    """True if schedules (`reduce-by-layer`) reduce gradients layer by layer."""
    shards_weights: bool = False
    """True if weights and gradients are sharded, too, over the ranks that hold the same ones (ZeRO-3)."""
    reduces_once: bool = False
    """True if sharded gradients are added up on each rank until the step's last backward reduces them."""
    num_state_copies: int | None = None
    """Copies of the optimizer state that replicas keep, each shared by equally many replicas (`state_copies`), and of sharded
    weights; None: one copy (ZeRO-1), Megatron's if replicas are alike; in float64 one on every replica."""
    build_stage: Callable[..., UnitStage] | None = None
    """Builds a stage in place of a real one (`EmulatedStage`); called with `stage_index` and the arguments of UnitStage."""


class Session:
    """Process groups, stages, gradients, optimizers, schedules and the executor of one rank under the current plan.

    torch.distributed must be initialised. Construction, every method and `change_plan` are collective over all ranks.
    """

    plan: Plan
    memberships: Mapping[str, Membership]
    stages: Mapping[tuple[str, int], UnitStage]
    """(unit, virtual stage) -> module."""
    gradients: Mapping[str, UnitGradients]
    optimizers: Mapping[OptimizerKey, MegatronOptimizer]
    executor: Executor

    def __init__(self, options: SessionOptions, *, plan: Plan) -> None:
        """Build this rank's part, newly initialised; raises PlanError if plan, model and ranks do not fit."""
        self.options = options
        self.enter(plan)

    @property
    def graph(self) -> ModelGraph:
        """The model."""
        return self.options.graph

    @property
    def state(self) -> TrainedState:
        """This rank's trained part of the model."""
        return TrainedState(self.stages, self.gradients, self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, as a scheduler asks for them; empty on a rank that trains nothing."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def schedules(self, *, forward_only: bool = False) -> ScheduleCache:
        """The schedules of the current plan, for training steps or for evaluations."""
        if forward_only not in self._schedules:
            builder, passes = self.options.builder, tuple(self.options.passes)
            self._schedules[forward_only] = ScheduleCache(self.graph, self.plan, builder, passes, forward_only)
        return self._schedules[forward_only]

    def change_plan(self, plan: Plan, *, options: SessionOptions | None = None) -> None:
        """Continue under another plan, with the same weights and optimizer state; between two steps.

        options: with other schedules, or other build options, for layers of the same implementation. If it raises PlanError
        because plan, model and ranks do not fit, nothing has changed. Objects made for the old plan elsewhere are invalid
        afterwards. Until the new plan's part is built, the state is in host memory, so a device never holds it twice.
        """
        self._check_plan(plan)
        self.complete_parameters()
        held = hold_state(self.state)
        self.close()
        self.options = options or self.options
        self._build(plan)
        take_over(held, self.state)

    def close(self) -> None:
        """Destroy this rank's part, and its process groups."""
        dist.barrier()
        self._drop()
        self._channel.close()
        self._groups.close()

    def abandon(self) -> None:
        """Destroy this rank's part without the others, which may be lost; `enter` follows, in a new world of ranks."""
        self._drop("_groups", "_channel")

    def enter(self, plan: Plan) -> None:
        """Build this rank's part of a plan, newly initialised, in a new world of ranks; collective. Raises PlanError."""
        self._check_plan(plan)
        self._build(plan)

    def _drop(self, *names: str) -> None:
        self.stages, self.gradients, self.optimizers = {}, {}, {}
        for name in ("executor", "memberships", *names):  # missing if building was interrupted
            self.__dict__.pop(name, None)
        gc.collect()  # hooks and buffers refer to each other

    def forward_backward(self, step: Step) -> StepResult:
        """Run a step's schedule; after `finish_gradients`, gradients are those of its global batch."""
        return self.start(step)()

    def start(self, step: Step) -> Callable[[], StepResult]:
        """Do the same, and let a device go on with it: what is returned waits for the results."""
        self.zero_gradients()
        if not step.cuts.gathers_parameters:
            self.complete_parameters()
        return self.executor.start(step)

    def take_expert_losses(self) -> float:
        """Return this rank's share of the loss that balances experts, summed over layers and tokens since the last call."""
        modules = (module for stage in self.stages.values() for module in stage.modules())
        return sum(module.take_losses() for module in modules if isinstance(module, ExpertMLP))

    def zero_gradients(self) -> None:
        """Forget the gradients of the last step."""
        for unit in self.gradients.values():
            unit.zero()
        for optimizer in self.optimizers.values():
            # In an unsharded optimizer `grad` is the gradient buffer itself: if it stayed, a backward would add it twice.
            optimizer.zero_grad()

    def finish_gradients(self) -> None:
        """Make the reductions that follow the schedule's own, in one order on every rank."""
        for unit in self.gradients.values():
            unit.sum_shared_embeddings()

    def complete_parameters(self) -> None:
        """Gather the parameters that a sharded optimizer updated and no schedule has gathered since."""
        for unit in self.gradients.values():
            unit.complete_parameters()

    def reload_optimizers(self) -> None:
        """Let optimizers go on from the weights that were loaded."""
        for optimizer in self.optimizers.values():
            optimizer.reload_model_params()

    def describe_groups(self, *, step: float, is_expert: bool, rates: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return parameter groups as Megatron's optimizers have them, without parameters; rates: replace the options'."""
        assert self.options.optimizer is not None, "there are no optimizers"
        return describe_groups(replace(self.options.optimizer, **rates), step=step, is_expert=is_expert)

    def gather_timeline(self, events: tuple[TimelineEvent, ...]) -> Timeline | None:
        """Return the measured timeline of all ranks' last step on rank 0, None elsewhere; collective. events: of this rank."""
        origin_seconds = self.executor.clock.origin_seconds
        return gather_timeline(events, origin_seconds=origin_seconds, plan=self.plan, rank=dist.get_rank())

    def gradient_norm(self) -> Tensor:
        """Return the global norm [1] of the gradients, ready for the step; once one rank knows it, all have all gradients."""
        for optimizer in self.optimizers.values():
            optimizer.prepare_grads()
        counted = []
        for key, optimizer in self.optimizers.items():
            member = self.memberships[key.unit]
            is_first = member.is_first_expert_holder if key.steps_experts else member.is_first_holder
            counted.append((optimizer, optimizer.config.use_distributed_optimizer or is_first))
        return global_gradient_norm(counted, device=platform.device())

    def step_optimizers(self, norm: Tensor, *, gathers_later: bool) -> None:
        """Clip by the global norm [1] and step; needs no other rank if updated parameters are gathered later."""
        for key, optimizer in self.optimizers.items():
            if optimizer.config.clip_grad > 0:
                clip_gradients(optimizer.get_parameters(), norm=norm, max_norm=optimizer.config.clip_grad)
            with self.gradients[key.unit].updating(gathers_later=gathers_later):
                optimizer.step_with_ready_grads()

    def _check_plan(self, plan: Plan) -> None:
        validate_plan(plan, graph=self.graph, world_size=dist.get_world_size())
        check_vocabulary(self.options.vocab_size, graph=self.graph, plan=plan)
        for name, unit in plan.units.items() if self.options.shards_weights else ():
            if unit.is_unlike or unit.expert_parallel_size > 1:
                raise PlanError(
                    f"unit '{name}': replicas that share weights must hold the same ones, and these differ in their stages or "
                    "experts; give all the same stages and expert parallel size 1, or do not share weights"
                )

    def _build(self, plan: Plan) -> None:
        rank, options, device = dist.get_rank(), self.options, platform.device()
        self.plan = plan
        self._schedules: dict[bool, ScheduleCache] = {}
        self._groups = GroupBook(rank=rank, timeout=options.timeout)
        copies, shares = options.num_state_copies, options.shards_weights
        self.memberships = build_memberships(self.graph, plan, book=self._groups, num_state_copies=copies, shares_weights=shares)
        if (rows := options.build.buffer_rows) is not None:
            llm, size = self.graph.backbone, max(plan.units[self.graph.backbone.name].tensor_sizes)
            rows = rows if llm.name in self.memberships else size  # others only take part
            dtype = options.build.params_dtype
            open_user_buffers(rows, llm.transformer.hidden_size, tensor_parallel_size=size, dtype=dtype)
        self.stages = dict(_build_stages(options, plan=plan, memberships=self.memberships))
        self.gradients = {name: self._build_gradients(member) for name, member in self.memberships.items()}
        self.optimizers = {}
        if options.optimizer is not None:
            for name, gradients in self.gradients.items():
                rates = options.rates.get(name)
                self.optimizers |= build_unit_optimizers(gradients, config=options.optimizer, rates=rates)
        partners = message_partners(self.graph, plan, rank=rank)
        self._channel = MessageChannel(tracks=partners, timeout=options.timeout)
        if device.type == "cuda":
            self._channel.connect(partners, device=device)
        self.executor = Executor(
            graph=self.graph,
            plan=plan,
            rank=rank,
            stages=self.stages,
            groups={name: member.groups for name, member in self.memberships.items()},
            broker=Broker(rank=rank, channel=self._channel, device=device, dtype=options.build.params_dtype),
            device=device,
            gradients=self.gradients,
        )

    def _build_gradients(self, member: Membership) -> UnitGradients:
        own = {index: module for (unit, index), module in self.stages.items() if unit == member.unit}
        unit, is_double = self.plan.units[member.unit], self.options.build.params_dtype == torch.float64
        copies, shares = self.options.num_state_copies, None
        if self.options.shards_weights and member.groups.dp_cp.size() > 1:
            once, book = self.options.reduces_once, self._groups
            return ShardedUnit(own, graph=self.graph, membership=member, book=book, num_copies=copies or 1, reduces_once=once)
        if member.is_unlike or copies is not None:
            copies = copies or (EVERY_REPLICA if is_double else 1)
            shares = StateShares(own, membership=member, unit=unit, book=self._groups, num_copies=copies)
        if member.is_unlike:
            assert shares is not None
            return UnlikeGradients(own, membership=member, unit=unit, book=self._groups, shares=shares)
        is_sharded, by_layer = shares is None and not is_double, self.options.reduces_by_layer
        return UnitGradients(own, membership=member, is_sharded=is_sharded, reduces_by_layer=by_layer, shares=shares)


def _build_stages(
    options: SessionOptions, *, plan: Plan, memberships: Mapping[str, Membership]
) -> Iterator[tuple[tuple[str, int], UnitStage]]:
    for name, member in memberships.items():
        for stage in plan.units[name].replicas[member.replica_index].virtual_stages:
            if stage.stage_index != member.stage_index:
                continue
            parts = {"graph": options.graph, "unit_name": name, "layers": stage.layers, "groups": member.groups}
            parts |= {"options": options.build, "vocab_size": options.vocab_size}
            if options.build_stage is not None:
                yield (name, stage.index), options.build_stage(stage_index=stage.index, **parts)
                continue
            built = UnitStage(**parts)
            initialize_parameters(built, seed=options.seed)
            yield (name, stage.index), built


def check_vocabulary(vocab_size: int, *, graph: ModelGraph, plan: Plan) -> None:
    """Raise PlanError if the padded vocabulary cannot be split over the LLM's tensor parallel ranks."""
    tensor_parallel_size = math.lcm(*plan.units[graph.backbone.name].tensor_sizes)
    if vocab_size % tensor_parallel_size:
        raise PlanError(
            f"the padded vocabulary of {vocab_size} is not divisible by the LLM's tensor parallel size {tensor_parallel_size}; "
            f"set --make-vocab-size-divisible-by to a multiple of {tensor_parallel_size}"
        )
