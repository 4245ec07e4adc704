"""One microbatch in a stage in pieces: ranges of segments, forward and backward, each with autograd graphs of its own.

`start_collective` starts a collective that ends a piece, for which the next one waits. Those of pieces inside the LLM's waits
start when these are over, and so run beside the LLM's next computation (Optimus, 4.2).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.runtime.execution.activation_store import SavedTensors, size_of
from multimodal.model.collectives import Arriving
from multimodal.model.layers.layer_kind import HeadOutput, StagePass
from multimodal.model.unit_stage import UnitStage

Tensors = tuple[Tensor | None, ...]
Close = Callable[[Tensor | HeadOutput], tuple[Tensor | None, Tensor | None]]
"""Returns the loss of a stage's output, a share of the global one, and the tensor that is handed on; None where there is none."""


class _Point(NamedTuple):
    """Tensors between two parts, without their graphs: values in a forward, gradients in a backward."""

    tensors: Tensors
    collective: Callable[[], Arriving] | None = None
    """Starts the collective that the last of them goes through, once: when requested, or else when it is waited for."""
    has_gradient: tuple[bool, ...] = ()
    """[num_tensors] for values: True if a gradient comes back."""

    def arrived(self) -> "_Point":
        """Wait for the last tensor."""
        if self.collective is None:
            return self
        return self._replace(tensors=(*self.tensors[:-1], self.collective().wait()), collective=None)


class _Graph(NamedTuple):
    first: int
    last: int
    """The part behind them."""
    leaves: Tensors
    """Inputs that get a gradient; None for others."""
    outputs: tuple[GradientEdge | None, ...]
    size_bytes: int


class _Repeated(NamedTuple):
    """A layer whose forward the backward recomputes."""

    first: int
    last: int
    point: _Point
    size_bytes: int


class SegmentPass:
    """Runs a stage's segments on one microbatch, in any ranges, and keeps the values between them.

    bounds: segments at which any forward or backward begins or ends; hidden: the stage's input, a leaf that gets its gradient,
    None for a unit's first stage; parameter_storages: see `SavedTensors`, None if bytes are not counted.
    """

    def __init__(
        self,
        stage: UnitStage,
        given: StagePass,
        *,
        bounds: Iterable[int],
        hidden: Tensor | None,
        close: Close,
        has_backward: bool,
        parameter_storages: frozenset[int] | None,
    ) -> None:
        self.hidden, self.has_backward = hidden, has_backward
        self.output_shape: torch.Size | None = None
        """Set by the last forward; None if the stage hands nothing on."""
        self._stage, self._given, self._segments, self._close = stage, given, stage.segments(), close
        self._bounds = {self._segments.starts[bound] for bound in bounds}
        self._saved = SavedTensors(parameter_storages) if parameter_storages is not None and has_backward else None
        self._open: list[_Graph | _Repeated] = []
        self._position = 0
        self._repeating: tuple[int, _Point] | None = None
        """The first part of the current layer and its input, if that is all that is kept of the layer."""
        inputs = () if hidden is None else (hidden,)
        self._point = _Point(inputs, has_gradient=tuple(tensor.requires_grad for tensor in inputs))

    @property
    def size_bytes(self) -> int:
        """Bytes that are currently kept."""
        points = [self._point, *([self._repeating[1]] if self._repeating else [])]
        between = [tensor for point in points for tensor in point.tensors if tensor is not None]
        under_way = sum(map(size_of, between)) if self._saved is None else self._saved.bytes_beside(between)
        return under_way + sum(entry.size_bytes for entry in self._open)

    @property
    def num_segments(self) -> int:
        """Number of segments of the stage."""
        return self._segments.num_segments

    def forward(self, end: int) -> None:
        """Run the segments up to `end` - 1 that have not run yet."""
        stop = self._segments.starts[end]
        with self._computing(), torch.set_grad_enabled(self.has_backward):
            for first, last in self._spans(self._position, stop):
                self._advance(first, last)
        self._position = stop

    def start_collective(self) -> None:
        """Start the collective behind the last piece, if there is one."""
        if self._point.collective is not None:
            self._point.collective()

    def take_output(self) -> Tensor | None:
        """Return the tensor that the stage hands on, after the last forward, and drop the reference."""
        loss, output = self._point.tensors
        self._point = _Point((loss, None))
        self.output_shape = None if output is None else output.shape
        return output

    def start_backward(self, gradient: Tensor | None) -> None:
        """Begin with the loss and the gradient of the output; None if either has none."""
        loss, _ = self._point.tensors
        self._saved = None  # counted tensors are freed from now on, and new ones may reuse their memory
        self._point = _Point((None if loss is None else torch.ones_like(loss), gradient))

    def backward(self, first: int) -> None:
        """Run the backwards of the segments from `first` that have not run yet; the last one gives `hidden` its gradient."""
        stop = self._segments.starts[first]
        with self._computing():
            while self._open and self._open[-1].last > stop:
                entry = self._open.pop()
                if isinstance(entry, _Repeated):
                    with torch.enable_grad():
                        self._open += self._walk(entry.first, entry.last, entry.point, counts=False)[0]
                else:
                    self._retreat(entry)

    def _computing(self) -> AbstractContextManager[object]:
        return nullcontext() if self._saved is None else self._saved

    def _spans(self, first: int, last: int) -> Iterable[tuple[int, int]]:
        """Cut parts where pieces begin or end, and around recomputed layers."""
        cuts = []
        for part in range(first + 1, last):
            before, after = self._segments.layers[part - 1 : part + 1]
            is_edge = before != after and (self._stage.recomputes(before) or self._stage.recomputes(after))
            if part in self._bounds or (is_edge and self.has_backward):
                cuts.append(part)
        return pairwise((first, *cuts, last)) if last > first else ()

    def _advance(self, first: int, last: int) -> None:
        point, layers = self._point.arrived(), self._segments.layers
        is_begun = first > 0 and layers[first] == layers[first - 1]
        if not is_begun:
            is_recomputed = self.has_backward and self._stage.recomputes(layers[first])  # as a whole, by the backward
            parameters = self._stage.layers[str(layers[first])].parameters()
            has_gradient = is_recomputed and (any(point.has_gradient) or any(each.requires_grad for each in parameters))
            self._repeating = (first, point) if has_gradient else None
        if self._repeating is None:
            graphs, self._point = self._walk(first, last, point)
            self._open += graphs
            return
        with torch.no_grad():
            _, after = self._walk(first, last, point)
        self._point = after._replace(has_gradient=(True,) * len(after.tensors))
        start, before = self._repeating
        if last == len(layers) or layers[last] != layers[first]:
            self._open.append(_Repeated(start, last, before, sum(map(size_of, before.tensors))))
            self._repeating = None

    def _walk(self, first: int, last: int, point: _Point, *, counts: bool = True) -> tuple[list[_Graph], _Point]:
        """Run parts; returns a graph per stretch between collectives, if kept, and the result, with no collective at its end."""
        graphs = []
        parts, link = self._segments.parts, self._stage.link
        cuts = [  # where a piece ends, or a collective lies between two parts
            part
            for part in range(first + 1, last)
            if part in self._bounds or (parts[part - 1].behind is not None and link.group.size() > 1)
        ]
        for start, stop in pairwise((first, *cuts, last)):
            graph, point = self._run(start, stop, point.arrived(), counts=counts)
            if any(edge is not None for edge in graph.outputs):
                graphs.append(graph)
            if (stop < last or counts) and parts[stop - 1].behind is not None:
                tensor = point.tensors[-1]
                assert tensor is not None
                point = point._replace(collective=cache(partial(parts[stop - 1].start, tensor, link)))
        return graphs, point

    def _run(self, first: int, last: int, point: _Point, *, counts: bool) -> tuple[_Graph, _Point]:
        before = self._saved.size_bytes if self._saved is not None else 0
        leaves = point.tensors
        if torch.is_grad_enabled():
            flags = zip(point.tensors, point.has_gradient, strict=True)
            leaves = tuple(None if tensor is None else tensor.detach().requires_grad_(flag) for tensor, flag in flags)
        values: tuple[Tensor | None, ...] = leaves
        for part in self._segments.parts[first:last]:
            values = part.run(values, self._given)  # type: ignore[arg-type]
        if last == len(self._segments.parts):
            values = self._close(values if isinstance(values, HeadOutput) else values[0])  # type: ignore[arg-type]
        kept = tuple(leaf if leaf is not None and leaf.requires_grad else None for leaf in leaves)
        if self._saved is not None:
            for leaf in kept:
                if leaf is not None:
                    self._saved.add(leaf)
        grown = self._saved.size_bytes - before if self._saved is not None and counts else 0
        edges = tuple(None if value is None or not value.requires_grad else get_gradient_edge(value) for value in values)
        has_gradient = tuple(edge is not None for edge in edges)
        outputs = tuple(None if value is None else value.detach() for value in values)
        return _Graph(first, last, kept, edges, grown), _Point(outputs, has_gradient=has_gradient)

    def _retreat(self, graph: _Graph) -> None:
        """Run a graph's backward; the gradient of its last input goes through the mirror of the collective before it."""
        gradients = self._point.arrived().tensors
        pairs = zip(graph.outputs, gradients, strict=True)
        roots = [(edge, gradient) for edge, gradient in pairs if edge is not None and gradient is not None]
        if roots:
            torch.autograd.backward(*zip(*roots, strict=True))  # type: ignore[arg-type]
        found = tuple(None if leaf is None else leaf.grad for leaf in graph.leaves)
        self._point = _Point(found)
        if graph.first == 0 and self.hidden is not None and self.hidden.requires_grad:
            self.hidden.grad = found[0]
        before = self._segments.parts[graph.first - 1] if graph.first else None
        if before is not None and before.behind is not None and self._open and found[-1] is not None:
            self._point = _Point(found, cache(partial(before.start, found[-1], self._stage.link, is_backward=True)))
