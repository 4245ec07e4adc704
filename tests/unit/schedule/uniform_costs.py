"""Costs for the simulator's tests, the same for every microbatch or random but fixed, and schedules built with them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from multimodal.cost.communication import TransferCost
from multimodal.cost.step_costs import ActionCosts, ComputeCost
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape


@dataclass(frozen=True)
class UniformCosts(ActionCosts):
    """Seconds by kind of action."""

    forward: float = 1.0
    backward: float = 2.0
    tensor_parallel_share: float = 0.0
    latency: float = 0.0
    occupied: float = 0.0
    link: int = -1
    collective: float = 0.0
    model_flops: float = 0.0
    peak_flops_per_second: float = 0.0

    def compute(self, action: Action) -> ComputeCost:
        seconds = {ActionKind.FORWARD: self.forward, ActionKind.BACKWARD: self.backward}.get(action.kind, self.backward / 2)
        return ComputeCost(seconds, seconds * self.tensor_parallel_share)

    def transfer(self, send: Action) -> TransferCost:
        return TransferCost(self.latency, self.occupied, self.link)

    def collective_seconds(self, action: Action) -> float:
        return self.collective

    def activation_bytes(self, place: Place) -> int:
        return 10

    def static_bytes(self, lane: int) -> int:
        return 1000 + lane


@dataclass(frozen=True)
class GivenCosts(UniformCosts):
    """Computations that take as long as a function says."""

    seconds: Callable[[Action], float] = lambda action: 1.0

    def compute(self, action: Action) -> ComputeCost:
        return ComputeCost(self.seconds(action))


def costs_of(*, backward: float = 2.0, **forward_seconds: float) -> GivenCosts:
    """Seconds of each unit's forwards; whole backwards take so many times as long, and either half of one half of that."""
    factors = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: backward}
    return GivenCosts(seconds=lambda action: forward_seconds[action.unit] * factors.get(action.kind, backward / 2))


@dataclass(frozen=True)
class RandomCosts(UniformCosts):
    """Everything takes a time of its own, some of them none; two links are shared."""

    seed: int = 0
    num_waits: int = 0
    """Waits of a computation in which others can run."""

    def _draw(self, action: Action) -> float:
        return Random(f"{self.seed} {tuple(action)}").choice((0.0, 0.5, 1.0, Random(f"{tuple(action)}").uniform(0, 3)))

    def compute(self, action: Action) -> ComputeCost:
        waiting = self._draw(action) / 4
        return ComputeCost(self._draw(action), waiting, (waiting / max(1, self.num_waits),) * self.num_waits)

    def transfer(self, send: Action) -> TransferCost:
        return TransferCost(self._draw(send) / 10, self._draw(send) / 5, (send.microbatch + send.stage) % 3 - 1)

    def collective_seconds(self, action: Action) -> float:
        return self._draw(action)


def built(name: str, step: StepShape, costs: UniformCosts) -> Schedule:
    """The lowered, validated schedule of a builder with these costs."""
    return build_schedule(BUILDERS[name].with_costs(costs), step)


def seconds_of(name: str, step: StepShape, costs: UniformCosts) -> float:
    """How long a step takes in the schedule of a builder with these costs."""
    return simulate_schedule(built(name, step, costs), costs).iteration_seconds


def most_kept(schedule: Schedule, unit: str | None = None) -> list[int]:
    """Per lane the most microbatches, of one unit or of all, between forward and the end of their backward."""
    changes = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT_GRADIENT: -1}
    rows = ([changes.get(action.kind, 0) for action in lane.actions if unit in (None, action.unit)] for lane in schedule.lanes)
    return [max(accumulate(row), default=0) for row in rows]
