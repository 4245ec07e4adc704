"""The actions of lanes: their kinds, and the text form of an action.

    F vision/0/0/3    SF vision/0/0/3>llm/1/0/2    B vision/0/0/3#1    RG llm/1/0[1:8]    F vision/0/0/3{2:7}

A place is unit/replica/stage/microbatch; `#1` is its second sample subset, `[1:8]` a range of its stage's layers, `{2:7}` one of
its stage's segments; `>` leads to the peer that a send feeds, `<` to the peer that a receive drains.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from multimodal.values.arrays.microbatches import MicrobatchPlace


class Resource(StrEnum):
    """The resource of a lane that an action occupies."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    COLLECTIVE = "collective"


class ActionKind(StrEnum):
    """The kinds of action; the value is the kind's name in a schedule's text."""

    FORWARD = "F"
    """Of one microbatch through one virtual stage."""
    BACKWARD = "B"
    """Whatever gradients the stage must give."""
    INPUT_GRADIENT = "I"
    """The first half of a split backward: the gradient of the stage's input."""
    WEIGHT_GRADIENT = "W"
    """The second half: the gradients of the stage's weights."""
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    """Activations go forward, gradients backward; the action names its peer."""
    GATHER_PARAMETERS = "GP"
    """Of a stage over replicas, after an update."""
    REDUCE_GRADIENTS = "RG"
    """Of a stage over replicas."""

    @property
    def resource(self) -> Resource:
        """The resource of a lane that such an action occupies."""
        return _RESOURCES[self]


BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
"""Kinds of actions that compute gradients."""
_RESOURCES = {
    **dict.fromkeys((ActionKind.FORWARD, *BACKWARDS), Resource.COMPUTE),
    **dict.fromkeys((ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD), Resource.SEND),
    **dict.fromkeys((ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD), Resource.RECEIVE),
    **dict.fromkeys((ActionKind.GATHER_PARAMETERS, ActionKind.REDUCE_GRADIENTS), Resource.COLLECTIVE),
}


class Place(NamedTuple):
    """One microbatch in one virtual stage; as an action's peer, the other end of a message."""

    unit: str
    replica: int
    stage: int
    microbatch: int

    @property
    def microbatch_place(self) -> MicrobatchPlace:
        """The microbatch, whatever the stage."""
        return MicrobatchPlace(self.unit, self.replica, self.microbatch)


@dataclass(frozen=True, slots=True)
class SampleSubset:
    """A sample subset, counted from 0: a microbatch's backward may be cut into several (Entrain 4.5.3)."""

    index: int


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers `first` to `end` - 1 of a virtual stage, counted from 0."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """Segments `first` to `end` - 1 of a virtual stage, counted from 0 in the order of a forward over all its layers.

    A segment is the smallest part of a layer that runs on its own; a kind of layer says which it has (`multimodal/cost/layers`).
    """

    first: int
    end: int


Coverage = SampleSubset | LayerRange | SegmentRange | None
"""The part of its microbatch and stage that a piece of work covers; None: the whole."""


class MessageKey(NamedTuple):
    """The identity of a message: a microbatch's tensor between two places; direction is `forward` or `backward`."""

    direction: str
    source: Place
    target: Place
    covers: Coverage = None
    """The sample subset whose gradient it is, between stages of one unit; None: the whole microbatch."""


class Action(NamedTuple):
    """One thing a lane does. `stage` counts virtual stages; `microbatch` is -1 where the kind has none."""

    kind: ActionKind
    unit: str
    replica: int
    stage: int
    microbatch: int = -1
    peer: Place | None = None
    covers: Coverage = None

    @property
    def place(self) -> Place:
        """This action's own (unit, replica, stage, microbatch)."""
        return Place(self.unit, self.replica, self.stage, self.microbatch)

    @property
    def microbatch_place(self) -> MicrobatchPlace:
        """The microbatch, whatever the stage."""
        return MicrobatchPlace(self.unit, self.replica, self.microbatch)

    @property
    def subset(self) -> int:
        """The index of the sample subset that is covered; -1: the whole microbatch."""
        return self.covers.index if isinstance(self.covers, SampleSubset) else -1


ARROWS = {Resource.SEND: ">", Resource.RECEIVE: "<"}


def action_to_text(action: Action) -> str:
    """Print one action, such as `SF vision/0/0/3>llm/1/0/2`."""
    place: tuple[object, ...] = action.place if action.microbatch >= 0 else action.place[:3]
    peer = f"{ARROWS[action.kind.resource]}{'/'.join(map(str, action.peer))}" if action.peer else ""
    return f"{action.kind.value} {'/'.join(map(str, place))}{_coverage_to_text(action.covers)}{peer}"


def _coverage_to_text(covers: Coverage) -> str:
    if isinstance(covers, SampleSubset):
        return f"#{covers.index}"
    if isinstance(covers, SegmentRange):
        return f"{{{covers.first}:{covers.end}}}"
    return f"[{covers.first}:{covers.end}]" if covers is not None else ""
