"""Lets Megatron's own training loop count, save and clip all units of a plan, while one with units apart is applied."""

import math
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron.runtime import platform
from multimodal.values.errors import ConfigError


class TrainingLoop:
    """Megatron's arguments, random states and optimizer, replaced until `close`."""

    def __init__(self, unit: str, units: Sequence[str], *, num_ranks: int, groups: Collection[Any]) -> None:
        """unit: this rank's, of those from which a rank takes its model, the LLM first; num_ranks: of the LLM.

        groups: those of the plan; an optimizer over others is left as it is.
        """
        self._unit, self._units, self._num_ranks, self._groups = unit, units, num_ranks, groups
        self._replaced: list[tuple[Any, str, Any]] = []
        self._replace(sys.modules.get("megatron.training.arguments"), "parse_args", self._parse)
        if len(units) > 1:
            self._replace(sys.modules.get("megatron.training.checkpointing"), "get_rng_state", self._read_random_state)
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
        found.world_size = self._num_ranks
        return found

    def _read_random_state(self, read: Callable[..., Any], *words: Any, key_prefix: str = "", **options: Any) -> Any:
        """Return random states that have a name for each unit."""
        own = "" if self._unit == self._units[0] else f"{self._unit}."
        return read(*words, key_prefix=key_prefix or own, **options)

    def _prepare_gradients(self, prepare: Callable[..., Any], optimizer: Any) -> bool:
        """Return True if any unit's gradients have an infinity: all or none of them update their weights."""
        found = prepare(optimizer)
        return max(self._of_units(found)) > 0 if self._is_of_plan(optimizer) else found

    def _gradient_norm(self, measure: Callable[..., Any], optimizer: Any) -> float:
        """Return the norm of all units' gradients together."""
        found = measure(optimizer)
        return math.hypot(*self._of_units(found)) if self._is_of_plan(optimizer) else found

    def _is_of_plan(self, optimizer: Any) -> bool:
        return optimizer.chained_optimizers[0].get_grad_stats_parallel_group() in self._groups

    def _of_units(self, value: Any) -> list[float]:
        """Return what the ranks of each unit found; collective over the world."""
        found = torch.zeros(len(self._units), dtype=torch.float32, device=platform.device())
        found[self._units.index(self._unit)] = float(value)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()
