"""Replicas of a loop's model whose pipelines are cut differently: gradients add up layer by layer, among those that hold it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron.runtime import platform
from megatron.runtime.communication.gather_objects import gather_objects
from multimodal.plan.communicators import holders_of_layer
from multimodal.values.errors import ConfigError
from multimodal.values.plan import UnitPlan


class UnlikeReplicas:
    """The groups of ranks that hold a layer, of a unit whose replicas are cut differently, with one tensor parallel size."""

    def __init__(self, unit: UnitPlan, make_group: Callable[[Sequence[int]], Any]) -> None:
        """Make the groups; collective over the world."""
        rank = dist.get_rank()
        self._replica = next((index for index, replica in enumerate(unit.replicas) if rank in replica.ranks), -1)
        self._size, self._last = len(unit.replicas), unit.shared_ranges[-1].stop - 1
        self._unit = make_group(sorted(unit.ranks))
        self._groups: dict[int, Any] = {}
        """By layer, of those that this rank holds."""
        self._is_checked = False
        for layers in unit.shared_ranges:
            for ranks in zip(*(stage.ranks for stage in holders_of_layer(unit, layers.start)), strict=True):
                group = make_group(sorted(ranks))
                if rank in ranks:
                    self._groups |= dict.fromkeys(layers, group)

    def copy_weights(self, chunks: Sequence[Any]) -> None:
        """Give all replicas the weights of the first one; collective over the unit. Raises ConfigError as `reduce` does."""
        if self._replica < 0:
            return
        self._raise(self._find_misplaced(chunks))
        with torch.no_grad():
            self._add_up([*self._layers(chunks)], lambda parameter: parameter, float(self._replica == 0))

    def reduce(self, chunks: Sequence[Any], count: Tensor | int) -> None:
        """Make every replica's gradients, means over `count` microbatches or tokens, the mean of all; collective over the unit.

        Raises ConfigError on all ranks, in the first step, if a rank has other layers than planned, or weights differ.
        """
        if not self._is_checked:
            self._raise(self._find_misplaced(chunks))
            problem = None
            for group, parameters in self._by_group(self._layers(chunks)):
                total = sum(each.detach().double().sum() for each in parameters)
                bounds = torch.stack([total, -total])
                dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
                if bounds.sum() != 0:
                    problem = "replicas begin with unlike weights; call patches.copy_weights(model) before the optimizer is made"
            self._raise(problem)
            self._is_checked = True
        counts = torch.zeros(self._size, dtype=torch.float64, device=platform.device())
        counts[self._replica] = count
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=self._unit)
        trained = [pair for pair in self._layers(chunks) if pair[0].requires_grad]
        self._add_up(trained, lambda parameter: parameter.main_grad, float(counts[self._replica] / counts.sum().clamp(min=1)))

    def _add_up(self, placed: Sequence[tuple[Any, int | None]], value_of: Callable[[Any], Tensor], weight: float) -> None:
        for group, parameters in self._by_group(placed):
            values = [value_of(each) for each in parameters]
            flat = _flatten_dense_tensors(values)
            flat = flat.mul_(weight) if weight else flat.zero_()  # whatever it was
            dist.all_reduce(flat, group=group)
            torch._foreach_copy_(values, list(_unflatten_dense_tensors(flat, values)))
        for tied in (each for each, _ in placed if getattr(each, "shared_embedding", False)):
            embedding = parallel_state.get_embedding_group()
            dist.broadcast(value_of(tied), dist.get_global_rank(embedding, 0), group=embedding)

    def _by_group(self, placed: Iterable[tuple[Any, int | None]]) -> Iterable[tuple[Any, list[Any]]]:
        """Return parameters with a layer by the ranks that hold it, in the order of the layers."""
        found: dict[int, tuple[Any, list[Any]]] = {}
        of_layers = [(layer, parameter) for parameter, layer in placed if layer is not None]
        for layer, parameter in sorted(of_layers, key=lambda pair: pair[0]):
            group = self._groups[layer]
            found.setdefault(id(group), (group, []))[1].append(parameter)
        return found.values()

    def _layers(self, chunks: Sequence[Any]) -> Iterator[tuple[Any, int | None]]:
        """Yield parameters and the layers of the plan that have them; None for the copy of embeddings in a last stage."""
        for chunk in chunks:
            model = next((each for each in chunk.modules() if isinstance(each, LanguageModule)), chunk)
            layer_of = {id(each): layer.layer_number for layer in model.decoder.layers for each in layer.parameters()}
            ends = (getattr(model.decoder, "final_layernorm", None), getattr(model, "output_layer", None))
            layer_of |= {id(each): self._last for end in ends if end is not None for each in end.parameters()}
            for parameter in chunk.parameters():
                is_copy = getattr(parameter, "shared_embedding", False) and not parallel_state.is_pipeline_first_stage()
                yield parameter, None if is_copy else layer_of.get(id(parameter), 0)

    def _find_misplaced(self, chunks: Sequence[Any]) -> str | None:
        if not (wrong := {layer for _, layer in self._layers(chunks) if layer is not None} - self._groups.keys()):
            return None
        return (
            f"rank {dist.get_rank()} has layers {sorted(wrong)}, and the plan's are {sorted(self._groups)} (0: embeddings, "
            f"{self._last}: head); cut the model as the plan does, by the config's pipeline_model_parallel_layout for example"
        )

    def _raise(self, problem: str | None) -> None:
        """Raise what any rank of the unit found."""
        if found := [each for each in gather_objects(problem, group=self._unit) if each is not None]:
            raise ConfigError(f"replicas of the applied plan that are not alike: {found[0]}")
