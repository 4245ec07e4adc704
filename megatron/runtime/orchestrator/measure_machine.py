"""Measures the machine for planners: links and seconds of layers, measured once and then kept."""

import platform as host
import time
from dataclasses import replace

import torch

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.launch.distributed_setup import World
from megatron.runtime.orchestrator.kept_values import find_value, keep_value, key_of
from megatron.runtime.orchestrator.machine import assumed_cluster, describe_device, measure_links, ranks_on_node
from megatron.runtime.orchestrator.profile_layers import ProfileOptions, join_profile, layers_of, profile_layer
from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.cost.unit_load import UnitLoad
from multimodal.model.transformer_config import BuildOptions
from multimodal.plan.planners.allowed_sizes import tensor_parallel_sizes
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.errors import BraidError
from multimodal.values.model_graph import Unit

MOST_TOKENS, LEAST_TOKENS = 8192, 16
"""Tokens of a layer's largest and smallest profiled size, at most and at least."""
MOST_SECONDS = 0.25
"""Most seconds of a layer's forward at its largest profiled size, by the machine's description."""
SAMPLES_AT_ONCE = 8
"""Number of average samples in a layer's largest profiled size."""
NUM_SIZES, SEQUENCES = 4, (1, 8)
NUM_REPETITIONS, SECONDS_PER_SIZE = 5, 0.03


def describe_machine(config: RunConfig, *, world_size: int) -> tuple[Cluster, bool]:
    """Return the machine of --cluster, or as measured before, and True; else its description with assumed links, and False.

    Raises ConfigError for an invalid file.
    """
    if config.training.cluster is not None:
        return Cluster.from_file(config.training.cluster), True
    try:
        return Cluster.from_dict(find_value("machines", _machine_key(config, world_size)) or {}), True
    except BraidError:
        return describe_device(dtype=config.training.dtype, ranks_per_node=ranks_on_node()), False


def measure_cluster(config: RunConfig, world: World, cluster: Cluster | None) -> Cluster:
    """Measure the links, for this run and later ones; collective. cluster: on rank 0, all else that is known."""
    world.connect(backend=config.training.distributed_backend)
    known = cluster or replace(assumed_cluster(), gpus_per_node=ranks_on_node())
    measured = measure_links(known, rank=world.rank, world_size=world.size, timeout=world.timeout)
    if world.rank == 0:
        keep_value("machines", _machine_key(config, world.size), measured.to_dict())
    return measured


def _device() -> str:
    """Return the name of the device; different CPUs may have the same name, so they are distinguished by their hosts."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU of {host.node()}"


def _machine_key(config: RunConfig, world_size: int) -> str:
    of_run = (config.training.dtype, config.training.distributed_backend, world_size, ranks_on_node())
    return key_of((_device(), torch.__version__, *of_run))


def profile_model(request: PlanningRequest, build: BuildOptions) -> tuple[LayerProfile, str]:
    """Time all layers of a request's model at sizes that suit its lengths, or find a kept profile; also return which it was.

    There must be no process group: layers are timed as those of a rank whose peers are absent.
    """
    graph = request.graph
    sizes = {unit.name: profiled_sizes(request, unit) for unit in graph.units}
    tensor = {unit.name: tensor_parallel_sizes(request, unit.name) for unit in graph.units}
    key = key_of(
        (_device(), torch.__version__, torch.get_num_threads(), graph.to_dict(), build, request.vocab_size, sizes, tensor)
    )
    try:
        profile = LayerProfile.from_dict(find_value("layers", key) or {})
        profile.check(graph)
        return profile, f"{len(profile.curves)} layers as kept"
    except BraidError:
        pass
    started, layers = time.perf_counter(), []
    for unit in graph.units:
        options = ProfileOptions(
            build=build,
            sizes=sizes[unit.name],
            sequences=SEQUENCES,
            vocab_size=request.vocab_size,
            num_repetitions=NUM_REPETITIONS,
            seconds_per_size=SECONDS_PER_SIZE,
            checks_fit=False,
        )
        for layer in layers_of(graph, unit, tensor_parallel_sizes=tensor[unit.name]):
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
