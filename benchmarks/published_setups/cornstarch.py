"""Cornstarch, Table 3: frozen-aware against frozen-unaware pipeline stages, VLM-M and VLM-L on 24 A40, TP 2, 24 microbatches.

Encoder and LLM are frozen, projectors trained, activations computed again: by PyTorch's non-reentrant checkpointing, for which
Cornstarch's own example of pipeline parallelism asks, over layers with two all-reduces each, of which the second is not repeated.
The table's stage counts are not stated, but its times are those of whole numbers of stages with equal totals: VLM-M's encoder
takes 3 x 75.04 = 225 or 5 x 45.90 = 230 ms and its LLM 8 x 28.15 = 225 or 5 x 45.26 = 226 ms; VLM-L's encoder 5 x 101.02 = 505 or
7 x 70.42 = 493 ms, its LLM 6 x 34.67 = 208 or 3 x 67.03 = 201 ms. The LLM has 2,200 tokens (1k of text and a merged image of
1280 x 720); the encoder's are not stated, and 2,080 make VLM-M's encoder as long as its LLM. The A40 is calibrated on
VLM-M's LLM: 225 ms for one forward.

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
from multimodal.cost.cluster import Cluster
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

    @property
    def sample(self) -> SampleLengths:
        """One image and 1k of text."""
        return SampleLengths(0, (ItemLengths("vision", self.num_image_tokens, self.num_image_tokens),), 1024, 1024)


NUM_GPUS, NUM_MICROBATCHES, TENSOR_PARALLEL_SIZE = 24, 24, 2
EXECUTION = LayerExecution(repeated_collectives=0.5)
VISION_TOKENS, LLM_TOKENS = 2080, 2200
RATIOS = {"m": 1.38, "l": 1.54}
STAGES = {"m": ((5, 5), (3, 8)), "l": ((7, 3), (5, 6))}
"""Model -> stages of encoder and LLM, frozen-unaware and frozen-aware."""
LLM_FORWARD_MS = 225.2
"""8 stages of 28.15 ms."""
LLM_BACKWARD_OVER_FORWARD = 51.30 / 28.15
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
ENCODER_MS = (7 * 70.42, 5 * 101.02)
"""VLM-L's whole encoder, forward, by either row."""


def rows() -> Iterator[Row]:
    """Calibrate on the medium LLM's forward; predict its backward, the encoders, and what knowing of freezing gains."""
    medium, source = read_model("cornstarch-vlm-m"), "Table 3"
    given = read_cluster("a40")
    cluster = calibrate_compute(
        given,
        predict_seconds=lambda each: unit_seconds(medium, each, "llm")[0],
        measured_seconds=1e-3 * LLM_FORWARD_MS,
    )
    forward, backward = unit_seconds(medium, cluster, "llm")
    speed = cluster.efficiency / given.efficiency
    yield Row("Cornstarch", "VLM-M, LLM forward", single(LLM_FORWARD_MS), 1e3 * forward, source, "ms", calibrated_speed=speed)
    yield Row("Cornstarch", "VLM-M, LLM backward / forward", single(LLM_BACKWARD_OVER_FORWARD), backward / forward, source)
    encoder = unit_seconds(read_model("cornstarch-vlm-l"), cluster, "vision")[0]
    yield Row("Cornstarch", "VLM-L, encoder forward", ENCODER_MS, 1e3 * encoder, source, "ms")
    for size, ratio in RATIOS.items():
        graph = read_model(f"cornstarch-vlm-{size}")
        name = f"VLM-{size.upper()}"
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
        yield Row("Cornstarch", what, single(ratio), backward / forward, model.source)


def _gain(graph: ModelGraph, cluster: Cluster, stages: tuple[tuple[int, int], tuple[int, int]] | None = None) -> float:
    """Seconds of the frozen-unaware plan over those of the frozen-aware one."""
    planners = ("cornstarch-unaware", "cornstarch")
    setups = [_setup(planner, graph, stages[index] if stages else (None, None)) for index, planner in enumerate(planners)]
    unaware, aware = (setup.simulate(cluster).iteration_seconds for setup in setups)
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
        layer = costs.seconds(unit, kind, load, tensor_parallel_size=tensor_parallel_size, recompute="full")
        forward += layer.forward
        backward += layer.backward(kind, layers_backward_need(graph, unit, range(index, index + 1)))
    return forward, backward


def _setup(planner: str, graph: ModelGraph, stages: tuple[int | None, int | None]) -> Setup:
    sizes = {unit: FixedSizes(TENSOR_PARALLEL_SIZE, count, 1) for unit, count in zip(("vision", "llm"), stages, strict=True)}
    return Setup(planner, graph, (_sample(graph),), NUM_GPUS, NUM_MICROBATCHES, sizes, recompute="full", execution=EXECUTION)


def _sample(graph: ModelGraph) -> SampleLengths:
    num_outputs = -(-VISION_TOKENS // graph.unit("vision").merge_factor)
    num_text = LLM_TOKENS - num_outputs
    return SampleLengths(0, (ItemLengths("vision", VISION_TOKENS, num_outputs),), num_text, num_text)
