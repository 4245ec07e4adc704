"""Gradients of one rank: reduced inside each unit, with one norm over all units, clipped once (ZeRO-1 by Megatron's DDP)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.nn import Parameter

from megatron.runtime.communication.units import Membership
from megatron.runtime.gradients.scheduled_collectives import (
    Bucket,
    ReductionByLayer,
    buckets_of_replicas,
    call_one_by_one,
    is_by_gloo_on_device,
    nothing_to_wait_for,
    overlapping,
    start_parameter_gathering,
    sum_copies,
    sum_over_tokens,
    wrap_with_layer_buckets,
)
from megatron.runtime.gradients.sharded_layer import WeightPiece
from megatron.runtime.gradients.state_shares import StateShares
from multimodal.model.unit_stage import UnitStage
from multimodal.values.action import LayerRange


class UnitGradients:
    """Gradient buffers and reductions of this rank's stages of one unit."""

    sharded: Mapping[int, Any] = MappingProxyType({})
    """Virtual stage -> its `ShardedStage`, which gathers weights, if these are sharded, too."""
    is_copy = False
    """True if sharded weights are a copy of others, which are counted and written."""

    def __init__(
        self,
        stages: Mapping[int, UnitStage],
        *,
        membership: Membership,
        is_sharded: bool,
        reduces_by_layer: bool = False,
        shares: StateShares | None = None,
    ) -> None:
        """stages: virtual stage -> module; is_sharded: reduce-scatter for Megatron's sharded optimizer (ZeRO-1), else all-reduce.

        reduces_by_layer: keep a buffer of about the size of a layer for each collective, so that a reduction can begin in its
        stage's last backward. shares: the ranges that this rank steps, if Megatron's optimizers do not determine them.
        """
        self.membership = membership
        self.stages = stages
        self.is_sharded, self.shares = is_sharded, shares
        self.wrapped = {
            index: wrap_in_gradient_buffers(
                stage, groups=membership.groups, is_sharded=is_sharded, reduces_by_layer=reduces_by_layer
            )
            for index, stage in stages.items()
            if any(parameter.requires_grad for parameter in stage.parameters())
        }
        self._ungathered: set[int] = set()
        self._gathering: set[int] = set()
        self._by_layer: dict[int, ReductionByLayer] = {}

    @property
    def is_trained(self) -> bool:
        """True if this rank trains anything."""
        return bool(self.wrapped)

    @property
    def pieces(self) -> Sequence[WeightPiece] | None:
        """The pieces of parameters that this rank steps; None if Megatron's optimizers determine them."""
        return None if self.shares is None else self.shares.pieces()

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        for wrapped in self.wrapped.values():
            wrapped.zero_grad_buffer()

    def start_reduction(self, stage_index: int, layers: LayerRange | None = None) -> Callable[[], None]:
        """Start summing a stage's gradients over all ranks that hold its parameters; returns a function that waits for it.

        After `expect_last_backward` it is the rest of them. layers: those to sum, in units with unlike replicas. Context parallel
        ranks count as replicas: they had other tokens. Every rank must start the reductions of a group in one order.
        """
        by_layer = self._by_layer.get(stage_index)
        if by_layer is not None and by_layer.is_expecting:
            return by_layer.complete()
        return self._start_at_once(stage_index, layers)

    def expect_last_backward(self, stage_index: int) -> Callable[[], None]:
        """Let the next backward of a stage start its reduction, layer by layer; `start_reduction` then starts the rest."""
        if stage_index not in self._by_layer:
            finish = partial(self._finish, stage_index)
            self._by_layer[stage_index] = ReductionByLayer(
                self.wrapped[stage_index], buckets=self._buckets(stage_index), finish=finish
            )
        self._by_layer[stage_index].expect_last_backward()
        return nothing_to_wait_for

    def _start_at_once(self, stage_index: int, layers: LayerRange | None) -> Callable[[], None]:
        self._sum_over_tensor_parallel(self.stages[stage_index].parameters())
        with overlapping(self.wrapped[stage_index], "overlap_grad_reduce"):
            self.wrapped[stage_index].start_grad_sync()  # reduce-scatters with a sharded optimizer
        return partial(self._finish, stage_index)

    def _buckets(self, stage_index: int) -> Sequence[Bucket]:
        return list(buckets_of_replicas(self.wrapped[stage_index], prepare=self._sum_over_tensor_parallel))

    def _finish(self, stage_index: int) -> None:
        """Wait for the reductions that were started."""
        with overlapping(self.wrapped[stage_index], "overlap_grad_reduce"):
            self.wrapped[stage_index].finish_grad_sync()

    def _sum_over_tensor_parallel(self, parameters: Iterable[Parameter]) -> None:
        trained = ((each, main_gradient(each)) for each in parameters if each.requires_grad)
        sum_over_tokens(trained, self.membership.groups.tp)

    @contextmanager
    def updating(self, *, gathers_later: bool) -> Iterator[None]:
        """Let an optimizer step inside; gathers_later: leave gathering of updated parameters until they are needed."""
        with ExitStack() as settings:
            for wrapped in self.wrapped.values() if self.is_sharded and gathers_later else ():
                settings.enter_context(overlapping(wrapped, "overlap_param_gather"))
            yield
        if self.shares is not None:
            self._ungathered = self.shares.shared_stages
            if not gathers_later:
                self.complete_parameters()
        elif self.is_sharded and gathers_later:
            self._ungathered = set(self.wrapped)

    def partial_pieces(self) -> dict[Tensor, WeightPiece | None]:
        """Return, for parameters of which others step a part that is not gathered yet, the piece that is up to date here."""
        stages = self._ungathered | self._gathering
        if self.shares is None:
            assert not stages, "Megatron's sharded optimizer must have gathered its parameters"
            return {}
        found: dict[Tensor, WeightPiece | None] = {each: None for stage in stages for each in self.shares.parameters(stage)}
        return found | {piece.parameter: piece for piece in self.shares.pieces(stages)}

    def start_gathering(self, stage_index: int) -> Callable[[], None]:
        """Start gathering one stage's parameters, if an optimizer left that; returns a function that waits for it."""
        if stage_index not in self._ungathered:
            return nothing_to_wait_for
        self._ungathered.remove(stage_index)
        self._gathering.add(stage_index)
        wrapped, shares = self.wrapped[stage_index], self.shares
        finish_gathering = shares.start_gathering(stage_index) if shares else start_parameter_gathering(wrapped)

        def finish() -> None:
            finish_gathering()
            self._gathering.discard(stage_index)

        return finish

    def complete_parameters(self) -> None:
        """Gather all parameters that are not gathered yet."""
        for finish in [self.start_gathering(stage_index) for stage_index in sorted(self._ungathered)]:
            finish()

    def sum_shared_embeddings(self) -> None:
        """Give both copies of tied word embeddings, on the first and the last stage, the sum of their gradients."""
        copies = [
            stage.shared_parameter for stage in self.stages.values() if getattr(stage.shared_parameter, "shared_embedding", False)
        ]
        gradients = [main_gradient(copy) for copy in copies if copy is not None and copy.requires_grad]
        sum_copies(gradients, self.membership.groups.embd)


def wrap_in_gradient_buffers(
    stage: UnitStage, *, groups: ProcessGroupCollection, is_sharded: bool, reduces_by_layer: bool = False
) -> DistributedDataParallel:
    """Let a stage's backwards add to gradient buffers, which replicas reduce; other arguments: as for `UnitGradients`."""
    if is_by_gloo_on_device(groups.dp_cp):
        param_and_grad_buffer._coalescing_manager = call_one_by_one
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=stage.options.params_dtype == torch.bfloat16,
        overlap_grad_reduce=False,
        use_distributed_optimizer=is_sharded,
    )
    if reduces_by_layer:
        return wrap_with_layer_buckets(stage, config, groups=groups)
    return DistributedDataParallel(stage.config, config, stage, pg_collection=groups)


def main_gradient(parameter: Tensor) -> Tensor:
    """Return the buffer that backwards add a parameter's gradient to."""
    return parameter.main_grad  # type: ignore[attr-defined]


def global_gradient_norm(optimizers: Sequence[tuple[MegatronOptimizer, bool]], *, device: torch.device) -> Tensor:
    """Return the L2 norm [1] of all gradients of all units, on the device; every parameter of the model counts once.

    optimizers: (optimizer with prepared gradients, True if this rank's gradients are counted): replicas and context parallel
    ranks hold the same gradients if the optimizer is unsharded, so only the first counts.
    """
    square = torch.zeros(1, dtype=torch.float64, device=device)
    gradients = []
    for optimizer in (optimizer for optimizer, counts in optimizers if counts):
        for parameter in optimizer.get_parameters():  # of tied embeddings, and of what tensor parallel ranks replicate, one copy
            is_own = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, optimizer.tp_group)
            if parameter.grad is not None and is_own:
                gradients.append(parameter.grad.detach())
    if gradients:  # a few kernels for all of them
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        square += torch.stack(torch._foreach_norm(gradients, 2, dtype)).double().square().sum()
    dist.all_reduce(square)
    return square.sqrt()


def clip_gradients(parameters: Iterable[Tensor], *, norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that the global norm [1] is at most `max_norm` (Megatron's formula), without a host wait."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        coefficient = (max_norm / (norm + 1.0e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, coefficient[0].to(gradients[0].dtype))
