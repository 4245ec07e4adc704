"""One layer whose weights and gradients are sharded over the ranks that hold the same ones (ZeRO-3).

All parameters of the layer are views of one flat buffer, or of two if only some are trained. Each rank permanently keeps an equal
share of its elements; the buffer itself has memory only between gathering and release, so the weights that autograd saved are
valid again in the backward.

The collectives of a pass through a stage's layers, and their order, are fixed beforehand and the same on every rank of the group,
whatever the current microbatch computes: a request for a layer makes all calls up to it, and the end of the pass makes the rest.
A rank without a microbatch makes all calls at once. Gradients are reduced in every backward, or added up and reduced in the last.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.runtime.gradients.scheduled_collectives import sum_over_tokens
from multimodal.attention.context_parallel import all_gather_single, reduce_scatter_single
from multimodal.cost.layers.collectives import LAYERS_AHEAD
from multimodal.values.action import ActionKind
from multimodal.values.errors import ConfigError


class WeightPiece(NamedTuple):
    """This rank's share of one parameter."""

    parameter: Parameter
    elements: range
    """A range of the parameter's flat elements."""
    weight: Tensor
    """[len(elements)], a view of the layer's share."""
    gradient: Tensor | None
    """[len(elements)], a view of the layer's share of the gradient, float32 or wider; None where the parameter is frozen."""
    is_copy: bool = False
    """True if the first replica has another copy: it counts once in the gradient norm, and is written once."""


class ShardedLayer:
    """Parameters of one layer of this rank; its collectives are called on all ranks of `group` in one order.

    parameters: all trained, or all frozen ones; newly initialised, afterwards without memory for its parameters until they are
    gathered; group: the ranks that share the same parameters (replicas and context parallel ranks); tensor_parallel_group: the
    ranks that hold the other parts of them; is_copy: another group's are counted and written.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        group: dist.ProcessGroup,
        tensor_parallel_group: dist.ProcessGroup,
        *,
        is_copy: bool = False,
    ) -> None:
        self.group, self._tensor_parallel_group, self._is_copy = group, tensor_parallel_group, is_copy
        self.parameters = tuple(parameters)
        if len(found := {parameter.dtype for parameter in self.parameters}) != 1:
            raise ConfigError(
                f"a layer mixes parameters of {', '.join(sorted(map(str, found)))}, which cannot share one buffer; use "
                "--data-parallel-sharding-strategy optim"
            )
        sizes = [parameter.numel() for parameter in self.parameters]
        share_size = -(-sum(sizes) // group.size())
        self._range = range(group.rank() * share_size, (group.rank() + 1) * share_size)
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._flat = self.parameters[0].new_zeros(share_size * group.size(), requires_grad=False)
        for parameter, view in zip(self.parameters, self.split(self._flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.share = self._flat[self._range.start : self._range.stop].clone()
        """[share_size]: this rank's weights."""
        dtype = torch.float64 if self.share.dtype == torch.float64 else torch.float32
        self.gradient_share = self.share.new_zeros(share_size, dtype=dtype) if self.is_trained else None
        """[share_size]: the sum over all microbatches of all ranks so far."""
        self._unreduced: Tensor | None = None
        """[all elements]: this rank's gradients that are not reduced yet."""
        self._num_users = 0
        self._gathering: dist.Work | None = None
        self._finish_reduction: Callable[[], None] | None = None
        self._free()

    @property
    def is_trained(self) -> bool:
        """True if the layer has gradients."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def pieces(self) -> tuple[WeightPiece, ...]:
        """This rank's share, parameter by parameter, without parameters that have no share here."""
        found = []
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            first, last = max(start, self._range.start), min(start + parameter.numel(), self._range.stop)
            if first < last:
                here = slice(first - self._range.start, last - self._range.start)
                is_trained = self.gradient_share is not None and parameter.requires_grad
                gradient = self.gradient_share[here] if is_trained else None  # type: ignore[index]
                elements = range(first - start, last - start)
                found.append(WeightPiece(parameter, elements, self.share[here], gradient, self._is_copy))
        return tuple(found)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Return views of a buffer of all elements, one in the shape of each parameter."""
        return tuple(
            flat[start : start + parameter.numel()].view(parameter.shape)
            for parameter, start in zip(self.parameters, self._starts, strict=True)
        )

    def start_gathering(self) -> None:
        """Start gathering all shares; every call is matched by one of `release`."""
        self._num_users += 1
        if self._num_users == 1:
            self._flat.untyped_storage().resize_(self._flat.numel() * self._flat.element_size())
            self._gathering = all_gather_single(self._flat, self.share, group=self.group, async_op=True)

    def finish_gathering(self) -> None:
        """Wait until the parameters are gathered."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Free the memory, unless it has another user."""
        self._num_users -= 1
        if self._num_users == 0:
            self.finish_gathering()
            self._free()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add the gradients in the parameters' `grad` to those that are not reduced yet, and clear them there."""
        if self._unreduced is None:
            assert self.gradient_share is not None
            self._unreduced = torch.zeros_like(self._flat, dtype=self.gradient_share.dtype, device=self.share.device)
        for parameter, view in zip(self.parameters, self.split(self._unreduced), strict=True):
            if parameter.grad is not None:
                view.add_(parameter.grad)
                parameter.grad = None

    def start_reduction(self) -> None:
        """Start adding all gradients that are not reduced yet to the shares of all ranks; of one that computed nothing, zeros."""
        assert self.gradient_share is not None
        self.finish_reduction()
        self.take_gradients()
        whole, self._unreduced = self._unreduced, None
        assert whole is not None
        sum_over_tokens(zip(self.parameters, self.split(whole), strict=True), self._tensor_parallel_group)
        found = torch.empty_like(self.gradient_share)
        work = reduce_scatter_single(found, whole, group=self.group, async_op=True)

        def finish() -> None:
            work.wait()
            self.gradient_share.add_(found)  # type: ignore[union-attr]

        self._finish_reduction = finish

    def finish_reduction(self) -> None:
        """Wait for a reduction that is under way."""
        if self._finish_reduction is not None:
            self._finish_reduction()
            self._finish_reduction = None

    def check_reduced(self) -> None:
        """Check that no gradient is left and no memory is held, as at the end of a step."""
        assert self._num_users == 0 and self._finish_reduction is None, "a pass through the layers was not finished"
        assert self._unreduced is None, "a step ended before the backward that was to reduce"
        assert all(parameter.grad is None for parameter in self.parameters), "a gradient came after its layer's reduction"

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold the whole parameters inside, to read them or to write them alike on all ranks; collective."""
        self.start_gathering()
        self.finish_gathering()
        yield
        self.share.copy_(self._flat[self._range.start : self._range.stop])
        self.release()

    def _free(self) -> None:
        self._flat.untyped_storage().resize_(0)


class Visit(NamedTuple):
    """The collectives of a pass at one layer, by its index in the unit."""

    layer: int
    gathers: tuple[Hashable, ...]
    """Keys of the `ShardedLayer`s that are gathered."""
    reduces: tuple[Hashable, ...]
    """Keys of the `ShardedLayer`s whose gradients are reduced."""


class LayerPass:
    """Visits layers one after another, and gathers the next ones' weights while one computes."""

    def __init__(
        self, kind: ActionKind, visits: Sequence[Visit], layers: Mapping[Any, ShardedLayer], *, reduces: bool = True
    ) -> None:
        """reduces: False if gradients are kept for a later pass to reduce."""
        self.kind, self._visits, self._layers, self._reduces = kind, visits, layers, reduces
        self._positions = {visit.layer: position for position, visit in enumerate(visits)}
        self._position = -1
        self._is_inside = False

    def enter(self, layer: int) -> None:
        """Gather a layer's weights; does nothing if the pass is already at this layer, or does not stop there."""
        target = self._positions.get(layer, -1)
        while self._position < target:
            self._leave()
            for ahead in range(LAYERS_AHEAD if self._position < 0 else 0):
                self._start_gathering(ahead)
            self._position += 1
            self._is_inside = True
            self._start_gathering(self._position + LAYERS_AHEAD)
            for key in self._visits[self._position].gathers:
                self._layers[key].finish_gathering()

    def leave(self, layer: int) -> None:
        """Release a layer's weights, and take its gradients."""
        if self._positions.get(layer) == self._position:
            self._leave()

    def finish(self) -> None:
        """Make all remaining calls, and wait for them."""
        if self._visits:
            self.enter(self._visits[-1].layer)
        self._leave()
        for visit in self._visits:
            for layer in visit.reduces:
                self._layers[layer].finish_reduction()

    def reduce_kept(self) -> None:
        """Reduce the gradients that were kept."""
        kept = [self._layers[key] for visit in self._visits for key in visit.reduces]
        for layer in kept:
            layer.start_reduction()
        for layer in kept:
            layer.finish_reduction()

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
            if self._reduces:
                self._layers[layer].start_reduction()
            else:
                self._layers[layer].take_gradients()

    def _start_gathering(self, position: int) -> None:
        for layer in self._visits[position].gathers if position < len(self._visits) else ():
            self._layers[layer].start_gathering()
