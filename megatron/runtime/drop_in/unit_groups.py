"""Megatron's global process groups for each unit of a plan, by its own `initialize_model_parallel`; its loop, for all units."""

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.runtime import platform
from megatron.runtime.drop_in.unlike_replicas import UnlikeReplicas
from multimodal.values.errors import ConfigError
from multimodal.values.plan import Plan, UnitPlan

_STATE = re.compile(r"_[A-Z][A-Z0-9_]*|_global_process_group_list")
"""Names of the globals that parallel_state keeps."""


class UnitGroups:
    """Megatron's `parallel_state` for each of this rank's units; collective over the world."""

    def __init__(self, plan: Plan, *, first: Sequence[str]) -> None:
        """first: units in order of preference for parallel_state, the LLM first. Raises ConfigError for a plan beyond them."""
        check_plan(plan)
        self._before = _read(parallel_state)
        self._made: list[dist.ProcessGroup] = []
        self._states: dict[str, dict[str, Any]] = {}
        self.units = {name: plan.units[name] for name in sorted(plan.units, key=lambda name: name == first[0])}
        """Units of the plan, the LLM last."""
        self.unlike: UnlikeReplicas | None = None
        """The LLM's replicas, if they are not alike."""
        for name, unit in plan.units.items():
            alone = (replace(unit, replicas=(replica,), microbatch_shares=()) for replica in unit.replicas)
            parts = tuple(alone) if unit.is_unlike else (unit,)
            for index, part in enumerate(parts):
                ranks, state = megatron_order(part), self._initialize(part)
                if dist.get_rank() in ranks:
                    if len(parts) > 1:
                        state |= {"_MPU_DATA_PARALLEL_RANK": index, "_MPU_DATA_PARALLEL_WORLD_SIZE": len(parts)}
                    self._states[name] = {key: _map_ranks(of, ranks) if "_RANKS" in key else of for key, of in state.items()}
            if len(parts) > 1 and name == first[0]:
                self.unlike = UnlikeReplicas(unit, _UnitDistributed(range(dist.get_world_size()), self._made).new_group)
        self.collections: dict[str, ProcessGroupCollection] = {}
        for name in self._states:
            with self.within(name):
                self.collections[name] = ProcessGroupCollection.use_mpu_process_groups()
        units = [next(name for name in first if rank in plan.units[name].ranks) for rank in range(dist.get_world_size())]
        vars(parallel_state).update(self._states[units[dist.get_rank()]])
        named = sorted({*units}, key=[*first].index)
        self._loop = TrainingLoop(units[dist.get_rank()], named, llm=plan.units[first[0]], groups=self._made)

    @contextmanager
    def within(self, unit: str) -> Iterator[None]:
        """Let parallel_state answer with a unit's groups."""
        if unit not in self._states:
            raise ConfigError(f"rank {dist.get_rank()} has nothing of unit '{unit}'; its units are {', '.join(self._states)}")
        outer = _read(parallel_state)
        vars(parallel_state).update(self._states[unit])
        try:
            yield
        finally:
            vars(parallel_state).update(outer)

    def close(self) -> None:
        """Give parallel_state, and Megatron's training loop, back what they were before, and destroy the groups."""
        vars(parallel_state).update(self._before)
        self._loop.close()
        for group in self._made:
            if group in dist.distributed_c10d._world.pg_map:  # destroy_model_parallel, if the loop called it, destroyed some
                dist.destroy_process_group(group)

    def _initialize(self, unit: UnitPlan) -> dict[str, Any]:
        """Return the globals of a copy of parallel_state in which nothing was initialized before, on the unit's ranks."""
        spec, stages = parallel_state.__spec__, unit.replicas[0].stages
        assert spec is not None and spec.loader is not None
        state = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(state)
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


def _read(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _STATE.fullmatch(name)}


def _map_ranks(value: Any, ranks: Sequence[int]) -> Any:
    """Replace positions in a unit by global ranks, in lists of any depth."""
    return [_map_ranks(each, ranks) for each in value] if isinstance(value, list) else ranks[value] if value is not None else None


class TrainingLoop:
    """Megatron's arguments, random states and optimizer, replaced until `close`."""

    def __init__(self, unit: str, units: Sequence[str], *, llm: UnitPlan, groups: Collection[Any]) -> None:
        """unit: this rank's, of those from which a rank takes its model, the LLM first; llm: the plan of that.

        groups: those of the plan; an optimizer over others is left as it is.
        """
        self._unit, self._units, self._llm, self._groups = unit, units, llm, groups
        self._replaced: list[tuple[Any, str, Any]] = []
        self._replace(sys.modules.get("megatron.training.arguments"), "parse_args", self._parse)
        if len(units) > 1:
            self._replace(sys.modules.get("megatron.training.checkpointing"), "get_rng_state", self._read_random_state)
            training = sys.modules.get("megatron.training.training")
            self._replace(training, "build_train_valid_test_data_iterators", self._open_data)
            self._replace(ChainedOptimizer, "prepare_grads", self._prepare_gradients)
            self._replace(ChainedOptimizer, "get_grad_norm", self._gradient_norm)

    def close(self) -> None:
        """Give Megatron its own back."""
        for owner, name, before in self._replaced:
            setattr(owner, name, before)

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """owner: a module or class; None: it is not loaded, and so has nobody who uses it."""
        if owner is not None:
            before = getattr(owner, name)
            self._replaced.append((owner, name, before))
            setattr(owner, name, lambda *words, **options: replacement(before, *words, **options))

    def _parse(self, parse: Callable[..., Any], *words: Any, **options: Any) -> Any:
        """Return Megatron's arguments, which count replicas by the ranks of the LLM alone."""
        found = parse(*words, **options)
        if len(self._units) > 1 and (found.save or found.load) and found.ckpt_format != "torch_dist":
            raise ConfigError(
                f"--ckpt-format {found.ckpt_format} names files by ranks of one grid, so that units on ranks of their own would "
                "overwrite each other's; give --ckpt-format torch_dist"
            )
        found.world_size = len({*self._llm.ranks})
        return found

    def _open_data(self, build: Callable[..., Any], *words: Any, **options: Any) -> Any:
        """Return data iterators. Each rank of the LLM opens some for every chunk, and all ranks must be there."""
        num_chunks = len(self._llm.replicas[0].stages[0].layer_ranges)
        found = [build(*words, **options) for _ in range(1 if self._unit == self._units[0] else num_chunks)]
        return found[0]

    def _read_random_state(self, read: Callable[..., Any], *words: Any, key_prefix: str = "", **options: Any) -> Any:
        return read(*words, key_prefix=key_prefix or ("" if self._unit == self._units[0] else f"{self._unit}."), **options)

    def _prepare_gradients(self, prepare: Callable[..., Any], optimizer: Any) -> bool:
        """Return True if any unit's gradients have an infinity: all or none of them update their weights."""
        return max(self._of_units(optimizer, prepare(optimizer))) > 0

    def _gradient_norm(self, measure: Callable[..., Any], optimizer: Any) -> float:
        return math.hypot(*self._of_units(optimizer, measure(optimizer)))

    def _of_units(self, optimizer: Any, value: Any) -> list[float]:
        """Return what each unit found (collective over the world); this value alone if the groups are not the plan's."""
        if optimizer.chained_optimizers[0].get_grad_stats_parallel_group() not in self._groups:
            return [float(value)]
        found = torch.zeros(len(self._units), dtype=torch.float32, device=platform.device())
        found[self._units.index(self._unit)] = float(value)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()
