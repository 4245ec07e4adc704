"""Remember what was made of a value for as long as the value lives."""

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Owner = TypeVar("Owner")
Made = TypeVar("Made")


class KeptByIdentity(Generic[Owner, Made]):
    """Things made of owners, which are compared by identity: values as large as a schedule are slow to compare, and to hash.

    What is kept must not hold its owner, or neither ever goes; it goes with the last of its owner and this object.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[Made]] = {}

    def find(self, owner: Owner, *, like: Callable[[Made], bool], make: Callable[[], Made]) -> Made:
        """Return what was made of the owner and is `like` what is wanted, or make it."""
        kept = self._kept.get(id(owner))
        if kept is None:
            kept = self._kept[id(owner)] = []
            weakref.finalize(owner, _forget, weakref.ref(self), id(owner)).atexit = False
        for made in kept:
            if like(made):
                return made
        made = make()
        kept.append(made)
        return made

    def forget(self, owner_id: int) -> None:
        """Drop what was made of an owner that is gone."""
        self._kept.pop(owner_id, None)


def _forget(keeper: "weakref.ref[KeptByIdentity[Owner, Made]]", owner_id: int) -> None:
    if (found := keeper()) is not None:
        found.forget(owner_id)
