"""Optimus: ViT-22B with GPT-175B on 1,536 and 3,072 Hopper GPUs, batch 1,536; Megatron-LM and Megatron-LM balanced.

What the paper states: DP 24 or 48, PP 8, TP 8, V 12 where balanced, 2,048 tokens a sequence, microbatches of 2. What it does not,
and is taken here: 2,048 tokens in the encoder as well, and Megatron-LM without virtual stages, one stage for the encoder and
seven for the LLM. In the evaluation, activations are computed again: its MFU of 31.6 % is Megatron's formula that counts a second
forward (31.5 % for these tokens and 10.65 s). Table 1 and the layer's times are of another job, in production, whose cool-down
is 1.6 to 1.8 times the warm-up: a backward of about twice the forward, nothing computed again.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.published_setups.planned import Setup, read_cluster, read_model
from benchmarks.published_setups.rows import Row, single
from multimodal.cost.cluster import Cluster
from multimodal.cost.communication import collective_seconds
from multimodal.cost.seconds.layer_costs import LayerCosts
from multimodal.cost.unit_load import item_load
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

BATCH_SIZE = 1536
MEGATRON_SECONDS, MEGATRON_MFU, BALANCED_SECONDS = 10.65, 0.316, 10.43
TABLE_1 = {
    "dp_all_gather": 0.033,
    "dp_reduce_scatter": 0.089,
    "pp_warmup": 0.050,
    "pp_cooldown": 0.092,
    "pp_other": 0.087,
    "tp": 0.112,
}
"""Kind of bubble -> share of a step of 5.12 s on more than 3,000 GPUs."""
TABLE_1_SECONDS = 5.12
RECOMPUTED = 4 / 3
"""Megatron's FLOPs formula counts a second forward."""
NUM_MICROBATCH_TOKENS = 4096


def rows() -> Iterator[Row]:
    """Calibrate on Megatron-LM's step on 1,536 GPUs; predict the rest."""
    graph = read_model("vit-22b-gpt-175b")
    megatron = setup_of("megatron", graph, data_parallel_size=24)
    given = read_cluster("h100")
    cluster = megatron.calibrate(given, measured_seconds=MEGATRON_SECONDS)
    found = megatron.simulate(cluster)
    source = "strong scaling, 1,536 GPUs"
    speed = cluster.efficiency / given.efficiency
    yield Row(
        "Optimus", "Megatron-LM, step", single(MEGATRON_SECONDS), found.iteration_seconds, source, "s", calibrated_speed=speed
    )
    yield Row("Optimus", "Megatron-LM, MFU, Megatron's formula", single(MEGATRON_MFU), found.mfu * RECOMPUTED, source, "share")
    balanced = setup_of("megatron-balanced", graph, data_parallel_size=24).simulate(cluster)
    yield Row("Optimus", "Megatron-LM balanced, step", single(BALANCED_SECONDS), balanced.iteration_seconds, source, "s")
    large = replace(setup_of("megatron", graph, data_parallel_size=48), recompute=None).simulate(cluster)
    source = "Table 1, more than 3,000 GPUs"
    yield Row("Optimus", "step, 3,072 GPUs", single(TABLE_1_SECONDS), large.iteration_seconds, source, "s")
    for kind, share in TABLE_1.items():
        yield Row("Optimus", f"bubble {kind}, 3,072 GPUs", single(share), large.bubble[kind], source, "share")
    yield Row("Optimus", "all bubbles, 3,072 GPUs", single(sum(TABLE_1.values())), sum(large.bubble.values()), source, "share")
    yield from _kernels(graph, cluster)


def setup_of(planner: str, graph: ModelGraph, *, data_parallel_size: int) -> Setup:
    """Return the evaluation's set-up for Megatron-LM, balanced or not, or for `optimus` over the balanced LLM's sizes."""
    stages, ranges = (7, None) if planner == "megatron" else (8, 12)
    encoder = FixedSizes(8, 1 if planner == "megatron" else None, data_parallel_size)
    sizes = {"llm": FixedSizes(8, stages, data_parallel_size, ranges)} | ({"vision": encoder} if planner != "optimus" else {})
    batch = 64 * data_parallel_size, BATCH_SIZE
    return Setup(planner, graph, _samples(), *batch, sizes, micro_batch_size=2, recompute="full")


def _samples() -> tuple[SampleLengths, ...]:
    """One image of 2,048 tokens in the encoder; how many of the LLM's 2,048 are its outputs hardly matters: half of them."""
    return (SampleLengths(0, (ItemLengths("vision", 2048, 1024),), 1024, 1024),)


def _kernels(graph: ModelGraph, cluster: Cluster) -> Iterator[Row]:
    source = "section 2"
    costs = LayerCosts(graph, cluster, graph.backbone.vocab_size or 0)
    load = item_load(NUM_MICROBATCH_TOKENS // 2, 0)
    load = load._replace(num_tokens=2 * load.num_tokens, num_squared=2 * load.num_squared)
    layer = costs.seconds("vision", "transformer", load, tensor_parallel_size=8)
    yield Row("Optimus", "ViT-22B layer, forward", single(1.4), 1e3 * layer.forward, source, "ms")
    backward = layer.input_gradient + layer.weight_gradient
    yield Row("Optimus", "ViT-22B layer, backward", single(2.0), 1e3 * backward, source, "ms")
    num_bytes = 2.0 * NUM_MICROBATCH_TOKENS * graph.backbone.transformer.hidden_size
    gather = collective_seconds(num_bytes, ranks=range(8), cluster=cluster)
    yield Row("Optimus", "collective of a GPT-175B layer", single(0.3), 1e3 * gather, source, "ms")
