"""When each action runs: per lane an ordered tuple of actions, and the one table that says what each kind is."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class ActionKind(StrEnum):
    """The kinds of action; the value is the kind's name in a schedule's text."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    GATHER_PARAMETERS = "GP"
    REDUCE_GRADIENTS = "RG"


class Resource(StrEnum):
    """The resource of a lane that an action occupies."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    COLLECTIVE = "collective"


class Memory(StrEnum):
    """What an action does to a lane's stored activations."""

    ALLOCATES = "allocates"
    FREES = "frees"
    KEEPS = "keeps"


class ActionRow(NamedTuple):
    """One row of the action table."""

    resource: Resource
    has_microbatch: bool
    has_peer: bool
    memory: Memory
    meaning: str


ACTION_TABLE: Mapping[ActionKind, ActionRow] = {
    ActionKind.FORWARD: ActionRow(Resource.COMPUTE, True, False, Memory.ALLOCATES, "forward of one microbatch through one stage"),
    ActionKind.BACKWARD: ActionRow(
        Resource.COMPUTE, True, False, Memory.FREES, "backward: whatever gradients the stage must give"
    ),
    ActionKind.INPUT_GRADIENT: ActionRow(
        Resource.COMPUTE, True, False, Memory.KEEPS, "first half of a split backward: the gradient of the stage's input"
    ),
    ActionKind.WEIGHT_GRADIENT: ActionRow(
        Resource.COMPUTE, True, False, Memory.FREES, "second half of a split backward: the gradients of the stage's weights"
    ),
    ActionKind.SEND_FORWARD: ActionRow(Resource.SEND, True, True, Memory.KEEPS, "send activations to the peer"),
    ActionKind.RECEIVE_FORWARD: ActionRow(Resource.RECEIVE, True, True, Memory.ALLOCATES, "receive activations from the peer"),
    ActionKind.SEND_BACKWARD: ActionRow(Resource.SEND, True, True, Memory.FREES, "send gradients to the peer"),
    ActionKind.RECEIVE_BACKWARD: ActionRow(Resource.RECEIVE, True, True, Memory.ALLOCATES, "receive gradients from the peer"),
    ActionKind.GATHER_PARAMETERS: ActionRow(
        Resource.COLLECTIVE, False, False, Memory.KEEPS, "gather a stage's updated parameters over replicas"
    ),
    ActionKind.REDUCE_GRADIENTS: ActionRow(
        Resource.COLLECTIVE, False, False, Memory.KEEPS, "reduce a stage's gradients over replicas"
    ),
}


class Place(NamedTuple):
    """One microbatch in one virtual stage: such as the other end of a message."""

    unit: str
    replica: int
    stage: int
    microbatch: int


class Action(NamedTuple):
    """One thing a lane does. `stage` counts virtual stages; `microbatch` is -1 where the kind has none."""

    kind: ActionKind
    unit: str
    replica: int
    stage: int
    microbatch: int = -1
    peer: Place | None = None
    part: int = -1
    """Which of the sample subsets that a microbatch's backward is split into (Entrain 4.5.3); -1: the whole microbatch."""

    @property
    def place(self) -> Place:
        """This action's own (unit, replica, stage, microbatch)."""
        return Place(self.unit, self.replica, self.stage, self.microbatch)


@dataclass(frozen=True)
class Lane:
    """What one rank group executes, in order.

    A *filler* is an action that the next action that is none, its carrier, has to run in its idle slots: while the carrier waits
    for what it needs, fillers run one after another; those that are left when it can start run right after it. A filler stands
    before its carrier in `actions`, so that both orders must be (and are checked to be) allowed.
    """

    ranks: tuple[int, ...]
    actions: tuple[Action, ...]
    fillers: frozenset[int] = frozenset()
    """Positions in `actions` of the fillers."""


@dataclass(frozen=True)
class Schedule:
    """One lane per entry of `Plan.lanes`, in that order."""

    lanes: tuple[Lane, ...]
