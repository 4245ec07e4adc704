"""Builds what one rank needs to run steps: its stages, gradient buffers, broker and executor."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch

from megatron.runtime import platform
from megatron.runtime.communication.broker import Broker
from megatron.runtime.communication.message_channel import MessageChannel
from megatron.runtime.communication.units import Membership, build_memberships
from megatron.runtime.emulation.emulated_stage import EmulatedStage, Seconds
from megatron.runtime.execution.executor import Executor
from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.gradients.sharded_unit import ShardedUnit
from multimodal.model.initialization import initialize_parameters
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.unit_stage import UnitStage
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, validate_plan


@dataclass(frozen=True)
class RankRuntime:
    """Everything of one rank that outlives a step."""

    memberships: Mapping[str, Membership]
    stages: Mapping[tuple[str, int], UnitStage]
    """(unit, virtual stage) -> module."""
    gradients: Mapping[str, UnitGradients | ShardedUnit]
    executor: Executor

    def zero_gradients(self) -> None:
        """Forget the gradients of the last step."""
        for unit in self.gradients.values():
            unit.zero()

    def finish_gradients(self) -> None:
        """What follows the schedule's own reductions, in one order on every rank."""
        for unit in self.gradients.values():
            unit.sum_shared_embeddings()

    def complete_parameters(self) -> None:
        """Gather what a sharded optimizer updated and no schedule has gathered since; collective."""
        for unit in self.gradients.values():
            unit.complete_parameters()


def assemble(
    graph: ModelGraph,
    plan: Plan,
    *,
    rank: int,
    world_size: int,
    options: BuildOptions,
    vocab_size: int,
    seed: int,
    timeout: timedelta,
    seconds: Seconds | None = None,
    shards_weights: bool = False,
    reduces_by_layer: bool = False,
) -> RankRuntime:
    """Build this rank's part; torch.distributed must be initialised.

    vocab_size: padded, divisible by the LLM's tensor parallel size; seconds: wait so long instead of computing (emulation);
    shards_weights: share weights and gradients, too, among the ranks that hold the same ones, not only optimizer state;
    reduces_by_layer: have schedules (`reduce-by-layer`) that reduce gradients layer by layer.
    Raises PlanError when plan, model and ranks do not fit.
    """
    validate_plan(plan, graph=graph, world_size=world_size)
    memberships = build_memberships(plan, rank=rank, timeout=timeout)
    stages: dict[tuple[str, int], UnitStage] = {}
    for name, member in memberships.items():
        for stage in plan.units[name].replicas[member.replica_index].virtual_stages:
            if stage.stage_index == member.stage_index:
                built = {
                    "graph": graph,
                    "unit_name": name,
                    "layers": stage.layers,
                    "groups": member.groups,
                    "options": options,
                    "vocab_size": vocab_size,
                }
                if seconds is not None:
                    stages[name, stage.index] = EmulatedStage(**built, seconds=seconds, stage_index=stage.index)
                    continue
                stages[name, stage.index] = UnitStage(**built)
                initialize_parameters(stages[name, stage.index], seed=seed)
    gradients: dict[str, UnitGradients | ShardedUnit] = {}
    for name, member in memberships.items():
        own = {index: module for (unit, index), module in stages.items() if unit == name}
        if shards_weights and member.groups.dp_cp.size() > 1:
            gradients[name] = ShardedUnit(own, graph=graph, membership=member)
        else:
            is_sharded = options.precision.params_dtype != torch.float64
            gradients[name] = UnitGradients(own, membership=member, is_sharded=is_sharded, reduces_by_layer=reduces_by_layer)
    device = platform.device()
    channel = MessageChannel(rank=rank, world_size=world_size, timeout=timeout)
    if device.type == "cuda":
        channel.connect(message_pairs(graph, plan), device=device)
    executor = Executor(
        graph=graph,
        plan=plan,
        rank=rank,
        stages=stages,
        groups={name: member.groups for name, member in memberships.items()},
        broker=Broker(rank=rank, channel=channel, device=device, dtype=options.precision.params_dtype),
        device=device,
        reduce_gradients=lambda unit, stage: gradients[unit].start_reduction(stage),
        gather_parameters=lambda unit, stage: gradients[unit].start_gathering(stage),
        expect_last_backward=lambda unit, stage: gradients[unit].expect_last_backward(stage),
        sharded={
            (name, index): stage
            for name, unit in gradients.items()
            if isinstance(unit, ShardedUnit)
            for index, stage in unit.sharded.items()
        },
    )
    return RankRuntime(memberships, stages, gradients, executor)


def message_pairs(graph: ModelGraph, plan: Plan) -> set[tuple[int, int]]:
    """All (source, target) rank pairs that may ever exchange a message, in either direction."""
    pairs: set[tuple[int, int]] = set()
    for name, unit in plan.units.items():
        for replica in unit.replicas:
            for first, second in zip(replica.virtual_stages, replica.virtual_stages[1:], strict=False):
                pairs |= set(zip(first.ranks, second.ranks, strict=True))
            for target in graph.downstream(name):
                for other in plan.units[target].replicas:
                    ends = replica.virtual_stages[-1].ranks, other.virtual_stages[0].ranks
                    pairs |= {(source, sink) for source in ends[0] for sink in ends[1]}
    return {pair for source, target in pairs for pair in ((source, target), (target, source)) if source != target}
