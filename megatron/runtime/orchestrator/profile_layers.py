"""Measures for planners the seconds of a model's layers, kind by kind, which curves are fitted to."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.runtime import platform
from megatron.runtime.orchestrator.machine import device_name, find_value, keep_value, key_of
from megatron.runtime.profiler import LayerTimes, build_layer, time_layer, time_runtime, time_update
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.seconds.layer_curves import Curve, FitError, Interpolated, LayerCurves, PackedSize, fit_error, fit_quadratic
from multimodal.cost.seconds.layer_profile import LayerProfile, ProfileKey, StepProfile
from multimodal.cost.unit_load import UnitLoad
from multimodal.model.transformer_config import BuildOptions
from multimodal.plan.planners.allowed_sizes import tensor_parallel_sizes
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.model_graph import ModelGraph, Unit

SHORTEST = 4
"""Tokens of the shortest sequences that are packed."""
_REPLICAS = ("dp", "dp_cp", "intra_dp_cp", "intra_dist_opt", "expt_dp", "intra_expt_dp")
_ALONE = (*_REPLICAS, "cp", "pp", "ep", "expt_tp", "tp_ep", "tp_ep_pp")
"""Process groups in which a profiled layer has no peers."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Sizes on which layers are timed, and the time that this may take."""

    build: BuildOptions
    sizes: tuple[int, ...]
    """Numbers of tokens, ascending; three or more for quadratics."""
    sequences: tuple[int, ...] = (1,)
    """Numbers of sequences into which the tokens of an attending layer are packed."""
    vocab_size: int
    num_repetitions: int = 5
    seconds_per_size: float = 0.2
    """Seconds for which each size is repeated: the median of many runs is not disturbed by a few slow ones."""
    is_interpolated: bool = False
    """Curves are straight lines between the points, not quadratics."""
    checks_fit: bool = True
    """Also time sizes between the fitted ones, and compare the curves with them."""


class ProfiledLayer(NamedTuple):
    """Measurements of one layer, and the errors of its curves at sizes that they were not fitted to."""

    key: ProfileKey
    curves: LayerCurves
    fitted: Sequence[PackedSize]
    seconds: dict[str, dict[PackedSize, float]]
    """Name of a curve -> size -> seconds."""
    errors: dict[str, FitError]
    update: tuple[PackedSize, float]
    """Number of weights, and the seconds of updating them."""


def layers_of(graph: ModelGraph, unit: Unit, *, tensor_parallel_sizes: Sequence[int]) -> Iterator[ProfileKey]:
    """Yield the keys of all kinds of a unit's layers that can be built."""
    for kind in dict.fromkeys(unit.layers):
        if LAYER_KINDS[kind].is_built_in(unit):
            yield from ((unit.name, kind, size, 1) for size in tensor_parallel_sizes)


def profile_layer(graph: ModelGraph, key: ProfileKey, options: ProfileOptions) -> ProfiledLayer:
    """Time and fit one layer, as the first of the ranks that share it."""
    unit, kind, size, _ = key
    sequences = options.sequences if LAYER_KINDS[kind].attends and not options.is_interpolated else (1,)
    fitted = packed_sizes(options.sizes, sequences)
    held_out = sizes_between(options.sizes, sequences) if options.checks_fit else ()
    vocab_size = -(-options.vocab_size // size) * size
    with fake_ranks(size):
        groups = groups_of_one()
        build = partial(build_layer, graph, unit, kind, groups=groups, options=options.build, vocab_size=vocab_size)
        sizes = (*fitted, *held_out)
        min_seconds = options.seconds_per_size * len(sizes)
        times = time_layer(build(), sizes=sizes, num_repetitions=options.num_repetitions, min_seconds=min_seconds)
        update = time_update(build(), groups=groups, num_repetitions=options.num_repetitions)
    curves: dict[str, Curve] = {}
    errors: dict[str, FitError] = {}
    seconds = {name: {size: getattr(one, name) for size, one in times.items()} for name in LayerTimes._fields}
    for name, measured in seconds.items():
        is_linear = not LAYER_KINDS[kind].attends or name == "weight_gradient"
        points = [measured[size] for size in fitted]
        if options.is_interpolated:
            curves[name] = Interpolated(tuple(float(size.num_tokens) for size in fitted), tuple(points))
        else:
            curves[name] = fit_quadratic(fitted, points, is_linear=is_linear)
        if held_out:
            errors[name] = fit_error(curves[name], held_out, [measured[size] for size in held_out])
    return ProfiledLayer(key, LayerCurves(**curves), fitted, seconds, errors, update)


def join_profile(graph: ModelGraph, layers: Sequence[ProfiledLayer], options: ProfileOptions) -> LayerProfile:
    """Also time the work of a step outside of its layers, and return everything in the form that planners read."""
    with fake_ranks(1):
        seconds, computation_seconds = time_runtime(graph, num_repetitions=options.num_repetitions)
    sizes, updates = zip(*(layer.update for layer in layers if layer.update[0].num_tokens), strict=True)
    update = fit_quadratic(sizes, updates, is_linear=True)
    step = StepProfile(seconds, computation_seconds, update.constant, update.linear)
    name = torch.cuda.get_device_name() if platform.device().type == "cuda" else "CPU"
    dtype = str(options.build.params_dtype).removeprefix("torch.")
    return LayerProfile(name, dtype, {layer.key: layer.curves for layer in layers}, step)


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Let this process act as the first of `count` ranks, whose collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()


def groups_of_one() -> ProcessGroupCollection:
    """Return the process groups of a layer that only tensor parallel ranks share."""
    everyone, alone = dist.group.WORLD, dist.new_group([0])
    return ProcessGroupCollection(**dict.fromkeys(("tp", "tp_cp", "mp"), everyone), **dict.fromkeys(_ALONE, alone), embd=None)


def packed_sizes(sizes: Sequence[int], sequences: Sequence[int]) -> tuple[PackedSize, ...]:
    """Return all combinations of tokens and sequences with `SHORTEST` or more tokens per sequence, rounded to equal lengths."""
    pairs = ((size, count) for size in sizes for count in sequences if count == 1 or size >= SHORTEST * count)
    return tuple(dict.fromkeys(PackedSize(count * round(size / count), count) for size, count in pairs))


def sizes_between(sizes: Sequence[int], sequences: Sequence[int]) -> tuple[PackedSize, ...]:
    """Return the geometric means of neighbouring tokens and sequences, at which a fit to the others is checked."""
    counts = [round(math.sqrt(low * high)) for low, high in pairwise(sequences)]
    return packed_sizes([round(math.sqrt(low * high)) for low, high in pairwise(sizes)], (sequences[0], *counts))


MOST_TOKENS, LEAST_TOKENS = 8192, 16
"""Tokens of a layer's largest and smallest profiled size, at most and at least."""
MOST_SECONDS = 0.25
"""Most seconds of a layer's forward at its largest profiled size, by the machine's description."""
SAMPLES_AT_ONCE = 8
"""Number of average samples in a layer's largest profiled size."""
NUM_SIZES, SEQUENCES = 4, (1, 8)
SECONDS_PER_SIZE = 0.03


def profile_model(request: PlanningRequest, build: BuildOptions) -> tuple[LayerProfile, str]:
    """Time a request's layers, without process groups, at sizes that suit its lengths, or find them kept; says which it was."""
    graph = request.graph
    sizes = {unit.name: profiled_sizes(request, unit) for unit in graph.units}
    tp = {unit.name: tensor_parallel_sizes(request, unit.name) for unit in graph.units}
    key = key_of(
        (device_name(), torch.__version__, torch.get_num_threads(), graph.to_dict(), build, request.vocab_size, sizes, tp)
    )
    if (profile := find_value("layers", key, LayerProfile.from_dict)) is not None:
        return profile, f"{len(profile.curves)} layers as kept"
    started, layers = time.perf_counter(), []
    fast = partial(ProfileOptions, sequences=SEQUENCES, seconds_per_size=SECONDS_PER_SIZE, checks_fit=False)
    for unit in graph.units:
        options = fast(build=build, sizes=sizes[unit.name], vocab_size=request.vocab_size)
        for layer in layers_of(graph, unit, tensor_parallel_sizes=tp[unit.name]):
            layers.append(profile_layer(graph, layer, options))
    profile = join_profile(graph, layers, options)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    keep_value("layers", key, profile.to_dict())
    return profile, f"{len(layers)} layers profiled in {time.perf_counter() - started:.1f} s"


def profiled_sizes(request: PlanningRequest, unit: Unit) -> tuple[int, ...]:
    """Return tokens from a quarter of an average sample to several samples, as long as a layer does not take too long."""
    mean, longest = request.loads.mean[unit.name][0], int(request.loads.of_samples[unit.name][:, 0].max(initial=0))
    most = min(MOST_TOKENS, max(SAMPLES_AT_ONCE * mean, longest, 16 * LEAST_TOKENS))
    kind = next((kind for kind in unit.layers if LAYER_KINDS[kind].attends), unit.inner_layers[0])

    def forward_seconds(num_tokens: int) -> float:
        length = max(1, round(mean) or num_tokens)
        load = UnitLoad(num_tokens, num_tokens * length, num_tokens, -(-num_tokens // length))
        return float(request.layer_costs.seconds(unit.name, kind, load).forward)

    while most > 16 * LEAST_TOKENS and forward_seconds(round(most)) > MOST_SECONDS:
        most /= 2
    least = min(max(LEAST_TOKENS, mean / 4), most / 8)
    steps = [least * (most / least) ** (index / (NUM_SIZES - 1)) for index in range(NUM_SIZES)]
    return tuple(8 * round(size / 8) for size in steps)
