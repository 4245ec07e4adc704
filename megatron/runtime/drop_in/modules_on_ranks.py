"""Modules of a loop's model on ranks of their own, from megatron-core's communicator or a plan, and how one of them is run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import repeat, tee
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn import Module

from megatron.runtime.drop_in.pipeline_schedule import LoopModule
from multimodal.values.errors import ConfigError
from multimodal.values.plan import UnitPlan

LANGUAGE = "language"
"""MIMO's name of the module that computes the loss."""


DataIterator = Iterator[Any] | None


@dataclass(frozen=True)
class LoopInputs:
    """The arguments of the training loop."""

    forward_step_func: Callable[..., Any]
    chunks: Sequence[Module]
    data_iterators: Sequence[DataIterator]
    """One per chunk."""
    config: Any
    collect_non_loss_data: bool
    first_val_step: bool | None
    context_parallel_size: int | None = None
    is_by_module: bool = False
    """True if inputs and outputs of the loop's model come by the names of its modules."""
    split: Callable[[Tensor, str, int], Sequence[Tensor]] | None = None
    """Cuts an output of the module named for so many replicas of the next; None: each output is for one."""
    takes_roles: bool = False
    """True if the loop's model has to be told which of its modules a forward step is to run."""
    module_iterators: Mapping[str, Any] = field(default_factory=dict)
    """Data iterators of modules that do not take theirs from their chunk's."""
    batch_dimension: Callable[[str], int] = lambda _: 0
    """Dimension of a module's outputs along which those of several replicas are put together."""
    tensor_parallel_groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """Those of modules of this rank."""


LoopModules = tuple[tuple[LoopModule, ...], ProcessGroupCollection, LoopInputs]
"""All modules, the LLM last; the groups of this rank's pipeline; and the inputs, with how outputs of modules are taken."""


def unwrapped(model: Any) -> Any:
    """Return a model without what Megatron wraps it in."""
    while hasattr(model, "module"):
        model = model.module
    return model


def is_mimo(model: Module) -> bool:
    """Return True if a model names the modules of its inputs and outputs (MimoModel, since megatron-core 0.17)."""
    return hasattr(unwrapped(model), "role")


def read_modules(communicator: Any, collection: Any, inputs: LoopInputs, units: Mapping[str, UnitPlan]) -> LoopModules:
    """Read megatron-core's communicator between modules. Raises ConfigError for what a schedule, or the plan, cannot honour."""
    if not hasattr(collection, "module_pgs"):
        raise ConfigError("a p2p_communicator between modules needs pg_collection=MultiModuleProcessGroupCollection(...)")
    if not inputs.config.variable_seq_lengths:
        raise ConfigError("modules on ranks of their own send outputs of any size; set variable_seq_lengths=True")
    if len(communicator.rank_module_map) != 1:
        raise ConfigError(
            f"rank {dist.get_rank()} is in the modules {[*communicator.rank_module_map]}; give each module ranks of its own, or "
            "all modules the same ranks and no p2p_communicator"
        )
    grids, links = communicator.module_to_grid_map, communicator.topology
    names = sorted(grids, key=lambda name: not links[name])
    if any(links[name] != [names[-1]] for name in names[:-1]) or links[names[-1]]:
        raise ConfigError(f"the topology of the modules is {links}; let all modules but one send to that one, which has the loss")
    chunks_of_llm = inputs.config.virtual_pipeline_model_parallel_size or 1
    modules = tuple(LoopModule(each, _ranks_of_grid(grids[each]), 1 if links[each] else chunks_of_llm) for each in names)
    if units:
        check_modules(modules, units)
    (name,) = communicator.rank_module_map
    groups = collection[name]
    bridges = {bridge.src_module_name: bridge for bridge in communicator.bridge_comms}
    return (
        modules,
        groups,
        replace(
            inputs,
            context_parallel_size=collection.get_language_model_cp_size() if collection.has_language_model() else None,
            is_by_module=True,
            takes_roles=len(inputs.chunks) > 1,  # MimoModel takes a pipeline rank's place for that of a chunk
            split=lambda output, module, size: bridges[module]._split_tensor_at_batch_dim(output, size),
            batch_dimension=lambda module: bridges[module]._batch_dim if module in bridges else 0,
            tensor_parallel_groups={name: groups.tp},
        ),
    )


def check_modules(modules: Sequence[LoopModule], units: Mapping[str, UnitPlan]) -> None:
    """Raise ConfigError unless every module is on the ranks of the plan's unit of its name, the last one on those of the last."""
    for module in modules:
        name = [*units][-1] if module is modules[-1] else module.name
        planned = name in units and _ranks_of_unit(units[name])
        if planned != module.replicas:
            raise ConfigError(
                f"module '{module.name}' has replicas of stages on ranks {module.replicas}, but unit '{name}' of the applied "
                f"plan {planned or 'is not there'}; give its HyperCommGrid the plan's sizes and ranks, or apply another plan"
            )


def _ranks_of_unit(unit: UnitPlan) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(stage.ranks for stage in replica.stages) for replica in unit.replicas)


def _ranks_of_grid(grid: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the tensor parallel ranks of every pipeline rank of every replica; bridges refuse context parallel ones."""
    sizes = dict(zip(grid.dim_names, grid.shape, strict=True))
    ranks = grid.rank_offset + np.arange(grid.size).reshape(grid.shape[::-1])
    axes = [len(grid.shape) - 1 - grid.dim_names.index(name) for name in ("dp", "pp")]
    placed = np.moveaxis(ranks, axes, (0, 1)).reshape(sizes["dp"], sizes["pp"], -1)
    return tuple(tuple(map(tuple, replica)) for replica in placed.tolist())


def modules_of_plan(units: Mapping[str, UnitPlan], model: Module) -> tuple[LoopModule, ...]:
    """Return the plan's units as modules of a loop's model, the LLM last; raises ConfigError for units that it cannot have.

    Empty if it runs as one: no LLaVAModel or MimoModel, all of it on every rank, or an LLM with unlike replicas or cp.
    """
    if not units:
        return ()
    *encoders, llm = (LoopModule(name, _ranks_of_unit(unit)) for name, unit in units.items())
    inner = unwrapped(model)
    has_modules = is_mimo(inner) or {"add_encoder", "add_decoder"} <= vars(inner).keys()
    is_one = llm.num_stages == 1 and all(each.replicas == llm.replicas for each in encoders)
    if not has_modules or not encoders or is_one:
        return ()
    if any(unit.is_unlike or unit.context_parallel_size > 1 for unit in units.values()):
        ranks_of_llm = {*[*units.values()][-1].ranks}
        if all(ranks_of_llm.issuperset(unit.ranks) for unit in units.values()):
            return ()
        raise ConfigError(
            "patches.apply(plan=...): encoders on ranks of their own need context parallel size 1, and replicas that are "
            "alike; apply another plan"
        )
    num_chunks = len([*units.values()][-1].replicas[0].stages[0].layer_ranges)
    for encoder in encoders:
        ranks = [stage for each in (llm, encoder) for replica in each.replicas for stage in replica]
        if encoder.num_stages > 1 or len(encoder.replicas) % len(llm.replicas):
            raise ConfigError(
                f"patches.apply(plan=...): unit '{encoder.name}' has {len(encoder.replicas)} replicas of {encoder.num_stages} "
                f"stages; give it one stage, and as many replicas as the LLM ({len(llm.replicas)}) or a multiple of that"
            )
        if any(one != other and {*one} & {*other} for one in ranks for other in ranks):
            raise ConfigError(
                f"patches.apply(plan=...): unit '{encoder.name}' shares some ranks of a stage; give it all ranks of an LLM "
                "stage, or ranks of its own"
            )
    return (*encoders, LoopModule(LANGUAGE, llm.replicas, num_chunks))


def run_as_modules(inputs: LoopInputs, modules: tuple[LoopModule, ...], own: Mapping[str, ProcessGroupCollection]) -> LoopModules:
    """Return how the plan's units run as modules of the loop's model. own: this rank's groups, the LLM's last."""
    first = tuple(replica[:1] for replica in modules[-1].replicas)
    if not inputs.config.variable_seq_lengths and any(module.replicas != first for module in modules[:-1]):
        raise ConfigError(
            "encoders on other ranks than the LLM's first stage send outputs of any size; set variable_seq_lengths=True"
        )
    is_by_module = is_mimo(inputs.chunks[0])
    found = replace(
        inputs,
        context_parallel_size=1,
        is_by_module=is_by_module,
        takes_roles=True,
        batch_dimension=lambda module: int(not is_by_module or module == LANGUAGE),
        tensor_parallel_groups={name: each.tp for name, each in own.items()},
    )
    return modules, own.get(LANGUAGE) or next(iter(own.values())), found


def divide_data(inputs: LoopInputs, modules: Sequence[LoopModule], of_modules: Mapping[str, DataIterator]) -> LoopInputs:
    """Let each encoder of this rank read microbatches of its own, or, of an iterator for all, the same as the LLM."""
    encoders = [each for each in modules[:-1] if each.is_here and each.name not in of_modules]
    if modules[-1].is_here and (wrong := [each for each in encoders if len(each.replicas) != len(modules[-1].replicas)]):
        raise ConfigError(
            f"'{wrong[0].name}' and the LLM have unlike numbers of replicas and share ranks, so that their microbatches differ; "
            f"give data_iterator={{'{wrong[0].name}': ..., (the LLM's unit): ...}}"
        )
    first, *rest = inputs.data_iterators
    encoders = encoders if modules[-1].is_here else encoders[1:]
    copies: Sequence[DataIterator] = [first] * (len(encoders) + 1)
    if first is not None and encoders:
        copies = tee(map(next, repeat(first)), len(encoders) + 1)  # Megatron's iterators only have a next
    own, *copies = copies
    found = {**of_modules, **{each.name: copy for each, copy in zip(encoders, copies, strict=True)}}
    return replace(inputs, data_iterators=[own, *rest], module_iterators=found)


@contextmanager
def acting_as(model: Module, module: str, *, is_first: bool, is_last: bool) -> Iterator[None]:
    """Let a model's forward step run one module. is_first, is_last: its stage's place in the module's pipeline."""
    inner, is_llm = unwrapped(model), module == LANGUAGE
    if is_mimo(inner):
        roles = import_module("megatron.core.models.mimo.config.role")  # since megatron-core 0.17
        role = roles.RankRole({module: roles.ModuleStageInfo(is_first, is_last)}, roles.ModuleLayout.NON_COLOCATED)
        # Outputs are not cut here, but MIMO would look up in its grids, which there need not be, whether a bridge could.
        changed = {"role": role, "_attach_modality_split_sizes": lambda *_: None}
    else:
        changed = {"add_encoder": not is_llm, "add_decoder": is_llm}
    before = {name: vars(inner)[name] for name in changed if name in vars(inner)}
    vars(inner).update(changed)
    try:
        yield
    finally:
        for name in changed:
            del vars(inner)[name]
        vars(inner).update(before)
