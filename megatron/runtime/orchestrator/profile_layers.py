"""Profiles the layers of a model on this device, one kind of layer at a time, and fits curves to the measurements."""

import math
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
from megatron.runtime.profiler import LayerTimes, build_layer, time_layer, time_runtime, time_update
from multimodal.cost.layers.registry import LAYER_KINDS, describe_layer
from multimodal.cost.seconds.layer_curves import Curve, FitError, Interpolated, LayerCurves, PackedSize, fit_error, fit_quadratic
from multimodal.cost.seconds.layer_profile import LayerProfile, ProfileKey, StepProfile
from multimodal.model.transformer_config import BuildOptions
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
        if describe_layer(graph, unit, kind, vocab_size=0).can_be_built:
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
    dtype = str(options.build.precision.params_dtype).removeprefix("torch.")
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
    return tuple(
        dict.fromkeys(
            PackedSize(count * round(size / count), count)
            for size in sizes
            for count in sequences
            if count == 1 or size >= SHORTEST * count
        )
    )


def sizes_between(sizes: Sequence[int], sequences: Sequence[int]) -> tuple[PackedSize, ...]:
    """Return the geometric means of neighbouring tokens and sequences, at which a fit to the others is checked."""
    counts = [round(math.sqrt(low * high)) for low, high in pairwise(sequences)]
    return packed_sizes([round(math.sqrt(low * high)) for low, high in pairwise(sizes)], (sequences[0], *counts))
