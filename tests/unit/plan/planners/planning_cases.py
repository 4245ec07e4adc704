"""Small models and requests for planners."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from multimodal.cost.cluster import Cluster, Network, NodeLink
from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.values.model_graph import ImageInput, ModelGraph, Queries, Role, Transformer, Unit
from multimodal.values.sample_lengths import ItemLengths, SampleLengths, pass_item

CLUSTER = Cluster(
    gpus_per_node=4, peak_tflops=100.0, memory_gb=16.0, intra_node=NodeLink(200.0, 3.0), inter_node=Network(25.0, 8.0, 2)
)
VISION = Unit("vision", Role.ENCODER, Transformer(6, 512, 8, 2048), ImageInput(14, 2))
AUDIO = Unit("audio", Role.ENCODER, Transformer(4, 256, 4, 1024), ImageInput(14, 2))
LLM = Unit("llm", Role.BACKBONE, Transformer(8, 1024, 8, 4096))
GENERATOR = Unit("generator", Role.GENERATOR, Transformer(4, 512, 8, 2048))
TEXT_ONLY = ModelGraph((LLM,))
TWO = ModelGraph((VISION, LLM), (("vision", "llm"),))
THREE = ModelGraph((VISION, LLM, GENERATOR), (("vision", "llm"), ("llm", "generator")))
TWO_ENCODERS = ModelGraph((VISION, AUDIO, LLM), (("vision", "llm"), ("audio", "llm")))
JOINT = Unit("joint", Role.ENCODER, Transformer(3, 512, 8, 2048), join="sequence", queries=Queries(32))
FED = ModelGraph((VISION, JOINT, LLM), (("vision", "joint"), ("joint", "llm")))
GRAPHS = {"text-only": TEXT_ONLY, "two": TWO, "three": THREE, "two-encoders": TWO_ENCODERS, "fed": FED}


def random_lengths(graph: ModelGraph, *, count: int = 24, seed: int = 0) -> tuple[SampleLengths, ...]:
    draw = random.Random(seed)
    samples = []
    for index in range(count):
        items = []
        for unit in graph.item_encoders:
            for _ in range(draw.randint(0, 2)):
                outputs = draw.randint(4, 200)
                items.append(pass_item(graph, ItemLengths(unit.name, 4 * outputs, outputs)))
        items += [ItemLengths(unit.name, draw.randint(16, 256), 0) for unit in graph.generators]
        samples.append(SampleLengths(index, tuple(items), draw.randint(20, 600), 10))
    return tuple(samples)


@contextmanager
def few_planners(*more: str) -> Iterator[None]:
    """Let `braid` hold its plans against those of one planner; asking all of them takes seconds. more: others to keep."""
    with patch.dict(PLANNERS):
        for name in PLANNERS.keys() - {"braid", "megatron", *more}:
            del PLANNERS[name]
        yield


def request(graph: ModelGraph = TWO, **changes: object) -> PlanningRequest:
    given = {"num_gpus": 8, "global_batch_size": 24, "lengths": random_lengths(graph), "time_budget_seconds": 0.5}
    return PlanningRequest(graph, CLUSTER, **{**given, "vocab_size": 4096, **changes})


def with_memory(asked: PlanningRequest, memory_gb: float) -> PlanningRequest:
    return replace(asked, cluster=replace(CLUSTER, memory_gb=memory_gb))


def frozen(graph: ModelGraph, *names: str) -> ModelGraph:
    return replace(graph, units=tuple(replace(unit, freeze_module=unit.name in names) for unit in graph.units))
