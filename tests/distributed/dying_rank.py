"""pretrain_mllm.py, whose rank on a node kills itself at a place that no signal from outside could meet, or waits there forever.

`BRAID_TEST_DEATHS` names deaths as NODE:PLACE:STEP,..., and `BRAID_TEST_WAITS` waits that nothing ends; only in the first
processes of a node. Before the steps in `BRAID_TEST_HOLDS` every rank waits until it is told that a node has returned. Who dies
at "known norm" first waits until another rank knows the norm, too, which that rank says by a file beside `BRAID_TEST_MARK`. What
a node's rank calls through torch is beside it, too, when training has ended.
"""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import pretrain_mllm
from benchmarks.recorded_calls import Recorder, recording
from megatron.runtime.execution.running_step import RunningStep
from megatron.runtime.gradients.gradients import UnitGradients
from megatron.runtime.gradients.state_shares import StateShares
from megatron.runtime.recovery.member import Member
from megatron.runtime.session import Session
from megatron.runtime.training import elastic
from megatron.runtime.training.trainer import Trainer

PLACES: dict[str, tuple[Any, str]] = {
    "forward": (RunningStep, "forward"),
    "reduction": (UnitGradients, "start_reduction"),
    "norm": (Session, "step_optimizers"),
    "known norm": (Session, "step_optimizers"),
    "gathering": (StateShares, "start_gathering"),
    "report": (Trainer, "_report"),
    "groups": (Session, "enter"),
    "copy": (elastic, "take_over"),
}
"""Where a rank dies just before; `groups` and `copy` are in a recovery."""
current_step = 0
nodes_have_joined = threading.Event()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Work:
    wait = signal.pause


def wait_forever() -> None:
    """Stand where a thread does that gloo has not told of a broken connection."""
    Work.wait()


def mark_known_norm() -> None:
    Path(f"{os.environ['BRAID_TEST_MARK']}-{current_step}").touch()


def die_after_others_know() -> None:
    while not Path(f"{os.environ['BRAID_TEST_MARK']}-{current_step}").exists():
        time.sleep(0.01)
    die()


def plant(place: str, step: int, happen: Callable[[], None]) -> None:
    """Let something happen when this process comes to a place in a step or after it, in its first thread."""
    owner, name = PLACES[place]
    original: Callable[..., Any] = getattr(owner, name)

    def dying(*args: Any, **keywords: Any) -> Any:
        if current_step >= step and threading.current_thread() is threading.main_thread():
            happen()
        return original(*args, **keywords)

    setattr(owner, name, dying)


def hold_steps(steps: set[int]) -> None:
    original = Trainer.train_step

    def tell(member: Member, has_joined: bool) -> None:
        (nodes_have_joined.set if has_joined else nodes_have_joined.clear)()

    Member.nodes_have_joined = property(lambda member: nodes_have_joined.is_set(), tell)  # type: ignore[assignment]

    def train_step(self: Trainer, *args: Any, number: int, **keywords: Any) -> Any:
        global current_step
        current_step = number
        if number in steps:
            nodes_have_joined.wait()
        return original(self, *args, number=number, **keywords)

    Trainer.train_step = train_step  # type: ignore[method-assign]


def record(recorder: Recorder) -> None:
    form, train, leave = elastic.ElasticRun._form, elastic.ElasticRun._train, Member.leave

    def forming(self: Any, verdict: Any, found: Any) -> None:
        num_ranks = self._templates.gpus_per_node
        ranks = [node * num_ranks + local for node in found.nodes for local in range(num_ranks)]
        recorder.enter(f"{verdict.generation}:", ranks)
        form(self, verdict, found)

    def training(self: Any, *args: Any) -> None:
        train(self, *args)
        Path(f"{os.environ['BRAID_TEST_MARK']}-calls-{os.environ['BRAID_NODE']}").write_bytes(pickle.dumps(recorder.events))

    def leaving(self: Member, problem: Exception) -> None:
        recorder.abort()
        leave(self, problem)

    elastic.ElasticRun._form, elastic.ElasticRun._train = forming, training  # type: ignore[method-assign]
    Member.leave = leaving  # type: ignore[method-assign]


if __name__ == "__main__":
    hold_steps({int(step) for step in os.environ["BRAID_TEST_HOLDS"].split()})
    for variable, happen in (("BRAID_TEST_DEATHS", die), ("BRAID_TEST_WAITS", wait_forever)):
        for each in filter(None, os.environ.get(variable, "").split(",")):
            node, place, step = each.split(":")
            if (os.environ["BRAID_NODE"], os.environ["BRAID_INCARNATION"]) == (node, "0"):
                plant(place, int(step), die_after_others_know if place == "known norm" else happen)
            elif place == "known norm":
                plant(place, int(step), mark_known_norm)
    with recording() as recorder:
        record(recorder)
        pretrain_mllm.main(sys.argv[1:])
