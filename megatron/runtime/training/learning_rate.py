"""Megatron's learning rate schedule over the optimizers of all units of a rank."""

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.session import Session


class _AllGroups:
    """Stands for one optimizer before the scheduler: the parameter groups of all units under the current plan."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Empty on a rank that trains nothing."""
        return [group for optimizer in self._session.optimizers.values() for group in optimizer.param_groups]


def build_scheduler(settings: OptimizerSettings, session: Session, *, train_iters: int) -> OptimizerParamScheduler:
    """Counts optimizer steps (Megatron counts samples: the same for a constant global batch size)."""
    return OptimizerParamScheduler(
        _AllGroups(session),
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=settings.lr_decay_iters or train_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=train_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=settings.lr_wsd_decay_iters,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )


def current_learning_rate(scheduler: OptimizerParamScheduler, settings: OptimizerSettings) -> float:
    """The rate of the coming step, also on a rank that trains nothing."""
    return float(scheduler.get_lr({"max_lr": settings.lr, "min_lr": settings.min_lr}))
