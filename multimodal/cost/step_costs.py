"""The costs of a step as the simulator reads them: the interface between cost models and the simulator."""

from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from multimodal.cost.cluster import TransferCost
from multimodal.cost.run_options import RunOptions
from multimodal.values.action import Action, Place
from multimodal.values.arrays.rows import Floats, Integers, row_starts
from multimodal.values.work.step_work import COMPUTE, SEND, StepWork


class ComputeCost(NamedTuple):
    """One computation."""

    seconds: float
    """Seconds from its start to its end, collectives inside it included."""
    tensor_parallel_seconds: float = 0.0
    """The share of `seconds` in which the lane computes nothing because it waits for a collective inside a layer."""
    waits: tuple[float, ...] = ()
    """Seconds of those of these waits in which other work can run (`SlotMode.INSIDE`), in the order in which they occur, which
    `multimodal/cost/pieces/tensor_parallel_waits` numbers; empty if they are not known."""


class PieceCosts(NamedTuple):
    """Costs of pieces of a step's work, one entry for each."""

    seconds: Floats
    """Seconds of a computation or a collective; for a send, the seconds in which its link is occupied."""
    tensor_parallel_seconds: Floats
    latency_seconds: Floats
    links: Integers

    @classmethod
    def nothing(cls, num_pieces: int) -> "PieceCosts":
        """Return the costs of pieces that take no time, to be filled in."""
        return cls(np.zeros(num_pieces), np.zeros(num_pieces), np.zeros(num_pieces), np.full(num_pieces, -1))


class StepCosts(Protocol):
    """Durations and sizes of everything in one step, as arrays over its numbered work. Deterministic."""

    @property
    def model_flops(self) -> float:
        """Floating point operations that the model needs for this step, recomputation not counted; 0 where unknown."""
        return 0.0

    @property
    def peak_flops_per_second(self) -> float:
        """Peak FLOP/s of all ranks of the plan together; 0 where unknown."""
        return 0.0

    @property
    def options(self) -> RunOptions | None:
        """Options of the run, which determine the collectives of its layers; None if unknown."""
        return None

    @property
    def memory_bytes(self) -> float:
        """Bytes of a rank's memory; infinite if unknown."""
        return float("inf")

    def compute(self, action: Action) -> ComputeCost:
        """Cost of one forward, backward, input gradient or weight gradient."""

    def of_pieces(self, work: StepWork, pieces: Integers) -> PieceCosts:
        """Costs of computations, collectives (once all replicas take part) and sends, by their numbers in `work`."""

    def waits(self, work: StepWork, pieces: Integers) -> tuple[Integers, Floats]:
        """Seconds of the waits inside computations in which other work can run, as in `ComputeCost`; rows (starts, seconds)."""

    def kept_bytes(self, work: StepWork, forwards: Integers) -> Integers:
        """Bytes per rank that the places of these forwards keep from their start to the end of their backward."""

    def static_bytes(self, lane: int) -> int:
        """Bytes per rank of weights, gradients and optimizer state in a lane; 0 if unknown."""
        return 0


class ActionCosts(StepCosts, Protocol):
    """Base of costs that are known action by action; gives the costs of all pieces from those of single actions."""

    def transfer(self, send: Action) -> TransferCost:
        """Cost of the message that a send starts: none, unless it is known."""
        return TransferCost(0.0, 0.0)

    def collective_seconds(self, action: Action) -> float:
        """Seconds of gathering parameters or reducing gradients, from the moment when all replicas take part; 0 if unknown."""
        return 0.0

    def activation_bytes(self, place: Place) -> int:
        """Bytes per rank that a place keeps from its forward to the end of its backward; 0 if unknown."""
        return 0

    def of_pieces(self, work: StepWork, pieces: Integers) -> PieceCosts:
        """Return the costs of single pieces, one after the other."""
        found = PieceCosts.nothing(len(pieces))
        actions = work.actions if len(pieces) and pieces.max() >= work.num_computed else work.computed
        for index, (piece, resource) in enumerate(zip(pieces.tolist(), work.resources[pieces].tolist(), strict=True)):
            if resource == COMPUTE:
                found.seconds[index], found.tensor_parallel_seconds[index], _ = self.compute(actions[piece])
            elif resource == SEND:
                found.latency_seconds[index], found.seconds[index], found.links[index] = self.transfer(actions[piece])
            else:
                found.seconds[index] = self.collective_seconds(actions[piece])
        return found

    def waits(self, work: StepWork, pieces: Integers) -> tuple[Integers, Floats]:
        """Return the waits of single pieces, one after the other."""
        rows = [self.compute(work.action(piece)).waits for piece in pieces.tolist()]
        return row_starts(list(map(len, rows))), np.array(list(chain.from_iterable(rows)), np.float64)

    def kept_bytes(self, work: StepWork, forwards: Integers) -> Integers:
        """Return the bytes of single places, one after the other."""
        return np.array([self.activation_bytes(work.computed[piece].place) for piece in forwards.tolist()], np.int64)
