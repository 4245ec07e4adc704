"""Lets a loop's model of several modules run one of them: LLaVAModel's encoder or language model, or a module of MimoModel."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch.nn import Module

from megatron.runtime.drop_in.pipeline_schedule import LoopModule
from multimodal.values.errors import ConfigError
from multimodal.values.plan import UnitPlan

LANGUAGE = "language"
"""MIMO's name of the module that computes the loss."""


def unwrapped(model: Any) -> Any:
    """Return a model without what Megatron wraps it in."""
    while hasattr(model, "module"):
        model = model.module
    return model


def is_mimo(model: Module) -> bool:
    """Return True if a model names the modules of its inputs and outputs (MimoModel, since megatron-core 0.17)."""
    return hasattr(unwrapped(model), "role")


def modules_of_plan(units: Mapping[str, UnitPlan], model: Module) -> tuple[LoopModule, ...]:
    """Return the plan's units as modules of a loop's model, the LLM last; empty if the model runs them as one, as Megatron does.

    That is so if it is no LLaVAModel or MimoModel, if every rank has all of it, and on the LLM's ranks with unlike replicas or
    context parallelism. Raises ConfigError for units that it cannot have.
    """
    if not units:
        return ()
    *encoders, llm = (
        LoopModule(name, tuple(tuple(each.ranks for each in replica.stages) for replica in unit.replicas))
        for name, unit in units.items()
    )
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
