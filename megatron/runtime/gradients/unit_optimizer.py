"""AdamW over one unit's parameters on this rank: Megatron's DistributedOptimizer (ZeRO-1), or its plain one in float64.

Experts that ranks share have an optimizer of their own, since their replicas are other ranks.

If weights themselves are sharded (ZeRO-3), it is the plain optimizer over this rank's pieces: each element is stepped by the rank
that keeps it. The same holds if replicas keep several copies of the state, or are not alike.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, Adam
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.tensor_parallel.layers import copy_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn import Parameter

from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.gradients.sharded_layer import WeightPiece

AVERAGE = "ema"
"""The name of an average in the state of an optimizer, and in checkpoints."""


_VALUES_AT_ONCE = 2**18
"""Values that a CPU steps at a time, few enough to stay in its cache for all operations on them."""


class AdamInBlocks(Adam):  # type: ignore[misc]
    """AdamW; torch's goes through large parameters block by block on a CPU, with the same results to the bit.

    Nor does it import a compiler, as torch's decorators of these methods do when they are called: half a second of a processor.
    """

    add_param_group = inspect.unwrap(Adam.add_param_group)
    state_dict = inspect.unwrap(Adam.state_dict)
    load_state_dict = inspect.unwrap(Adam.load_state_dict)

    @torch.no_grad()
    def step(self, *arguments: Any, **options: Any) -> Any:
        """Step as torch does."""
        return inspect.unwrap(Adam.step)(self, *arguments, **options)

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill torch's lists: of parameters, gradients, moments, largest moments (which Braid keeps none of), and steps."""
        whole: list[list[Tensor]] = [[] for _ in lists]
        is_complex: bool = super()._init_group(group, *whole)
        for *row, step in zip(*whole[:4], whole[5], strict=True):
            is_cut = all(each.device.type == "cpu" and each.is_contiguous() for each in row)
            blocks = [each.view(-1).split(_VALUES_AT_ONCE) if is_cut else (each,) for each in row]
            for mine, added in zip(lists, blocks, strict=False):
                mine.extend(added)
            lists[5].extend([step, *(step.clone() for _ in blocks[0][1:])])  # torch counts up one for each
        return is_complex


class Rates(NamedTuple):
    """A parameter's highest and lowest learning rate, its weight decay, and its warm-up."""

    lr: float
    min_lr: float
    weight_decay: float
    lr_warmup_steps: int | None = None
    """None: the scheduler's."""
    average_decay: float | None = None
    """Decay of an exponential moving average of the weights, which the optimizer keeps beside its moments; None: no average."""


class UnitRates(NamedTuple):
    """The rates of a unit."""

    module: Rates
    projector: Rates


class OptimizerKey(NamedTuple):
    """The parameters that one optimizer steps: a unit's, with those of shared experts apart."""

    unit: str
    steps_experts: bool = False
    """True for the experts that ranks share, which have other replicas than the rest of the unit; False for all else."""

    @classmethod
    def of(cls, unit: str, parameter: Tensor) -> "OptimizerKey":
        """Return the key of one parameter."""
        return cls(unit, not getattr(parameter, "allreduce", True))


def build_unit_optimizers(
    gradients: UnitGradients, *, config: OptimizerConfig, rates: UnitRates | None = None
) -> Iterator[tuple[OptimizerKey, MegatronOptimizer]]:
    """Yield the optimizers of one unit; none if this rank trains nothing there. rates: None: those of `config`.

    megatron-core's own factory gathers parameter groups over the whole world, which ranks of different units cannot join; so the
    groups are made here, for the module and for a projector with other rates: biases and norms without weight decay, all else
    with it, all of them present on every rank.
    """
    if rates is None:
        rates = UnitRates(*[Rates(config.lr, config.min_lr, config.weight_decay)] * 2)
    unit, tp_group = gradients.membership.unit, gradients.membership.groups.tp
    if (pieces := gradients.pieces) is not None:
        if gradients.is_trained:
            sharded = ShardedOptimizer([piece for piece in pieces if piece.gradient is not None], config=config, rates=rates)
            sharded.tp_group = tp_group
            yield OptimizerKey(unit), sharded
        return
    trained: dict[OptimizerKey, list[Tensor]] = {}
    for parameter in (each for chunk in gradients.wrapped.values() for each in chunk.parameters() if each.requires_grad):
        trained.setdefault(OptimizerKey.of(unit, parameter), []).append(parameter)
    for key, parameters in sorted(trained.items()):
        adam = _build_adam([(parameter, parameter) for parameter in parameters], config=config, rates=rates)
        optimizer = (
            _sharded_by_replicas(adam, config, gradients, steps_experts=key.steps_experts)
            if config.use_distributed_optimizer
            else FP32Optimizer(adam, config, _init_state)
        )
        optimizer.tp_group = tp_group
        yield key, optimizer


def _sharded_by_replicas(
    adam: torch.optim.Optimizer, config: OptimizerConfig, gradients: UnitGradients, *, steps_experts: bool
) -> DistributedOptimizer:
    chunks, groups = list(gradients.wrapped.values()), gradients.membership.groups
    holders = groups.expt_dp if steps_experts else groups.dp_cp
    buffers = [chunk.expert_parallel_buffers if steps_experts else chunk.buffers for chunk in chunks]
    return DistributedOptimizer(
        adam,
        config,
        None,
        _init_state,
        model_chunks=chunks,
        per_model_buffers=dict(enumerate(buffers)),
        data_parallel_group=holders,
        data_parallel_group_gloo=holders,
        data_parallel_group_idx=groups.tp.rank(),
        distributed_optimizer_instance_id=0,
    )


def build_optimizer_config(
    *, lr: float, min_lr: float, weight_decay: float, betas: tuple[float, float], eps: float, clip_grad: float, dtype: torch.dtype
) -> OptimizerConfig:
    """Return megatron-core's optimizer configuration; float64 runs keep their optimizer whole on every replica."""
    return OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=min_lr,
        weight_decay=weight_decay,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_eps=eps,
        clip_grad=clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=dtype != torch.float64,
    )


def _build_adam(stepped: Sequence[tuple[Tensor, Tensor]], *, config: OptimizerConfig, rates: UnitRates) -> torch.optim.Optimizer:
    """Build AdamW; stepped: each parameter with what is stepped in its place."""
    groups: dict[tuple[Rates, bool], list[Tensor]] = {(own, decays): [] for own in rates for decays in (True, False)}
    for parameter, main in stepped:
        own = rates.projector if getattr(parameter, "is_of_projector", False) else rates.module
        groups[own, parameter.dim() > 1 or getattr(parameter, "decays", False)].append(main)
    shared = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
    rows = [
        {
            "params": mains,
            "wd_mult": float(decays),
            "start_wd": own.weight_decay,
            "end_wd": own.weight_decay,
            "max_lr": own.lr,
            "min_lr": own.min_lr,
            "average_decay": own.average_decay,
            **({} if own.lr_warmup_steps is None else {"lr_warmup_steps": own.lr_warmup_steps}),
            **shared,
        }
        for (own, decays), mains in groups.items()
    ]
    adam: torch.optim.Optimizer = AdamInBlocks(
        rows,
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        **({} if USING_PYTORCH_OPTIMIZER else {"adam_w_mode": True}),
    )
    if any(own.average_decay is not None for own in rates):
        _keep_averages(adam)
    return adam


def describe_groups(config: OptimizerConfig, *, step: float, is_expert: bool) -> list[dict[str, Any]]:
    """Return the parameter groups of Megatron's own optimizer after as many steps, without their parameters."""
    rates = Rates(config.lr, config.min_lr, config.weight_decay)
    adam = _build_adam([], config=config, rates=UnitRates(rates, rates))
    left_out = ("params", "start_wd", "end_wd", "average_decay")
    added = {"is_expert_parallel": is_expert, "step": step, "bias_correction": True}
    return [{key: value for key, value in {**group, **added}.items() if key not in left_out} for group in adam.param_groups]


def _keep_averages(adam: torch.optim.Optimizer) -> None:
    """Update averages of weights in every step; they start as the weights before it, in the optimizer's own precision."""
    starts: dict[Tensor, Tensor] = {}

    def averaged() -> Iterator[tuple[Tensor, float]]:
        for group in adam.param_groups:
            if group["average_decay"] is not None:
                yield from ((main, group["average_decay"]) for main in group["params"])

    def before_step(*_: Any) -> None:
        starts.update({main: main.detach().clone() for main, _ in averaged() if AVERAGE not in adam.state.get(main, {})})

    def after_step(*_: Any) -> None:
        for main, decay in averaged():
            state = adam.state[main]
            if main in starts:
                state[AVERAGE] = starts.pop(main)
            state[AVERAGE].lerp_(main.detach(), 1 - decay)

    adam.register_step_pre_hook(before_step)
    adam.register_step_post_hook(after_step)


def _init_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if len(optimizer.state[parameter]) == 0:
                optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter.data)
                optimizer.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter.data)


class SteppedPiece(NamedTuple):
    """One piece as an optimizer sees it."""

    piece: WeightPiece
    main: Parameter
    """The piece itself, or its float32 copy in bf16 runs."""


class ShardedOptimizer(FP32Optimizer):
    """Megatron's plain optimizer for pieces whose gradients are already summed over all ranks that use their parameters."""

    def __init__(self, pieces: Iterable[WeightPiece], *, config: OptimizerConfig, rates: UnitRates) -> None:
        """pieces: of trained layers."""
        self.stepped: dict[Tensor, SteppedPiece] = {piece.parameter: SteppedPiece(piece, _main(piece)) for piece in pieces}
        mains = [(parameter, stepped.main) for parameter, stepped in self.stepped.items()]
        # Every rank counts its own pieces in the gradient norm, as with Megatron's sharded optimizer.
        adam = _build_adam(mains, config=config, rates=rates)
        super().__init__(adam, replace(config, use_distributed_optimizer=True), _init_state)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step, and round updated weights to the weights' precision."""
        is_done: bool = super().step_with_ready_grads()
        if rounded := self._rounded():
            torch._foreach_copy_([piece.weight for piece, _ in rounded], [main for _, main in rounded])
        return is_done

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Take over weights that were loaded."""
        for piece, main in self._rounded():
            main.copy_(piece.weight)

    def _rounded(self) -> list[SteppedPiece]:
        return [stepped for stepped in self.stepped.values() if stepped.main.dtype != stepped.piece.weight.dtype]


def _main(piece: WeightPiece) -> Parameter:
    assert piece.gradient is not None, "frozen layers have no optimizer"
    main = Parameter(piece.weight.to(piece.gradient.dtype))
    copy_tensor_model_parallel_attributes(main, piece.parameter)
    main.shared = piece.is_copy or getattr(piece.parameter, "shared", False)  # type: ignore[attr-defined]
    main.main_grad = piece.gradient  # type: ignore[attr-defined]
    return main
