"""Deepstack (Meng et al., 2024): hidden states of earlier layers that are carried along with those of the last one.

An encoder carries the output of some of its layers to its projector. The LLM carries the projector's results from its embedding
to its first layers, behind each of which it adds one. Between layers they are separate tensors, before the hidden states; in
messages, and at the outputs of a unit's first and last layer, they are channels behind those of the hidden states.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from multimodal.model.layers.layer_kind import LayerPart, StagePass, State
from multimodal.values.model_graph import ModelGraph

Segments = tuple[tuple[LayerPart, ...], ...]
"""The parts of each segment of a layer."""


class CarriedStates(NamedTuple):
    """The hidden states that are passed on from layer to layer inside a unit."""

    graph: ModelGraph
    unit: str

    def count(self, layer: int) -> int:
        """Return the number of hidden states that are carried behind a layer; none before the first one."""
        return self.graph.num_carried(self.unit, layer) if layer >= 0 else 0

    def split(self, hidden: Tensor, *, behind: int) -> State:
        """Return the carried states behind a layer, then its hidden states; hidden: all in one tensor, [rows, 1, channels]."""
        if not self.count(behind):
            return (hidden,)
        # A view of a leaf reports that it needs a gradient even if none is recorded.
        whole = hidden if torch.is_grad_enabled() else hidden.detach()
        own, *carried = whole.chunk(1 + self.count(behind), dim=-1)
        return (*carried, own)

    def enter(self, layer: int, state: State) -> tuple[State, Tensor | None]:
        """Return the states that bypass a layer, and its input; an encoder's last layer takes all of them."""
        if not state:
            return (), None
        if layer == len(self.graph.unit(self.unit).layers) - 1:
            return (), join(state)
        return state[:-1], state[-1]

    def leave(self, layer: int, carried: State, output: Tensor) -> State:
        """Return the state behind a layer; carried: the states that bypassed it."""
        unit = self.graph.unit(self.unit)
        if layer == 0:
            *carried_on, own = self.split(output, behind=0)
            return (*carried_on, own.contiguous())  # otherwise the first norm would also keep the rest
        if layer == len(unit.layers) - 1:
            return (output,)
        if self.count(layer) > len(carried):
            return (*carried, output, output)
        if self.count(layer) < len(carried):
            return (*carried[1:], output + carried[0])
        return (*carried, output)

    def past(self, layer: int, segments: Segments) -> Segments:
        """Return the segments of a layer between a unit's ends, with parts that pass the carried states on."""
        count = self.count(layer - 1)
        if not (count or self.count(layer)):
            return segments

        def taking_along(part: LayerPart, *, is_last: bool) -> LayerPart:
            def run(state: State, given: StagePass) -> State:
                carried, output = state[:count], part.run(state[count:], given)
                return self.leave(layer, carried, output[0]) if is_last else (*carried, *output)

            return part._replace(run=run)

        last = segments[-1][-1]
        return tuple(tuple(taking_along(part, is_last=part is last) for part in segment) for segment in segments)

    def between_stages(self, parts: tuple[LayerPart, ...], layers: range) -> tuple[LayerPart, ...]:
        """Return the parts of a stage's layers, from the tensor that it receives to the tensor that it sends."""
        if self.count(layers.start - 1):
            begin = parts[0].run

            def run_first(state: State, given: StagePass) -> State:
                return begin(self.split(state[0], behind=layers.start - 1), given)

            parts = (parts[0]._replace(run=run_first), *parts[1:])
        if self.count(layers.stop - 1) and layers.stop < len(self.graph.unit(self.unit).layers):
            end = parts[-1].run
            parts = (*parts[:-1], parts[-1]._replace(run=lambda state, given: (join(end(state, given)),)))
        return parts


def join(state: State) -> Tensor:
    """Return the hidden states with the carried ones behind their channels."""
    return state[0] if len(state) == 1 else torch.cat((state[-1], *state[:-1]), dim=-1)
