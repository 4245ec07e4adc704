"""The recipe "Add a layer kind" of docs/write_your_own.md: counted, planned, simulated and trained beside transformer layers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.baselines import COMPARED
from megatron.runtime import platform
from megatron.runtime.profiler import build_layer, synthetic_input
from multimodal.cost.cluster import Cluster
from multimodal.cost.layers import registry as costs
from multimodal.cost.layers.collectives import LayerCollectives, collective_per_token
from multimodal.cost.layers.layer import ActivationBytes, ActivationCase, Layer, LayerFlops
from multimodal.cost.layers.registry import LAYER_KINDS, describe_layer, read_model
from multimodal.cost.unit_load import UnitLoad
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear
from multimodal.model.initialization import initialize_parameters
from multimodal.model.layers import registry as kinds
from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass
from multimodal.model.stage_input import PackedInput
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.unit_stage import UnitStage
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_overlapped_linear import CHANGES, build_case
from tests.unit.cost.test_activation_memory import groups, saved_bytes
from tests.unit.plan.planners.planning_cases import TEXT_ONLY, request

NAME = "gated_residual"


class GatedResidualLayer(Layer):
    """hidden + gate x down(gelu(up(hidden))), without a norm."""

    num_products = 2

    @property
    def num_weights(self) -> int:
        shape = self.unit.transformer
        return 2 * shape.hidden_size * shape.ffn_hidden_size

    @property
    def num_vector_entries(self) -> int:
        return self.unit.transformer.hidden_size

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        shape, trains = self.unit.transformer, case.need.trains_weights
        per_token = case.bytes_per_element * load.num_tokens
        whole = 2 * shape.hidden_size if trains else 0
        return ActivationBytes(1.0 * per_token * whole, 1.0 * per_token * shape.ffn_hidden_size * (2 if trains else 1))

    def collectives(self, *, tensor_parallel_size: int, ranks: Sequence[int], cluster: Cluster) -> LayerCollectives:
        size = cluster.bytes_per_element * self.unit.transformer.hidden_size
        return LayerCollectives(collective_per_token(size, ranks=ranks[:tensor_parallel_size], cluster=cluster).times(2))


class GatedResidual(Module):
    """`up` is split by outputs, `down` by inputs, `gate` is whole on every rank."""

    def __init__(self, config: TransformerConfig, context: LayerContext) -> None:
        super().__init__()
        shared: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "tp_group": context.groups.tp,
        }
        inner = config.ffn_hidden_size
        self.up = DeferrableColumnParallelLinear(config.hidden_size, inner, gather_output=False, **shared)
        self.down = DeferrableRowParallelLinear(inner, config.hidden_size, input_is_parallel=True, skip_bias_add=False, **shared)
        self.gate = torch.nn.Parameter(torch.empty(config.hidden_size, dtype=config.params_dtype))
        self.gate.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.gate * self.down(torch.nn.functional.gelu(self.up(hidden)[0]))[0]


class GatedResidualKind(LayerKind):
    """Reads nothing but hidden states."""

    column_parallel = ("up",)
    row_parallel = ("down",)
    residual_ends = ("down",)

    def build(self, context: LayerContext, index: int) -> GatedResidual:
        return GatedResidual(context.config, context)

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        output: Tensor = layer(hidden)
        return output

    def initial_vector(self, name: str) -> float:
        return 0.5


def register() -> None:
    costs.LAYER_KINDS[NAME], kinds.LAYER_KINDS[NAME] = GatedResidualLayer, GatedResidualKind()


def remove() -> None:
    del costs.LAYER_KINDS[NAME], kinds.LAYER_KINDS[NAME]


HIDDEN, INNER, VOCABULARY = 16, 24, 32
SHAPE = {"hidden_size": HIDDEN, "num_attention_heads": 4, "ffn_hidden_size": INNER, "init_method_std": 0.3}


@pytest.fixture
def kind() -> Iterator[str]:
    register()
    yield NAME
    remove()


@pytest.fixture
def alone() -> Iterator[None]:
    """This process is one of two ranks, of which the other is not there."""
    platform.install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def read(folder: Path, *body: str) -> ModelGraph:
    """An LLM of these layers between its ends, through a model file."""
    llm = {"role": "backbone", "num_layers": len(body), **SHAPE, "layers": ["token_embedding", *body, "head"]}
    (folder / "model.yaml").write_text(yaml.safe_dump({"units": {"llm": llm}}))
    return read_model(folder / "model.yaml")


def test_a_unit_may_mix_kinds_and_is_counted(kind: str, alone: None, tmp_path: Path) -> None:
    graph = read(tmp_path, kind, "transformer", kind)
    assert graph.backbone.layers == ("token_embedding", kind, "transformer", kind, "head")
    assert ModelGraph.from_dict(graph.to_dict()) == graph
    layer = describe_layer(graph, graph.backbone, kind, vocab_size=VOCABULARY)
    assert layer.forward_flops(UnitLoad(10, 100, 3, 1)) == LayerFlops(2.0 * 10 * 2 * HIDDEN * INNER)
    stage = build_layer(graph, "llm", kind, groups=groups(1), options=BuildOptions(), vocab_size=VOCABULARY)
    assert layer.num_parameters == sum(parameter.numel() for parameter in stage.parameters()) == 2 * HIDDEN * INNER + HIDDEN
    for need, is_trained in ((BackwardNeed.FULL, True), (BackwardNeed.INPUT_GRADIENT, False)):
        stage.layers.requires_grad_(is_trained)
        counted = layer.activation_bytes(UnitLoad(64), ActivationCase(need, bytes_per_element=4)).all_ranks()
        assert counted == saved_bytes(stage, *synthetic_input(stage, num_tokens=64))


def test_it_is_planned_and_simulated(kind: str) -> None:
    body = [kind, "transformer"] * (TEXT_ONLY.backbone.transformer.num_layers // 2)
    mixed = replace(TEXT_ONLY, units=(replace(TEXT_ONLY.backbone, layer_kinds=("token_embedding", *body, "head")),))
    seconds = {}
    for name, graph in (("transformer", TEXT_ONLY), ("mixed", mixed)):
        asked = request(graph, num_gpus=2, global_batch_size=8)
        seconds[name] = predict_run(COMPARED["disttrain"](asked), asked).iteration_seconds
    assert 0 < seconds["mixed"] < seconds["transformer"], "the new layers have fewer weights and no attention"


def test_it_trains_as_plain_torch_does(kind: str, alone: None, tmp_path: Path) -> None:
    options = BuildOptions(torch.float64)
    graph, layers = read(tmp_path, kind, kind), range(4)
    stage = UnitStage(graph=graph, unit_name="llm", layers=layers, groups=groups(1), options=options, vocab_size=VOCABULARY)
    initialize_parameters(stage, seed=3)
    tokens, rows = torch.arange(7) % VOCABULARY, torch.tensor([1, 4, 5])
    batch = PackedInput((4, 3), torch.arange(7), token_ids=tokens, target_rows=rows, targets=tokens[rows + 1])
    loss = stage.train()(None, batch).loss_sum
    loss.backward()
    weights = {name: value.detach().clone().requires_grad_() for name, value in stage.named_parameters()}
    hidden = weights["layers.0.word_embeddings.weight"][tokens]
    for index in (1, 2):
        up, down, gate = (weights[f"layers.{index}.{name}"] for name in ("up.weight", "down.weight", "gate"))
        assert torch.equal(gate, torch.full_like(gate, 0.5))
        hidden = hidden + gate * (F.gelu(hidden @ up.t()) @ down.t())
    hidden = F.rms_norm(hidden, (HIDDEN,), weights["layers.3.norm.weight"], 1e-5)
    expected = F.cross_entropy(hidden[rows] @ weights["layers.3.output_layer.weight"].t(), tokens[rows + 1], reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-12, msg=name)


def test_it_trains_under_any_plan(kind: str, ranks: RankPool) -> None:
    """Encoder under tp 2 and LLM under tp 4, each with both kinds, equal one process that takes the samples one by one."""
    ranks.run(register, world_size=8)
    try:
        for change in ("weights shared", "zb-h1 with recomputation"):
            case = build_case("tp 2 and 4", **CHANGES[change])
            units = [replace(unit, layer_kinds=(unit.layers[0], kind, *unit.layers[2:])) for unit in case.graph.units]
            assert_matches(replace(case, graph=replace(case.graph, units=tuple(units))), ranks)
    finally:
        ranks.run(remove, world_size=8)


def test_a_kind_that_is_not_there_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model.yaml, line \d+: unit 'llm', layers\[1\]: 'gated_residual' is no kind of layer"):
        read(tmp_path, NAME, "transformer")


def test_every_kind_that_is_built_is_counted(kind: str) -> None:
    assert set(kinds.LAYER_KINDS) <= set(LAYER_KINDS)
