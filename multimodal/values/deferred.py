"""Functions by their dotted names, imported when they are called: a table of them can be listed in an instant."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

_NAMES = set[str]()


@dataclass(frozen=True, slots=True)
class Deferred:
    """A function whose module is not imported before it is called."""

    name: str
    """`package.module.function`."""

    def __post_init__(self) -> None:
        _NAMES.add(self.name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
        module, _, function = self.name.rpartition(".")
        return getattr(import_module(module), function)(*arguments, **options)


def import_deferred() -> None:
    """Import all of them, in a process from which others are forked, or which must not wait later."""
    for name in sorted(_NAMES):
        import_module(name.rpartition(".")[0])
