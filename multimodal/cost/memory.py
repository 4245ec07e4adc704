"""Bytes that weights, gradients and optimizer state take all the time."""

BYTES_PER_ELEMENT = 2
"""bf16 activations and weights."""
GRADIENT_BYTES = 4
"""Megatron accumulates gradients in fp32."""
OPTIMIZER_BYTES = 12
"""Adam in fp32: master weight and two moments."""
ZERO_STAGES = (0, 1, 2, 3)
"""What replicas share instead of each keeping all: 0 nothing, 1 optimizer state, 2 gradients as well, 3 weights as well."""


def default_zero_stage(bytes_per_element: int) -> int:
    """What training shares: optimizer state (1), but nothing in fp64, whose optimizer stays whole on every replica."""
    return 0 if bytes_per_element > 4 else 1


def layer_static_bytes(
    num_weights: int,
    *,
    is_trained: bool,
    data_parallel_size: int,
    zero_stage: int = 1,
    bytes_per_element: int = BYTES_PER_ELEMENT,
) -> float:
    """Return the bytes of so many weights on one replica, all tensor parallel ranks together.

    zero_stage: see ZERO_STAGES; data_parallel_size: ranks that hold the same weights, context parallel ones included. Weights in
    fp32 are their own master weights; in fp64, gradients and moments are fp64, too.
    """
    weights = num_weights * bytes_per_element / (data_parallel_size if zero_stage >= 3 else 1)
    if not is_trained:
        return weights
    optimizer = OPTIMIZER_BYTES if bytes_per_element < 4 else 2 * bytes_per_element
    gradients = max(GRADIENT_BYTES, bytes_per_element) / (data_parallel_size if zero_stage >= 2 else 1)
    return weights + num_weights * (gradients + optimizer / (data_parallel_size if zero_stage >= 1 else 1))
