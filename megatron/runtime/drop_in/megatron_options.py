"""Options of Megatron's that a schedule of Braid's would ignore: each is refused with what to do about it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from multimodal.values.errors import ConfigError


class _Refusal(NamedTuple):
    """One option of Megatron's config that cannot be honoured."""

    option: str
    is_used: Callable[[Any], bool]
    """Takes the option's value."""
    reason: str
    fix: str


REFUSALS = (
    _Refusal(
        "variable_seq_lengths",
        bool,
        "shapes are not exchanged before messages",
        "pad every microbatch to seq_length and set it to False",
    ),
    _Refusal("mtp_standalone", bool, "its stage sends tensors of other shapes", "leave the MTP layers in the last stage"),
    _Refusal(
        "overlap_moe_expert_parallel_comm",
        bool,
        "it replaces forward and backward by pieces of both, in an order of its own",
        "set it to False",
    ),
    _Refusal("hybrid_context_parallel", bool, "it decides the order of microbatches itself", "set it to False"),
    _Refusal("use_ring_exchange_p2p", bool, "messages are sent by isend and irecv", "set it to False"),
    _Refusal("fine_grained_activation_offloading", bool, "it expects the order of Megatron's own schedules", "set it to False"),
    _Refusal("moe_paged_stash", bool, "it expects the order of Megatron's own schedules", "set it to False"),
    _Refusal(
        "cuda_graph_impl",
        lambda value: value not in (None, "none"),
        "graphs are captured in the order of Megatron's own schedules",
        "set it to 'none'",
    ),
)
"""Everything else either works, or (overlap_p2p_comm, batch_p2p_comm and the like) only says how Megatron sends its messages."""


def check_options(config: Any, *, num_stages: int, num_chunks: int) -> None:
    """Check that a step can honour Megatron's config.

    config: a ModelParallelConfig; num_stages: pipeline parallel size; num_chunks: model chunks that the loop gave.
    Raises ConfigError that names the option and the fix.
    """
    for refusal in REFUSALS:
        value = getattr(config, refusal.option, None)
        if refusal.is_used(value):
            raise ConfigError(
                f"{refusal.option}={value!r} cannot be used with Braid's schedules: {refusal.reason}; {refusal.fix}, or call "
                "patches.revert() to run Megatron's own schedule"
            )
    expected = config.virtual_pipeline_model_parallel_size or 1
    if num_chunks != expected or (num_stages == 1 and num_chunks > 1):
        raise ConfigError(
            f"the model has {num_chunks} chunks, pipeline_model_parallel_size is {num_stages} and "
            f"virtual_pipeline_model_parallel_size {config.virtual_pipeline_model_parallel_size}; give a list of as many chunks "
            "as the latter says, and leave it out where there is one pipeline stage"
        )
    group_size = getattr(config, "microbatch_group_size_per_vp_stage", None)
    if num_chunks > 1 and group_size not in (None, num_stages):
        raise ConfigError(
            f"microbatch_group_size_per_vp_stage={group_size} would be ignored: the schedule decides the order; leave it out and "
            "choose the order by patches.apply(schedule=...)"
        )
    if num_stages > 1 and config.pipeline_dtype is None:
        raise ConfigError("pipeline_dtype is None, but stages must know what they receive; set it to the dtype of activations")
