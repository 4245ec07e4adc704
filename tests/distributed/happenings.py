"""What happens to single ranks of a run in other processes, at named places that no signal from outside could meet.

`HAPPENINGS`, in the environment of a run, lists RANK:PLACE:STEP:EVENT with spaces between them. Each happens once, just before
the rank comes to the place in that step or in a recovery from it; in elastic runs, but for `all`, to a node's first processes.
EVENT: the name of a signal, WAIT (for ever), or JOIN and a node's number: a lost node returns, and the rank waits until it has.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.recovery.member import Member
from megatron.runtime.session import Session
from megatron.runtime.training import elastic
from megatron.runtime.training.trainer import Trainer

HAPPENINGS = "BRAID_TEST_HAPPENINGS"
PLACES: dict[str, tuple[Any, str]] = {
    "step": (Trainer, "train_step"),
    "forward": (RunningStep, "forward"),
    "reduction": (UnitGradients, "start_reduction"),
    "norm": (Session, "step_optimizers"),
    "report": (Trainer, "_report"),
    "copy": (elastic, "take_over"),
}
"""`copy` is in a recovery."""
current_step = 0
nodes_have_joined = threading.Event()
members: list[Member] = []
"""This process's, in an elastic run."""


class Work:
    wait = signal.pause


def wait_forever() -> None:
    """Stand where a thread does that gloo has not told of a broken connection."""
    Work.wait()


def wait_for_return(node: str) -> None:
    """Let a node return that is lost for the first time; no rank leaves before: all have agreed to go on after the last step."""
    members[0].ledger.set_flag(f"return/{node}/0")
    nodes_have_joined.wait()


class Happening(NamedTuple):
    rank: str
    """Or `all`."""
    place: str
    step: int
    event: str

    def is_now(self) -> bool:
        is_first = threading.current_thread() is threading.main_thread() and os.environ.get("BRAID_INCARNATION", "0") == "0"
        return current_step == self.step and (self.rank == "all" or (is_first and self.rank == os.environ["RANK"]))

    def happen(self) -> None:
        if self.event == "WAIT":
            wait_forever()
        elif self.event.startswith("JOIN"):
            wait_for_return(self.event.removeprefix("JOIN"))
        else:
            signal.raise_signal(signal.Signals[f"SIG{self.event}"])


def plant(happenings: str) -> None:
    """Let happenings come in this process, or in the ranks that it forks."""
    listed = []
    for each in happenings.split():
        rank, place, step, event = each.split(":")
        listed.append(Happening(rank, place, int(step), event))

    def tell(member: Member, has_joined: bool) -> None:
        members[:] = [member]
        (nodes_have_joined.set if has_joined else nodes_have_joined.clear)()

    Member.nodes_have_joined = property(lambda member: nodes_have_joined.is_set(), tell)  # type: ignore[assignment]
    for place, (owner, name) in PLACES.items():
        setattr(owner, name, _met_first(getattr(owner, name), [each for each in listed if each.place == place]))


def _met_first(original: Callable[..., Any], happenings: list[Happening]) -> Callable[..., Any]:
    def passing(*args: Any, **keywords: Any) -> Any:
        global current_step
        current_step = keywords.get("number", current_step)
        for each in [each for each in happenings if each.is_now()]:
            happenings.remove(each)
            each.happen()
        return original(*args, **keywords)

    return passing
