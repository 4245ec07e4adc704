"""Costs for the simulator's tests: the same for every microbatch, or random but fixed."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from multimodal.cost.communication import TransferCost
from multimodal.cost.step_costs import ActionCosts, ComputeCost
from multimodal.values.action import Action, ActionKind, Place


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
