"""Methods whose results are computed once for each of their arguments, and live as long as their object."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def memoized(method: Callable[Concatenate[Owner, Arguments], Result]) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Keep a method's results in its object, as `cached_property` keeps an attribute; `lru_cache` would compare whole objects.

    Arguments are hashable, and positional or keyword-only throughout, with every keyword given.
    """
    name = f"_results of {method.__name__}"

    @wraps(method)
    def look_up(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        known: dict[object, Result] = self.__dict__.setdefault(name, {})
        key = (args, *kwargs.values()) if kwargs else args
        if key not in known:
            known[key] = method(self, *args, **kwargs)
        return known[key]

    return look_up
