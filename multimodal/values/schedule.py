"""When each action runs: per lane an ordered tuple of actions, and the one table that says what each kind is."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class ActionKind(StrEnum):
    """The kinds of action; the value is the kind's name in a schedule's text."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
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
    ActionKind.SEND_FORWARD: ActionRow(Resource.SEND, True, True, Memory.KEEPS, "send activations to the peer"),
    ActionKind.RECEIVE_FORWARD: ActionRow(Resource.RECEIVE, True, True, Memory.ALLOCATES, "receive activations from the peer"),
    ActionKind.SEND_BACKWARD: ActionRow(Resource.SEND, True, True, Memory.FREES, "send gradients to the peer"),
    ActionKind.RECEIVE_BACKWARD: ActionRow(Resource.RECEIVE, True, True, Memory.ALLOCATES, "receive gradients from the peer"),
    ActionKind.REDUCE_GRADIENTS: ActionRow(
        Resource.COLLECTIVE, False, False, Memory.KEEPS, "reduce a stage's gradients over replicas"
    ),
}


class Place(NamedTuple):
    """One microbatch in one virtual stage: the other end of a message."""

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

    @property
    def place(self) -> Place:
        """This action's own (unit, replica, stage, microbatch)."""
        return Place(self.unit, self.replica, self.stage, self.microbatch)


@dataclass(frozen=True)
class Lane:
    """What one rank group executes, in order."""

    ranks: tuple[int, ...]
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """One lane per entry of `Plan.lanes`, in that order."""

    lanes: tuple[Lane, ...]
