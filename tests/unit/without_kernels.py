"""Runs a function by the Python reference of its kernel."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar
from unittest import mock

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_kernels(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function as it is where the C++ kernels are not built."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with mock.patch.object(sys.modules[function.__module__], "kernels", None):
            return function(*args, **kwargs)

    return run
