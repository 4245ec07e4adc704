"""Checks of what a balancer is asked to place."""

from collections.abc import Mapping, Sequence

from multimodal.values.errors import AssignmentError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths


def validate_inputs(
    lengths: Sequence[SampleLengths], *, graph: ModelGraph, micro_batch_size: int, encoder_micro_batch_sizes: Mapping[str, int]
) -> None:
    """Check a global batch and the microbatch sizes; raises AssignmentError with what to change. O(items)."""
    if not lengths:
        raise AssignmentError("the global batch has no samples; give at least one (check --global-batch-size and the data)")
    if micro_batch_size < 1:
        raise AssignmentError(f"micro batch size {micro_batch_size} must be at least 1; set --micro-batch-size")
    encoders = [unit.name for unit in graph.encoders]
    for name, size in encoder_micro_batch_sizes.items():
        if name not in encoders:
            raise AssignmentError(
                f"an encoder micro batch size is given for '{name}', which is no encoder of the model "
                f"(encoders: {', '.join(encoders) or 'none'}); remove it"
            )
        if size < 1:
            raise AssignmentError(f"unit '{name}': micro batch size {size} must be at least 1; set --{name}-micro-batch-size")
    generators = [unit.name for unit in graph.generators]
    seen: set[int] = set()
    for sample in lengths:
        if sample.sample_id in seen:
            raise AssignmentError(f"sample {sample.sample_id} is in the global batch twice; give every sample an id of its own")
        seen.add(sample.sample_id)
        for index, item in enumerate(sample.items):
            if item.unit not in encoders and item.unit not in generators:
                raise AssignmentError(
                    f"item {index} of sample {sample.sample_id} is for unit '{item.unit}', which is no encoder of the model "
                    f"(encoders: {', '.join(encoders) or 'none'}); remove the item or add the encoder"
                )
