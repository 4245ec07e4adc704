"""One pass through the layers of a stage whose weights are sharded: which collectives, in which order.

The order is settled beforehand and the same on every rank of the group, whatever the microbatch at hand computes: what asks for a
layer makes all calls up to it, and the end of the pass makes the rest. A rank without a microbatch makes all calls at once.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.runtime.gradients.sharded_layer import ShardedLayer
from multimodal.values.schedule import ActionKind


class Visit(NamedTuple):
    """What a pass does at one layer; layers by their index in the unit."""

    layer: int
    gathers: tuple[int, ...]
    reduces: tuple[int, ...]


class LayerPass:
    """Visits layers one after another, and gathers the next one's weights while one computes."""

    def __init__(
        self, kind: ActionKind, visits: Sequence[Visit], layers: Mapping[int, ShardedLayer], *, is_joined: bool = False
    ) -> None:
        """is_joined: this rank computes nothing in it."""
        self.kind, self._visits, self._layers, self._is_joined = kind, visits, layers, is_joined
        self._positions = {visit.layer: position for position, visit in enumerate(visits)}
        self._position = -1
        self._is_inside = False

    def enter(self, layer: int) -> None:
        """Have a layer's weights; does nothing where the pass is at this layer already, or does not stop there."""
        target = self._positions.get(layer, -1)
        while self._position < target:
            self._leave()
            self._enter_next()

    def leave(self, layer: int) -> None:
        """Give a layer's weights back, and reduce its gradients."""
        if self._positions.get(layer) == self._position:
            self._leave()

    def finish(self) -> None:
        """Make all calls that are left, and wait for them."""
        if self._visits:
            self.enter(self._visits[-1].layer)
        self._leave()
        for visit in self._visits:
            for layer in visit.reduces:
                self._layers[layer].finish_reduction()

    def _enter_next(self) -> None:
        if self._position < 0:
            self._start_gathering(0)
        self._position += 1
        self._is_inside = True
        self._start_gathering(self._position + 1)
        for layer in self._visits[self._position].gathers:
            self._layers[layer].finish_gathering()

    def _leave(self) -> None:
        if not self._is_inside:
            return
        self._is_inside = False
        visit = self._visits[self._position]
        if self._position > 0:
            for layer in self._visits[self._position - 1].reduces:
                self._layers[layer].finish_reduction()
        for layer in visit.gathers:
            self._layers[layer].release()
        for layer in visit.reduces:
            self._layers[layer].start_reduction(is_joined=self._is_joined)

    def _start_gathering(self, position: int) -> None:
        for layer in self._visits[position].gathers if position < len(self._visits) else ():
            self._layers[layer].start_gathering()
