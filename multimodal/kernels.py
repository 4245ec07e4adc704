"""The C++ kernels: `kernels` is their module, or None where it cannot be used and Python references run instead.

Both give the same results, bit for bit, except where a docstring says that only the kernel searches on from a first result. A
reference may take a hundred times as long, so an entry point says which of them run (`describe_kernels`). What neither trains nor
simulates (`map_stages`), and what one balancer (`assign_entrain`) or attention backend (`plan_work_list`) alone needs, has no
reference and raises an error.
"""

import re
from pathlib import Path

_NAMES = re.findall(r"^def (\w+)", Path(__file__).with_name("_kernels.pyi").read_text(), re.MULTILINE)
"""Every function of `_kernels.pyi`; a module that lacks one was built from older sources."""

__all__ = ["describe_kernels", "kernels"]

_problem = ""
try:
    from multimodal import _kernels as kernels
except ImportError as error:
    kernels = None  # type: ignore[assignment]
    is_missing = "cannot import name '_kernels'" in str(error)
    _problem = "not built beside the Python files that run" if is_missing else f"built, but cannot be loaded ({error})"
else:
    if missing := [name for name in _NAMES if not hasattr(kernels, name)]:
        kernels = None  # type: ignore[assignment]
        _problem = f"built from older sources ({missing[0]} is missing)"


def describe_kernels() -> str:
    """Returns which implementation decides: `C++ kernels`, or the Python references, why, and how to get the kernels."""
    if kernels is not None:
        return "C++ kernels"
    fix = "run 'pip install -e .' where this copy of Braid lies"
    return f"Python references, which are slow: the C++ kernels are {_problem}; {fix}"
