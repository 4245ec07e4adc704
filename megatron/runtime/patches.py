"""Installs the drop-in in Megatron: the function that gives training loops their schedule, and the process groups of a plan."""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn import Module

from megatron.runtime import platform
from megatron.runtime.drop_in.balanced_data import Length, count_numbers
from megatron.runtime.drop_in.forward_backward import ForwardBackward
from megatron.runtime.drop_in.unit_groups import UnitGroups
from multimodal.balance import BALANCERS, UNBALANCED
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import ConfigError, ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.validate import validate_plan

_CHOICE, _PIPELINE = "get_forward_backward_func", "forward_backward_pipelining_without_interleaving"
"""Functions that loops import by name: most the first; Megatron-Bridge's of MegatronMIMO calls the second itself."""
_ORIGINALS: dict[str, Callable[..., Any]] = {name: getattr(schedules, name) for name in (_CHOICE, _PIPELINE)}
_installed = _ORIGINALS
_groups: UnitGroups | None = None


def apply(
    *,
    schedule: str = "1f1b",
    model: ModelGraph | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    balance: str = UNBALANCED,
    length: Length | None = None,
) -> dict[str, ProcessGroupCollection]:
    """Make megatron-core's `get_forward_backward_func` return Braid's executor, for loops written for Megatron.

    The name, and that of the function for pipelines which some loops call directly, is replaced in megatron-core and in every
    module that has imported it so far. Applying again changes the schedule for all later calls. On a machine without CUDA the
    replacements of `platform` are installed, too.

    schedule: a name in `BUILDERS`, with or without parameters, whose forwards are whole.
    model, plan: values or their files. With them, Megatron's `parallel_state` is set up for the plan (collective over the
        world), in place of `initialize_model_parallel`: it answers with the groups of the backbone on its ranks, elsewhere with
        those of the first unit that the rank is in, and with those of any of its units within `unit`.
    balance: `whole-sample` deals each step's microbatches anew over data parallel replicas, whole, so that their lengths add up
        to as much on each; every replica keeps its number of them. `none`: they stay where the loop's iterators give them.
    length: returns how long a microbatch is, from what the loop's data iterator gives; by default the numbers in its tensors.
    Returns a ProcessGroupCollection for each unit of the plan that this rank is in. Raises ConfigError if there is no such
    schedule, if Megatron's groups cannot say what the plan does, or if a plan was applied before and not undone, and PlanError if
    the plan does not fit model and ranks. What the loop's model and config do not allow is refused in the first step.
    """
    global _groups
    try:
        BUILDERS[schedule]
    except ScheduleError as problem:
        raise ConfigError(f"patches.apply(schedule=...): {problem}") from None
    if balance not in (possible := [UNBALANCED, *(name for name, row in BALANCERS.items() if row.serves_loops)]):
        raise ConfigError(
            f"patches.apply(balance={balance!r}): a loop's microbatches move whole, from one replica to another; give one of "
            f"{', '.join(possible)}, or train with pretrain_mllm.py --balance"
        )
    if (model is None) != (plan is None):
        raise ConfigError("patches.apply needs model and plan together: a plan says where the units of a model are; give both")
    if plan is not None and _groups is not None:
        raise ConfigError("patches.apply(plan=...): a plan is applied already, and plans do not nest; call patches.undo() first")
    platform.install()
    measure = None if balance == UNBALANCED else length or count_numbers
    signature = inspect.signature(_ORIGINALS[_CHOICE])

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return Braid's function, which works for all sizes: it reads them from the process groups and its model."""
        signature.bind(*args, **kwargs)
        return function

    get_forward_backward_func.__signature__ = signature  # type: ignore[attr-defined]
    if plan is not None and model is not None:
        graph = model if isinstance(model, ModelGraph) else ModelGraph.from_file(model)
        plan = plan if isinstance(plan, Plan) else Plan.from_file(plan)
        validate_plan(plan, graph=graph, world_size=dist.get_world_size())
        _groups = UnitGroups(plan, first=(graph.backbone.name, *graph.unit_names))
    function = ForwardBackward(schedule=schedule, length=measure, groups=_groups).forward_backward
    _install({_CHOICE: get_forward_backward_func, _PIPELINE: function})
    return {} if _groups is None else _groups.collections


def unit(name: str) -> AbstractContextManager[None]:
    """Return a context in which `parallel_state` has a unit's groups: build its layers in it; ConfigError if there are none."""
    if _groups is None:
        raise ConfigError(f"patches.unit({name!r}): no plan is applied; call patches.apply(model=..., plan=...) first")
    return _groups.within(name)


def copy_weights(model: Module | Sequence[Module]) -> None:
    """Give the LLM's unlike replicas the first one's weights, before the optimizer copies them; collective. model: its chunks."""
    if _groups is not None and _groups.unlike is not None:
        _groups.unlike.copy_weights([model] if isinstance(model, Module) else model)


def undo() -> None:
    """Restore megatron-core's own function, also in modules that imported the name, and its process groups; collective."""
    global _groups
    _install(_ORIGINALS)
    if _groups is not None:
        _groups.close()
        _groups = None


def _install(functions: dict[str, Callable[..., Any]]) -> None:
    global _installed
    for module in list(sys.modules.values()):
        for name, function in functions.items():
            if getattr(module, "__dict__", {}).get(name) is _installed[name]:
                setattr(module, name, function)
    _installed = functions
