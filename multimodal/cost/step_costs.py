"""The costs of a step that the simulator asks for: the interface between cost models and the simulator."""

from typing import NamedTuple, Protocol

from multimodal.values.action import Action, Place


class ComputeCost(NamedTuple):
    """One computation."""

    seconds: float
    """Seconds from its start to its end, collectives inside it included."""
    tensor_parallel_seconds: float = 0.0
    """The share of `seconds` in which the lane computes nothing because it waits for a collective inside a layer."""


class TransferCost(NamedTuple):
    """One message between two lanes."""

    latency_seconds: float
    """Seconds from the end of sending to its arrival; keeps nothing busy."""
    occupied_seconds: float
    """Size over bandwidth: keeps the sender's sending, the receiver's receiving and the shared link busy."""
    link: int = -1
    """Messages with the same number share one link (a node's network card) and pass it one by one; -1: a link of its own."""


class StepCosts(Protocol):
    """Durations and sizes of everything in one step. Deterministic, and cheap: called once per action."""

    @property
    def model_flops(self) -> float:
        """Floating point operations that the model needs for this step, recomputation not counted; 0 where unknown."""

    @property
    def peak_flops_per_second(self) -> float:
        """Peak FLOP/s of all ranks of the plan together; 0 where unknown."""

    def compute(self, action: Action) -> ComputeCost:
        """Cost of a forward, backward, input gradient or weight gradient."""

    def transfer(self, send: Action) -> TransferCost:
        """Cost of the message that a send starts."""

    def collective_seconds(self, action: Action) -> float:
        """Seconds that gathering parameters or reducing gradients takes once all replicas take part."""

    def activation_bytes(self, place: Place) -> int:
        """Bytes per rank that a place keeps from its forward to the end of its backward."""

    def static_bytes(self, lane: int) -> int:
        """Bytes per rank of weights, gradients and optimizer state in a lane."""
