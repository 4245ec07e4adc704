"""Megatron's global process groups for each unit of a plan: its own `initialize_model_parallel`, run on the unit's ranks."""

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.runtime.drop_in.training_loop import TrainingLoop
from megatron.runtime.drop_in.unlike_replicas import UnlikeReplicas
from multimodal.values.errors import ConfigError
from multimodal.values.plan import Plan, UnitPlan

_STATE = re.compile(r"_[A-Z][A-Z0-9_]*|_global_process_group_list")
"""Names of the globals that parallel_state keeps."""


class UnitGroups:
    """Megatron's `parallel_state` for each of this rank's units; collective over the world."""

    def __init__(self, plan: Plan, *, first: Sequence[str]) -> None:
        """Make all groups. first: units in the order in which parallel_state is left with one of them.

        Raises ConfigError if Megatron's groups cannot say what the plan does.
        """
        check_plan(plan)
        self._before = _read(parallel_state)
        self._made: list[dist.ProcessGroup] = []
        self._states: dict[str, dict[str, Any]] = {}
        self.unlike: dict[str, UnlikeReplicas] = {}
        """Of units whose replicas are not alike."""
        for name, unit in plan.units.items():
            parts = _alike_parts(unit)
            for index, part in enumerate(parts):
                ranks, state = megatron_order(part), self._initialize(part)
                if dist.get_rank() in ranks:
                    if len(parts) > 1:
                        state |= {"_MPU_DATA_PARALLEL_RANK": index, "_MPU_DATA_PARALLEL_WORLD_SIZE": len(parts)}
                    self._states[name] = {key: _map_ranks(of, ranks) if "_RANKS" in key else of for key, of in state.items()}
            if len(parts) > 1:
                self.unlike[name] = UnlikeReplicas(unit, _UnitDistributed(range(dist.get_world_size()), self._made).new_group)
        self.collections: dict[str, ProcessGroupCollection] = {}
        for name in self._states:
            with self.within(name):
                self.collections[name] = ProcessGroupCollection.use_mpu_process_groups()
        units = [next(name for name in first if rank in plan.units[name].ranks) for rank in range(dist.get_world_size())]
        _write(self._states[units[dist.get_rank()]])
        named = sorted({*units}, key=[*first].index)
        num_ranks = len({*plan.units[first[0]].ranks})
        self._loop = TrainingLoop(units[dist.get_rank()], named, num_ranks=num_ranks, groups=self._made)

    @contextmanager
    def within(self, unit: str) -> Iterator[None]:
        """Let parallel_state answer with a unit's groups."""
        if unit not in self._states:
            raise ConfigError(f"rank {dist.get_rank()} has nothing of unit '{unit}'; its units are {', '.join(self._states)}")
        outer = _read(parallel_state)
        _write(self._states[unit])
        try:
            yield
        finally:
            _write(outer)

    def close(self) -> None:
        """Give parallel_state, and Megatron's training loop, back what they were before, and destroy the groups."""
        _write(self._before)
        self._loop.close()
        for group in self._made:
            if group in dist.distributed_c10d._world.pg_map:  # destroy_model_parallel, if the loop called it, destroyed some
                dist.destroy_process_group(group)

    def _initialize(self, unit: UnitPlan) -> dict[str, Any]:
        """Return the globals of a fresh parallel_state on the unit's ranks."""
        state, stages = _fresh_parallel_state(), unit.replicas[0].stages
        distributed = _UnitDistributed(megatron_order(unit), self._made)
        state.torch = SimpleNamespace(**{**vars(torch), "distributed": distributed})  # type: ignore[attr-defined]
        num_chunks = len(stages[0].layer_ranges)
        state.initialize_model_parallel(
            tensor_model_parallel_size=unit.tensor_size(stages[0]),
            context_parallel_size=unit.context_parallel_size,
            pipeline_model_parallel_size=len(stages),
            virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
            expert_model_parallel_size=unit.expert_parallel_size,
        )
        return _read(state)


def megatron_order(unit: UnitPlan) -> tuple[int, ...]:
    """Return a unit's ranks in Megatron's order: tensor, context, data and pipeline parallel, the fastest first."""
    stages = range(len(unit.replicas[0].stages))
    return tuple(rank for stage in stages for replica in unit.replicas for rank in replica.stages[stage].ranks)


def _alike_parts(unit: UnitPlan) -> tuple[UnitPlan, ...]:
    """Return the unit, or each of its replicas by itself if they are not alike."""
    if not unit.is_unlike:
        return (unit,)
    return tuple(replace(unit, replicas=(replica,), microbatch_shares=()) for replica in unit.replicas)


def check_plan(plan: Plan) -> None:
    """Raise ConfigError for a plan that Megatron's groups cannot express."""
    for name, unit in plan.units.items():
        if len(unit.tensor_sizes) > 1:
            raise ConfigError(
                f"patches.apply(plan=...): stages of unit '{name}' have tensor parallel sizes {unit.tensor_sizes}, but "
                "Megatron's layers hold whole parts of one size; give all stages one size, or train with pretrain_mllm.py"
            )
        for replica in unit.replicas:
            order, num_stages = [stage.stage_index for stage in replica.virtual_stages], len(replica.stages)
            if order != [*range(num_stages)] * (len(order) // num_stages) or (num_stages == 1 and len(order) > 1):
                raise ConfigError(
                    f"patches.apply(plan=...): unit '{name}' has layers {unit.describe_ranges()}, but chunk c of Megatron's "
                    "pipeline rank r comes c x pp + r-th, with several chunks only where there are several stages; deal the "
                    "layers so"
                )


class _UnitDistributed:
    """torch.distributed as a world of the unit's ranks, numbered in Megatron's order; other ranks only help to make groups."""

    def __init__(self, ranks: Sequence[int], made: list[dist.ProcessGroup]) -> None:
        self._ranks, self._made = ranks, made

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_world_size(self) -> int:
        return len(self._ranks)

    def get_rank(self) -> int:
        return self._ranks.index(dist.get_rank()) if dist.get_rank() in self._ranks else -1

    def new_group(self, ranks: Sequence[int], **options: Any) -> Any:
        group = dist.new_group([self._ranks[rank] for rank in ranks], **options)
        if isinstance(group, dist.ProcessGroup):
            self._made.append(group)
        return group


def _fresh_parallel_state() -> ModuleType:
    """Return a copy of the module in which nothing was initialized."""
    spec = parallel_state.__spec__
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _STATE.fullmatch(name)}


def _write(state: Mapping[str, Any]) -> None:
    vars(parallel_state).update(state)


def _map_ranks(value: Any, ranks: Sequence[int]) -> Any:
    """Replace positions in a unit by global ranks, in lists of any depth."""
    return [_map_ranks(each, ranks) for each in value] if isinstance(value, list) else ranks[value] if value is not None else None
