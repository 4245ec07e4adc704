"""Cornstarch, Table 3: frozen-aware against frozen-unaware pipeline stages, VLM-M and VLM-L on 24 A40, TP 2, 24 microbatches.

Encoder and LLM are frozen, projectors trained, activations computed again: by PyTorch's non-reentrant checkpointing, for which
Cornstarch's own example of pipeline parallelism asks, over layers with two all-reduces each, of which the second is not repeated.
Its A40s are joined by NVLink in pairs, so that TP 2 runs at about 45 GB/s.
The stage counts that fit the table's times: VLM-M's encoder takes 2 x 75.04 = 150 (aware) or 3 x 45.90 = 138 ms (unaware) and its
LLM 5 x 28.15 = 141 or 3 x 45.26 = 136 ms; VLM-L's encoder 4 x 101.02 = 404 or 5 x 70.42 = 352 ms, its LLM 4 x 34.67 = 139 or
2 x 67.03 = 134 ms. The two sides then have unequal numbers of GPUs, so throughput is that of one GPU. The A40 is calibrated on
VLM-M's LLM: 137 ms for one forward.

Tokens are not stated as the models see them. With 1k of text and a merged image of 1280 x 720 beside it, 137 ms would need more
than an A40's peak. Here the LLM has 1,024 in all, and the encoder an image of 448 x 448 pixels and a class token.

The paper's Figure 3 times CLIP with Mistral 7B on one A40, two samples at a time, the dissertation's Figure 3.1 SigLIP with
Llama 3.2 1B; trained or frozen, activations computed again. Their lengths are not stated; here an image and 1k of text in each
sample, no tensor parallelism.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.published_setups.calibrate_compute import calibrate_compute
from benchmarks.published_setups.layer_execution import LayerExecution, SystemLayerCosts
from benchmarks.published_setups.planned import Setup, read_cluster, read_model
from benchmarks.published_setups.rows import Row, single
from multimodal.cost.cluster import Cluster, NodeLink
from multimodal.cost.seconds.layer_costs import Sharing
from multimodal.cost.unit_load import add_loads, sample_load
from multimodal.plan.planners.planning_request import FixedSizes
from multimodal.values.backward_need import layers_backward_need
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths


@dataclass(frozen=True)
class TimedModel:
    """A model whose units were timed alone, forward and backward."""

    name: str
    units: Mapping[str, Mapping[str, Any]]
    num_image_tokens: int
    num_samples: int
    """In a microbatch."""
    trained: Mapping[str, float]
    """Unit -> backward over forward where all is trained."""
    frozen_llm: float
    """The same of the LLM where only projectors are."""
    source: str
    not_counted: str = ""
    """The reason for which the frozen LLM's figure is not counted."""

    @property
    def sample(self) -> SampleLengths:
        """One image and 1k of text."""
        return SampleLengths(0, (ItemLengths("vision", self.num_image_tokens, self.num_image_tokens),), 1024, 1024)


NUM_GPUS, NUM_MICROBATCHES, TENSOR_PARALLEL_SIZE = 24, 24, 2
EXECUTION = LayerExecution(repeated_collectives=0.5)
VISION_TOKENS, LLM_TOKENS = 1025, 1024
RATIOS = {"m": 1.38, "l": 1.54}
STAGES = {"m": ((3, 3), (2, 5)), "l": ((5, 2), (4, 4))}
"""Model -> stages of encoder and LLM, frozen-unaware and frozen-aware."""
PAIR = NodeLink(bandwidth_gbytes_per_second=45, latency_us=10)
"""The link of a tensor parallel group of two."""
LLM_FORWARD_MS = 137.0
"""Mean of 5 x 28.15, 3 x 45.26, 4 x 34.67 and 2 x 67.03 ms."""
LLM_BACKWARD_OVER_FORWARD = (51.30 / 28.15, 127.34 / 67.03)
_ENCODER = {
    "role": "encoder",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "image": {"patch_size": 14, "merge_size": 1},
}
TIMED: Sequence[TimedModel] = (
    TimedModel(
        "CLIP and Mistral 7B",
        {
            "vision": {**_ENCODER, "num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 4096},
            "llm": {
                "role": "backbone",
                "num_layers": 32,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_query_groups": 8,
                "ffn_hidden_size": 14336,
                "vocab_size": 32768,
            },
        },
        num_image_tokens=577,
        num_samples=2,
        trained={"vision": 205.09 / 67.94, "llm": 1184.65 / 400.87},
        frozen_llm=530.67 / 397.11,
        source="Figure 3",
        not_counted="its own frozen 8B models have 1.82 to 1.92; 1.34 forwards cannot hold one and its input gradients",
    ),
    TimedModel(
        "SigLIP and Llama 1B",
        {
            "vision": {**_ENCODER, "num_layers": 27, "hidden_size": 1152, "num_attention_heads": 16, "ffn_hidden_size": 4304},
            "llm": {
                "role": "backbone",
                "num_layers": 16,
                "hidden_size": 2048,
                "num_attention_heads": 32,
                "num_query_groups": 8,
                "ffn_hidden_size": 8192,
                "vocab_size": 128256,
                "untie_embeddings_and_output_weights": False,
            },
        },
        num_image_tokens=729,
        num_samples=4,
        trained={"vision": 120.57 / 44.43, "llm": 375.93 / 140.39},
        frozen_llm=284.50 / 138.33,
        source="dissertation, Figure 3.1",
    ),
)
ENCODER_MS = {"m": (3 * 45.90, 2 * 75.04), "l": (5 * 70.42, 4 * 101.02)}
"""Model -> its whole encoder, forward, by either row."""


def rows() -> Iterator[Row]:
    """Calibrate on the medium LLM's forward; predict its backward, the encoders, and what knowing of freezing gains."""
    medium, source = read_model("cornstarch-vlm-m"), "Table 3"
    given = replace(read_cluster("a40"), intra_node=PAIR)
    cluster = calibrate_compute(
        given,
        predict_seconds=lambda each: unit_seconds(medium, each, "llm")[0],
        measured_seconds=1e-3 * LLM_FORWARD_MS,
    )
    forward, backward = unit_seconds(medium, cluster, "llm")
    speed = cluster.efficiency / given.efficiency
    yield Row("Cornstarch", "VLM-M, LLM forward", single(LLM_FORWARD_MS), 1e3 * forward, source, "ms", calibrated_speed=speed)
    yield Row("Cornstarch", "VLM-M and L, LLM backward / forward", LLM_BACKWARD_OVER_FORWARD, backward / forward, source)
    for size, ratio in RATIOS.items():
        graph = read_model(f"cornstarch-vlm-{size}")
        name = f"VLM-{size.upper()}"
        encoder = unit_seconds(graph, cluster, "vision")[0]
        yield Row("Cornstarch", f"{name}, encoder forward", ENCODER_MS[size], 1e3 * encoder, source, "ms")
        yield Row(
            "Cornstarch",
            f"{name}, aware over unaware, table's stages",
            single(ratio),
            _gain(graph, cluster, STAGES[size]),
            source,
        )
        yield Row("Cornstarch", f"{name}, aware over unaware, planned", single(ratio), _gain(graph, cluster), source)
    for model in TIMED:
        yield from _timed_rows(model, cluster)


def _timed_rows(model: TimedModel, cluster: Cluster) -> Iterator[Row]:
    trained = ModelGraph.from_dict({"units": model.units})
    frozen = replace(trained, units=tuple(replace(unit, freeze_module=True) for unit in trained.units))
    cases = [("trained", trained, unit, ratio) for unit, ratio in model.trained.items()]
    for state, graph, unit, ratio in (*cases, ("frozen", frozen, "llm", model.frozen_llm)):
        forward, backward = unit_seconds(
            graph, cluster, unit, model.sample, num_samples=model.num_samples, tensor_parallel_size=1
        )
        what = f"{model.name}, {state}, {unit} backward / forward"
        not_counted = model.not_counted if state == "frozen" else ""
        yield Row("Cornstarch", what, single(ratio), backward / forward, model.source, not_counted=not_counted)


def _gain(graph: ModelGraph, cluster: Cluster, stages: tuple[tuple[int, int], tuple[int, int]] | None = None) -> float:
    """Return a GPU's throughput under the frozen-aware plan over that under the frozen-unaware one."""
    planners = ("cornstarch-unaware", "cornstarch")
    setups = [_setup(planner, graph, stages[index] if stages else (None, None)) for index, planner in enumerate(planners)]
    unaware, aware = (
        setup.predict(run, cluster).iteration_seconds * run.num_gpus for setup in setups for run in [setup.plan(cluster)]
    )
    return unaware / aware


def unit_seconds(
    graph: ModelGraph,
    cluster: Cluster,
    unit: str,
    sample: SampleLengths | None = None,
    *,
    num_samples: int = 1,
    tensor_parallel_size: int = TENSOR_PARALLEL_SIZE,
) -> tuple[float, float]:
    """Return seconds of one microbatch through all layers of a unit: forward, backward."""
    costs = SystemLayerCosts(graph, cluster, graph.backbone.vocab_size or 0, execution=EXECUTION)
    described = graph.unit(unit)
    load = add_loads([sample_load(described, sample or _sample(graph))] * num_samples)
    forward = backward = 0.0
    for index, kind in enumerate(described.layers):
        layer = costs.seconds(unit, kind, load, Sharing(tensor_parallel_size=tensor_parallel_size, recompute="full"))
        forward += layer.forward
        backward += layer.backward(kind, layers_backward_need(graph, unit, range(index, index + 1)))
    return forward, backward


def _setup(planner: str, graph: ModelGraph, stages: tuple[int | None, int | None]) -> Setup:
    sizes = {unit: FixedSizes(TENSOR_PARALLEL_SIZE, count, 1) for unit, count in zip(("vision", "llm"), stages, strict=True)}
    return Setup(planner, graph, (_sample(graph),), NUM_GPUS, NUM_MICROBATCHES, sizes, recompute="full", execution=EXECUTION)


def _sample(graph: ModelGraph) -> SampleLengths:
    num_outputs = VISION_TOKENS // graph.unit("vision").merge_factor
    num_text = LLM_TOKENS - num_outputs
    return SampleLengths(0, (ItemLengths("vision", VISION_TOKENS, num_outputs),), num_text, num_text)
