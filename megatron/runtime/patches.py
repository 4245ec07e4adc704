"""Installs the drop-in in Megatron: replaces the function that gives training loops their pipeline schedule."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules

from megatron.runtime import platform
from megatron.runtime.drop_in.forward_backward import ForwardBackward
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import ConfigError, ScheduleError

_NAME = "get_forward_backward_func"
_ORIGINAL = schedules.get_forward_backward_func
_installed: Callable[..., Any] = _ORIGINAL


def apply(*, schedule: str = "1f1b") -> None:
    """Make megatron-core's `get_forward_backward_func` return Braid's executor, for loops written for Megatron.

    The name is replaced in megatron-core and in every module that has imported it so far. Applying again changes the schedule for
    all later calls. On a machine without CUDA the replacements of `platform` are installed, too.

    schedule: a name in `BUILDERS`, with or without parameters, whose actions are whole forwards and backwards.
    Raises ConfigError if there is no such schedule. A schedule that splits backwards is refused in the first step.
    """
    try:
        BUILDERS[schedule]
    except ScheduleError as problem:
        raise ConfigError(f"patches.apply(schedule=...): {problem}") from None
    platform.install()
    function = ForwardBackward(schedule=schedule).forward_backward

    signature = inspect.signature(_ORIGINAL)

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return Braid's function, which works for all sizes: it reads them from the process groups and its model."""
        signature.bind(*args, **kwargs)
        return function

    get_forward_backward_func.__signature__ = signature  # type: ignore[attr-defined]
    _install(get_forward_backward_func)


def revert() -> None:
    """Restore megatron-core's own function, also in modules that imported the name."""
    _install(_ORIGINAL)


def _install(function: Callable[..., Any]) -> None:
    global _installed
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is _installed:
            setattr(module, _NAME, function)
    _installed = function
