"""Checks of what a balancer is asked to place."""

from collections.abc import Sequence

from multimodal.balance.balance_options import BalanceOptions
from multimodal.values.errors import AssignmentError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths

MOST_TOKENS = 2**31 - 1
"""In one item or text: beyond it, sums of squares would not be exact."""


def validate_inputs(lengths: Sequence[SampleLengths], *, graph: ModelGraph, options: BalanceOptions) -> None:
    """Check a global batch and the options; raises AssignmentError with what to change. O(items)."""
    micro_batch_size, encoder_micro_batch_sizes = options.micro_batch_size, options.encoder_micro_batch_sizes
    if not lengths:
        raise AssignmentError("the global batch has no samples; give at least one (check --global-batch-size and the data)")
    if micro_batch_size < 1:
        raise AssignmentError(f"micro batch size {micro_batch_size} must be at least 1; set --micro-batch-size")
    if options.num_microbatches is not None and options.num_microbatches < 1:
        raise AssignmentError(f"{options.num_microbatches} microbatches per replica; there must be at least 1")
    encoders = [unit.name for unit in graph.encoders]
    for name, size in encoder_micro_batch_sizes.items():
        if name not in encoders:
            raise AssignmentError(
                f"an encoder micro batch size is given for '{name}', which is no encoder of the model "
                f"(encoders: {', '.join(encoders) or 'none'}); remove it"
            )
        if size < 1:
            raise AssignmentError(f"unit '{name}': micro batch size {size} must be at least 1; set --{name}-micro-batch-size")
    if unknown := [name for name in options.unit_costs if name not in graph.unit_names]:
        raise AssignmentError(f"a cost is given for '{unknown[0]}', which is no unit of the model; remove it")
    if options.ranks_per_node < 1:
        raise AssignmentError(f"{options.ranks_per_node} ranks per node; there must be at least 1")
    generators = [unit.name for unit in graph.generators]
    seen: set[int] = set()
    for sample in lengths:
        if sample.sample_id in seen:
            raise AssignmentError(f"sample {sample.sample_id} is in the global batch twice; give every sample an id of its own")
        seen.add(sample.sample_id)
        counts = sample.num_text_tokens, sample.num_target_tokens, *(count for item in sample.items for count in item[1:])
        if wrong := [count for count in counts if not (isinstance(count, int) and 0 <= count <= MOST_TOKENS)]:
            raise AssignmentError(
                f"sample {sample.sample_id} has a length of {wrong[0]} tokens; lengths are integers from 0 to {MOST_TOKENS}"
            )
        for index, item in enumerate(sample.items):
            if item.unit not in encoders and item.unit not in generators:
                raise AssignmentError(
                    f"item {index} of sample {sample.sample_id} is for unit '{item.unit}', which is no encoder of the model "
                    f"(encoders: {', '.join(encoders) or 'none'}); remove the item or add the encoder"
                )
