"""Bytes that a rank needs under a layout, in closed form, by which planners prune before they simulate.

Static bytes are exact. Activations are those of the microbatches in flight; the samples of these are assumed to weigh, in total,
three standard deviations more than the mean, but no sample more than the heaviest.
"""

import math
from collections import Counter
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from multimodal.balance.algorithms.post_balance import partition_longest_first
from multimodal.cost.layers.collectives import LAYERS_AHEAD, held_key_bytes
from multimodal.cost.layers.layer import ActivationBytes, ActivationCase, Implementation
from multimodal.cost.layers.registry import LAYER_KINDS, describe_layer
from multimodal.cost.memoize import memoized
from multimodal.cost.step_memory import layer_static_bytes
from multimodal.cost.unit_load import UnitLoad
from multimodal.plan.partition_layers import Range
from multimodal.plan.planners.estimate.unit_layout import UnitLayout
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize, plain_schedule

NUM_DRAWN = 512
"""Microbatches drawn from the lengths."""
SEED = 0


def draw_microbatches(weights: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return the weights of microbatches of drawn samples, balanced longest first, the heaviest first; size: in samples."""
    drawn = weights[np.random.default_rng(SEED).integers(len(weights), size=NUM_DRAWN * size)]
    bins = partition_longest_first(drawn.tolist(), num_bins=NUM_DRAWN)
    return np.sort([drawn[list(each)].sum() for each in bins])[::-1]


class LayerMemory(NamedTuple):
    """The memory that one layer needs, all tensor parallel ranks together."""

    num_weights: int
    num_trained: int
    """Weights that have gradients."""
    num_shared: int
    """Weights of experts that replicas share."""
    num_sharers: int
    activations: ActivationBytes
    """Bytes of one average sample, if context parallel ranks do not share its tokens."""
    spread_activations: ActivationBytes
    """Bytes of one average sample over all context parallel ranks that share its tokens."""
    bytes_per_element: int
    zero_stage: int

    def activation_bytes(self, tensor_parallel_size: int, context_parallel_size: int) -> float:
        """Bytes that one context parallel rank keeps for the backward of one average sample."""
        found = self.spread_activations if context_parallel_size > 1 else self.activations
        return found.all_ranks(tensor_parallel_size=tensor_parallel_size) / context_parallel_size

    def static_bytes(self, data_parallel_size: int) -> float:
        """Weights, gradients and optimizer state; data_parallel_size: ranks that hold the same weights."""
        trained = self.num_shared if self.num_trained == self.num_weights else 0  # adapters have none in experts
        shares = (
            (self.num_trained - trained, True, 1),
            (self.num_weights - self.num_trained - self.num_shared + trained, False, 1),
            (trained / self.num_sharers, True, self.num_sharers),
            ((self.num_shared - trained) / self.num_sharers, False, self.num_sharers),
        )
        bytes_of = partial(layer_static_bytes, zero_stage=self.zero_stage, bytes_per_element=self.bytes_per_element)
        return sum(
            bytes_of(num_weights, is_trained=is_trained, data_parallel_size=max(1, data_parallel_size // num_sharers))
            for num_weights, is_trained, num_sharers in shares
        )


@memoized
def range_bytes(
    request: PlanningRequest, unit: str, ranges: tuple[Range, ...], size: StageSize, weight_copies: int
) -> tuple[float, float]:
    """Return the static bytes of layer ranges per rank, and the activations of one average sample on all ranks."""
    layers = request.graph.unit(unit).layers
    counts = Counter(layers[layer] for first, end in ranges for layer in range(first, end))
    static = sum(count * layer_memory(request, unit, kind).static_bytes(weight_copies) for kind, count in counts.items())
    kept = sum(count * layer_memory(request, unit, kind).activation_bytes(*size) for kind, count in counts.items())
    return static / size.tensor, kept


def stage_bytes(request: PlanningRequest, unit: str, layout: UnitLayout, stage_index: int, *, num_samples: float) -> float:
    """Weights, gradients and optimizer state of one stage and the activations of `num_samples` samples in it, per rank."""
    static, kept = range_bytes(request, unit, layout.stages[stage_index], layout.size, layout.weight_copies)
    return static + (kept * heavy_count(request, unit, num_samples) / layout.size.tensor if num_samples > 0 else 0.0)


@memoized
def working_bytes(request: PlanningRequest, unit: str, size: StageSize) -> float:
    """Return the bytes of a rank while a layer runs, as in `StepMemory`: recomputed activations, gathered weights and keys."""
    shape, kinds = request.graph.unit(unit).transformer, dict.fromkeys(request.graph.unit(unit).layers)
    samples = heavy_count(request, unit, request.default_micro_batch_size)
    working = 0.0
    if request.recompute == "full":
        layers = [layer_memory(request, unit, kind, is_recomputed=False) for kind in kinds if LAYER_KINDS[kind].recomputes]
        largest = max((layer.activation_bytes(*size) for layer in layers), default=0.0)
        working = samples * largest / size.tensor
    if request.zero_stage == 3:
        weights = max(layer_memory(request, unit, kind).num_weights for kind in kinds)
        working += (1 + LAYERS_AHEAD) * weights * request.cluster.bytes_per_element / size.tensor
    if size.context > 1:
        num_tokens = samples * request.loads.mean[unit][0]
        bytes_per_group = num_tokens * 2 * shape.head_channels * request.cluster.bytes_per_element
        working += held_key_bytes(shape.query_groups // size.tensor, bytes_per_group=bytes_per_group)
    return working


def heavy_count(request: PlanningRequest, unit: str, num_samples: float) -> float:
    """Return the number of average samples that weigh as much as `num_samples` heavy ones may."""
    deviation, heaviest = request.loads.spreads[unit]
    return min(num_samples + 3 * deviation * math.sqrt(num_samples), num_samples * heaviest)


def samples_within(request: PlanningRequest, unit: str, average: ArrayLike) -> NDArray[np.float64]:
    """Return the number of heavy samples that may weigh as much as `average` average ones: the inverse of `heavy_count`."""
    weight = np.asarray(average, dtype=np.float64)
    deviation, heaviest = request.loads.spreads[unit]
    root = (np.sqrt(9 * deviation**2 + 4 * weight) - 3 * deviation) / 2
    return np.asarray(np.maximum(root**2, weight / heaviest))


def heaviest_share(request: PlanningRequest, unit: str, *, count: int, of: int) -> float:
    """Return the mean tokens of the `count` heaviest of `of` balanced microbatches, relative to an average microbatch."""
    if not request.loads.spreads[unit][0]:
        return 1.0
    sums = _microbatch_tokens(request, unit)
    heaviest = sums[: max(1, round(len(sums) * min(1.0, count / of)))]
    return float(heaviest.mean() / sums.mean()) if sums.any() else 1.0


@memoized
def _microbatch_tokens(request: PlanningRequest, unit: str) -> NDArray[np.float64]:
    return draw_microbatches(request.loads.of_samples[unit][:, 0], request.default_micro_batch_size)


@memoized
def layer_memory(request: PlanningRequest, unit: str, kind: str, *, is_recomputed: bool = True) -> LayerMemory:
    """Return the memory of one layer of this kind; is_recomputed: True if it is recomputed as the request says."""
    described, need = request.graph.unit(unit), request.backward_need(unit, kind)
    load = UnitLoad(*map(math.ceil, request.loads.mean[unit]))
    layer = describe_layer(request.graph, described, kind, vocab_size=request.vocab_size)
    layers: Implementation = "local" if described.needs_local_layers else request.implementation(plain_schedule())
    case = ActivationCase(need, request.cluster.bytes_per_element, layers, request.recompute if is_recomputed else None)
    return LayerMemory(
        num_weights=layer.num_held_weights,
        num_trained=layer.num_trained_weights(need),
        num_shared=layer.num_expert_weights,
        num_sharers=request.experts_of(unit),
        activations=layer.activation_bytes(load, case),
        spread_activations=layer.activation_bytes(load, case._replace(is_spread=True)),
        bytes_per_element=case.bytes_per_element,
        zero_stage=request.zero_stage,
    )
