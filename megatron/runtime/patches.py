"""Puts the drop-in into Megatron: replaces the function that gives training loops their pipeline schedule."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules

from megatron.runtime import platform
from megatron.runtime.drop_in.forward_backward import ForwardBackward
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import ConfigError

_NAME = "get_forward_backward_func"
_ORIGINAL = schedules.get_forward_backward_func
_installed: Callable[..., Any] = _ORIGINAL


def apply(*, schedule: str = "1f1b") -> None:
    """Make megatron-core's `get_forward_backward_func` return Braid's executor, so that a loop written for Megatron runs on it.

    The name is replaced in megatron-core and in every module that has imported it by now. Applying again changes the schedule
    of whoever asks from then on. On a machine without CUDA the replacements of `platform` are installed, too.

    schedule: a name in `BUILDERS` whose actions are whole forwards and backwards.
    Raises ConfigError when there is no such schedule. A schedule that splits backwards is refused in the first step.
    """
    names = sorted(name for name, row in BUILDERS.items() if row.can_train)
    if schedule not in names:
        raise ConfigError(f"there is no schedule '{schedule}'; give patches.apply(schedule=...) one of {', '.join(names)}")
    platform.install()
    function = ForwardBackward(schedule=schedule).forward_backward

    signature = inspect.signature(_ORIGINAL)

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return Braid's function, which serves every size: it reads them from the process groups and the model it is given."""
        signature.bind(*args, **kwargs)
        return function

    get_forward_backward_func.__signature__ = signature  # type: ignore[attr-defined]
    _install(get_forward_backward_func)


def revert() -> None:
    """Give megatron-core, and whoever imported the name, its own function back."""
    _install(_ORIGINAL)


def _install(function: Callable[..., Any]) -> None:
    global _installed
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is _installed:
            setattr(module, _NAME, function)
    _installed = function
