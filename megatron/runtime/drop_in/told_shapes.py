"""Messages of any shape between the stages of a loop's model: each activation's shape is told ahead of it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.runtime.communication.broker import Broker, Link, MessageKey
from megatron.runtime.communication.message_channel import Arrival
from multimodal.plan.communicators import Track, track_of

NUM_DIMENSIONS = 3
"""Dimensions of activations: sequence, microbatch, hidden."""
SHAPE_TRACKS = tuple(Track("shape", parity) for parity in (0, 1))
"""Tracks of shapes, which follow each other as the activations do."""


class ShapeTellingBroker(Broker):
    """A broker that posts the receive of an activation when its shape has arrived; gradients have their activations' shapes.

    Activations must be needed in the order in which they are sent, as they are with one chunk of the model per rank.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._shapes: dict[MessageKey, tuple[int, ...]] = {}
        """Shapes of gradients to come, by message."""
        self._told: dict[MessageKey, tuple[Tensor, Link, list[Arrival]]] = {}

    def send(self, key: MessageKey, link: Link, payload: Tensor) -> None:
        """Start sending a tensor; an activation's shape goes first."""
        if key.direction == "forward":
            assert self._channel is not None
            self._shapes[key.answered()] = tuple(payload.shape)
            told = torch.tensor(payload.shape, device=self._device)
            self._channel.start(_shape_track(key), sends=[(told, link.target_ranks[0])])
        super().send(key, replace(link, shape=tuple(payload.shape)), payload)

    def post_receive(self, key: MessageKey, link: Link) -> int:
        """Start receiving a gradient, or an activation's shape."""
        if key.direction == "backward":
            return super().post_receive(key, replace(link, shape=self._shapes.pop(key)))
        assert self._channel is not None
        told = torch.empty(NUM_DIMENSIONS, dtype=torch.int64, device=self._device)
        arriving = self._channel.start(_shape_track(key), receives=[(told, link.source_ranks[0])])
        self._told[key] = told, link, list(arriving)
        return 0

    def wait(self, key: MessageKey) -> Tensor:
        """Wait for a tensor, an activation's shape first."""
        if key in self._told:
            told, link, arriving = self._told.pop(key)
            for arrival in arriving:
                arrival.wait()
            super().post_receive(key, replace(link, shape=tuple(told.tolist())))
        return super().wait(key)


def _shape_track(key: MessageKey) -> Track:
    return Track("shape", track_of(key.direction, key.source, key.target).parity)
