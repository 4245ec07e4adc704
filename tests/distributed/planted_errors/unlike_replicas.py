"""Errors of replicas that differ in TP, PP and virtual stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron.runtime.gradients import unlike_gradients
from megatron.runtime.gradients.unlike_gradients import UnlikeGradients, start_sum, start_sums
from multimodal.model.unit_stage import UnitStage


@contextmanager
def _parts_not_summed() -> Iterator[None]:
    def started(views: Sequence[torch.Tensor], group: dist.ProcessGroup, **options: Any) -> Callable[[], None]:
        is_part = group.size() == 2  # a rank of each replica; what is not cut is held by three
        return (lambda: None) if is_part else start_sum(views, group, **options)

    with patch.object(unlike_gradients, "start_sum", started):
        yield


@contextmanager
def _other_part_of_whole_matrices() -> Iterator[None]:
    original = unlike_gradients._part_of

    def taken(shard: torch.Tensor, sharding: Any, part: Any, *, rank: int, size: int) -> torch.Tensor:
        mirrored = part._replace(first=part.num_parts - part.end, end=part.num_parts - part.first)
        return original(shard, sharding, part if size > 1 else mirrored, rank=rank, size=size)

    with patch.object(unlike_gradients, "_part_of", taken):
        yield


@contextmanager
def _norms_of_the_first_tensor_parallel_rank() -> Iterator[None]:
    def summed(stage: UnitStage, *args: Any, **options: Any) -> Iterator[Callable[[], None]]:
        def started(views: Sequence[torch.Tensor], group: dist.ProcessGroup, **options: Any) -> Callable[[], None]:
            is_counted = [stage.groups.tp.rank() == 0] * len(views) if group.size() == 3 else None
            return start_sum(views, group, is_counted=is_counted)

        with patch.object(unlike_gradients, "start_sum", started):
            yield from start_sums(stage, *args, **options)

    with patch.object(unlike_gradients, "start_sums", summed):
        yield


@contextmanager
def _tied_embeddings_not_summed() -> Iterator[None]:
    with patch.object(UnlikeGradients, "sum_shared_embeddings", lambda gradients: None):
        yield


@contextmanager
def _only_first_ranges_finished() -> Iterator[None]:
    original = UnlikeGradients._finish

    def finished(gradients: UnlikeGradients, stage_index: int) -> None:
        if stage_index == min(gradients.stages):
            original(gradients, stage_index)

    with patch.object(UnlikeGradients, "_finish", finished):
        yield


ERRORS_OF_UNLIKE_REPLICAS: dict[str, Callable[[], Any]] = {
    "parts are not summed over replicas": _parts_not_summed,
    "a whole matrix gives its other half": _other_part_of_whole_matrices,
    "norms of one tensor parallel rank's tokens alone": _norms_of_the_first_tensor_parallel_rank,
    "tied embeddings of every replica and stage apart": _tied_embeddings_not_summed,
    "sums of a stage's second layer range do not arrive": _only_first_ranges_finished,
}
