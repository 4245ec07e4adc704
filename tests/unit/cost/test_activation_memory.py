"""Predicted activations against what autograd keeps of real stages on this machine."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.runtime import platform
from megatron.runtime.execution.activation_store import SavedTensors, storage_identity
from megatron.runtime.profiler import build_layer, synthetic_input
from multimodal.cost.layers.layer import LayerFlops
from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.token_shares import BlockShares, RankShare
from multimodal.cost.unit_load import UnitLoad
from multimodal.model.stage_input import PackedInput
from multimodal.model.transformer_config import BuildOptions, Precision
from multimodal.model.unit_stage import UnitStage
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import ModelGraph
from tests.unit.cost.layer_answers import layer_activation_bytes, unit_parameters

LLAMA = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 160}
QWEN = {**LLAMA, "add_qkv_bias": True}
GPT = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 256,
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
}
QWEN3 = {**LLAMA, "qk_layernorm": True}
CLIP = {**GPT, "activation": "quick_gelu", "has_rotary_positions": False, "has_layer_scale": True}
MIXTRAL = {**LLAMA, "experts": {"num_experts": 4, "aux_loss_coeff": 0.1}}
SHARING = {**LLAMA, "experts": {"num_experts": 6, "router_topk": 3, "ffn_hidden_size": 32, "shared_expert_intermediate_size": 96}}
SHAPES = {"clip": CLIP, "llama": LLAMA, "gpt": GPT, "qwen": QWEN, "qwen3": QWEN3}
IMAGE = {"patch_size": 4, "in_channels": 1}
VOCABULARY = 512


@pytest.fixture(autouse=True)
def fake_groups() -> Iterator[None]:
    platform.install()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def graph_of(shape: str) -> ModelGraph:
    described = SHAPES[shape]
    return ModelGraph.from_dict(
        {
            "units": {
                "vision": {"role": "encoder", **described, "image": IMAGE},
                "llm": {"role": "backbone", **described},
                "painter": {"role": "generator", **described, "image": IMAGE},
            }
        }
    )


def groups(size: int, *, context: int = 1) -> ProcessGroupCollection:
    alone, both = dist.new_group([0]), dist.group.WORLD
    of_size = {1: alone, 2: both}
    names = ("pp", "ep", "expt_tp", "tp_ep")
    shared = {"tp": of_size[size], "cp": of_size[context], "tp_cp": of_size[max(size, context)]}
    return ProcessGroupCollection(**shared, **dict.fromkeys(names, alone))


def saved_bytes(stage: UnitStage, *inputs: Any) -> int:
    parameters = frozenset(map(storage_identity, stage.parameters()))
    saved = SavedTensors(parameters)
    with saved:
        keep = stage(*inputs)  # a freed tensor's storage would be taken for a new one's
    assert keep is not None
    return saved.size_bytes


def load_of(graph: ModelGraph, unit: str, kind: str, counted: int) -> UnitLoad:
    return UnitLoad(counted * (graph.unit(unit).merge_factor if kind.endswith("projector") else 1), 0, counted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("unit", "kind", "recompute"),
    [
        ("llm", "transformer", None),
        ("llm", "transformer", "selective"),
        ("llm", "transformer", "full"),
        ("vision", "transformer", None),
        ("llm", "head", None),
        ("vision", "projector", None),
        ("painter", "generator_head", None),
    ],
)
def test_layers_keep_what_is_predicted(unit: str, kind: str, recompute: Any, shape: str, frozen: bool, dtype: Any) -> None:
    graph, layer, counted = graph_of(shape), kind, 256
    options = BuildOptions(Precision(dtype), recompute=recompute)
    stage = build_layer(graph, unit, layer, groups=groups(1), options=options, vocab_size=VOCABULARY)
    stage.layers.requires_grad_(not frozen)
    measured = saved_bytes(stage, *synthetic_input(stage, num_tokens=counted, num_sequences=2))
    predicted = layer_activation_bytes(
        graph,
        unit,
        layer,
        load_of(graph, unit, layer, counted),
        need=BackwardNeed.INPUT_GRADIENT if frozen else BackwardNeed.FULL,
        vocab_size=VOCABULARY,
        bytes_per_element=dtype.itemsize,
        implementation="local",
        recompute=recompute,
    )
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_parallel_ranks_share_what_is_predicted(shape: str, sequence_parallel: bool) -> None:
    graph, layer = graph_of(shape), "transformer"
    options = BuildOptions(sequence_parallel=sequence_parallel)
    stage = build_layer(graph, "llm", layer, groups=groups(2), options=options, vocab_size=VOCABULARY)
    measured = saved_bytes(stage, *synthetic_input(stage, num_tokens=128))
    predicted = layer_activation_bytes(
        graph,
        "llm",
        layer,
        UnitLoad(128, 0, 128),
        need=BackwardNeed.FULL,
        vocab_size=VOCABULARY,
        tensor_parallel_size=2,
        sequence_parallel=sequence_parallel,
        bytes_per_element=4,
        implementation="local",
    )
    assert predicted / 2 == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_context_parallel_ranks_share_what_is_predicted(shape: str, dtype: Any, recompute: Any) -> None:
    graph, num_tokens = graph_of(shape), 512
    options = BuildOptions(Precision(dtype), recompute=recompute)
    stage = build_layer(graph, "llm", "transformer", groups=groups(1, context=2), options=options, vocab_size=VOCABULARY)
    blocks = np.array([0, 1, 1, 0], dtype=np.int32)
    share = RankShare(BlockShares(blocks, 2, num_tokens, num_tokens // 4), 0)
    hidden = torch.randn(num_tokens // 2, 1, 64, dtype=dtype).requires_grad_()
    batch = PackedInput((300, 212), torch.from_numpy(share.positions), share=share)
    predicted = layer_activation_bytes(
        graph,
        "llm",
        "transformer",
        UnitLoad(num_tokens, 0, num_tokens),
        need=BackwardNeed.FULL,
        vocab_size=VOCABULARY,
        bytes_per_element=dtype.itemsize,
        implementation="local",
        recompute=recompute,
        is_spread=True,
    )
    assert predicted / 2 == pytest.approx(saved_bytes(stage, hidden, batch, None), rel=0.05)


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unit", ["vision", "llm"])
def test_stages_keep_the_sum_of_their_layers(unit: str, shape: str, recompute: Any) -> None:
    graph, num_tokens, num_targets = graph_of(shape), 128, 48
    described = graph.unit(unit)
    stage = UnitStage(
        graph=graph,
        unit_name=unit,
        layers=range(len(described.layers)),
        groups=groups(1),
        options=BuildOptions(recompute=recompute),
        vocab_size=VOCABULARY,
    ).train()
    positions = torch.arange(num_tokens)
    if unit == "vision":
        batch = PackedInput((64, 64), torch.stack((positions, positions), 1), patches=torch.randn(num_tokens, 16))
        load = UnitLoad(num_tokens, 0, num_tokens // 4)
    else:
        rows = torch.arange(num_targets)
        batch = PackedInput((100, 28), positions, token_ids=positions, target_rows=rows, targets=rows)
        load = UnitLoad(num_tokens, 0, num_targets)
    predicted = sum(
        layer_activation_bytes(
            graph,
            unit,
            kind,
            load,
            need=BackwardNeed.FULL,
            vocab_size=VOCABULARY,
            bytes_per_element=4,
            implementation="local",
            recompute=recompute,
        )
        for kind in described.layers
    )
    assert predicted == pytest.approx(saved_bytes(stage, None, batch), rel=0.1)


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("unit", ["vision", "llm"])
def test_deepstack_is_counted(unit: str, recompute: Any) -> None:
    """Parameters exactly; what a whole unit keeps, in which hidden states travel beside others, within a tenth."""
    image = {**IMAGE, "deepstack_layers": [0, 2], "position_grid": 3}
    units = {"vision": {"role": "encoder", **GPT, "image": image}, "llm": {"role": "backbone", **QWEN3}}
    graph, num_tokens = ModelGraph.from_dict({"units": units}), 128
    described = graph.unit(unit)
    options, layers = BuildOptions(recompute=recompute), range(len(described.layers))
    stage = UnitStage(
        graph=graph, unit_name=unit, layers=layers, groups=groups(1), options=options, vocab_size=VOCABULARY
    ).train()
    places, items = torch.arange(num_tokens), None
    if unit == "vision":
        places = torch.stack((places, places, 128 + places, 128 + places), 1)
        batch, load = PackedInput((64, 64), places, patches=torch.randn(num_tokens, 16)), UnitLoad(num_tokens, 0, num_tokens // 4)
    else:
        rows = torch.arange(48)
        given = {"token_ids": places, "target_rows": rows, "targets": rows, "item_rows": rows}
        batch, load = PackedInput((100, 28), places, **given), UnitLoad(num_tokens, 0, 48)
        items = torch.randn(48, 3 * 64)
    costs = {"need": BackwardNeed.FULL, "bytes_per_element": 4, "implementation": "local", "recompute": recompute}
    predicted = sum(layer_activation_bytes(graph, unit, kind, load, vocab_size=VOCABULARY, **costs) for kind in described.layers)
    assert predicted == pytest.approx(saved_bytes(stage, None, batch, items), rel=0.1)
    assert unit_parameters(graph, described, vocab_size=VOCABULARY) == sum(each.numel() for each in stage.parameters())


@pytest.mark.parametrize(
    ("shape", "changes", "of_encoder"),
    [
        *((shape, {}, {}) for shape in SHAPES),
        ("llama", {"add_qkv_bias": True, "add_proj_bias": True}, {}),
        ("llama", {"add_mlp_bias": True}, {"projector_normalization": "LayerNorm"}),
        ("llama", {"num_query_groups": 4}, {"qk_layernorm": True, "qk_norm_spans_heads": True}),
    ],
)
def test_parameters_are_counted_as_they_are_built(shape: str, changes: dict[str, Any], of_encoder: dict[str, Any]) -> None:
    plain = graph_of(shape).to_dict()
    units = {name: {**unit, **changes, **(of_encoder if name == "vision" else {})} for name, unit in plain["units"].items()}
    graph = ModelGraph.from_dict({**plain, "units": units})
    for unit in graph.units:
        total = 0
        for kind in dict.fromkeys(unit.layers):
            stage = build_layer(graph, unit.name, kind, groups=groups(1), options=BuildOptions(), vocab_size=VOCABULARY)
            built = sum(parameter.numel() for parameter in stage.parameters())
            assert describe_layer(graph, unit, kind, vocab_size=VOCABULARY).num_parameters == built, (unit.name, kind)
            total += built * unit.layers.count(kind)
        assert unit_parameters(graph, unit, vocab_size=VOCABULARY) == total


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", [{}, {"has_pre_norm": True}, {"num_registers": 3, "position_grid": 12}])
def test_learned_positions_are_counted(options: dict[str, Any], frozen: bool) -> None:
    """Parameters exactly; what the first layer keeps for its backward, where it has one, within a tenth."""
    image = {"patch_size": 4, "merge_size": 1, "image_size": 32, "class_token": "dropped", **options}
    units = {
        "vision": {"role": "encoder", **CLIP, "image": image, "projector_norm": "none"},
        "llm": {"role": "backbone", **LLAMA},
    }
    graph = ModelGraph.from_dict({"units": units})
    kind = graph.unit("vision").layers[0]
    stage = build_layer(graph, "vision", kind, groups=groups(1), options=BuildOptions(), vocab_size=VOCABULARY)
    layer = describe_layer(graph, graph.unit("vision"), kind, vocab_size=VOCABULARY)
    assert layer.num_parameters == sum(parameter.numel() for parameter in stage.parameters())
    stage.layers.requires_grad_(not frozen)
    measured = saved_bytes(stage, *synthetic_input(stage, num_tokens=256, num_sequences=2))
    need = BackwardNeed.NONE if frozen else BackwardNeed.FULL
    predicted = layer_activation_bytes(
        graph, "vision", kind, UnitLoad(256), need=need, vocab_size=VOCABULARY, bytes_per_element=4, implementation="local"
    )
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", ["llama", "gpt"])
@pytest.mark.parametrize("queries", [{"num_queries": 24}, {"num_queries": 24, "num_layers": 2, "has_self_attention": True}])
def test_queries_are_counted(queries: dict[str, Any], shape: str, frozen: bool) -> None:
    """Parameters exactly; what attention of queries to tokens keeps, within a tenth."""
    widths = {"hidden_size": 48, "num_attention_heads": 3, "ffn_hidden_size": 80}
    vision = {"role": "encoder", **SHAPES[shape], "image": IMAGE, "queries": {**queries, **widths}}
    graph = ModelGraph.from_dict({"units": {"vision": vision, "llm": {"role": "backbone", **LLAMA}}})
    kind = graph.unit("vision").layers[-1]
    stage = build_layer(graph, "vision", kind, groups=groups(1), options=BuildOptions(), vocab_size=VOCABULARY)
    layer = describe_layer(graph, graph.unit("vision"), kind, vocab_size=VOCABULARY)
    assert layer.num_parameters == sum(parameter.numel() for parameter in stage.parameters())
    stage.layers.requires_grad_(not frozen)
    measured = saved_bytes(stage, *synthetic_input(stage, num_tokens=256, num_sequences=2))
    need = BackwardNeed.INPUT_GRADIENT if frozen else BackwardNeed.FULL
    load, case = UnitLoad(256, 0, 48, 2), {"bytes_per_element": 4, "implementation": "local"}
    predicted = layer_activation_bytes(graph, "vision", kind, load, need=need, vocab_size=VOCABULARY, **case)
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_windows_are_counted(recompute: Any, frozen: bool) -> None:
    shape = {**LLAMA, "num_query_groups": 4, "add_bias_linear": True}
    units = {"vision": {"role": "encoder", **shape, "image": {**IMAGE, "window_size": 16}}, "llm": {"role": "backbone", **LLAMA}}
    graph = ModelGraph.from_dict({"units": units})
    kind = graph.unit("vision").layers[1]
    options = BuildOptions(recompute=recompute)
    stage = build_layer(graph, "vision", kind, groups=groups(1), options=options, vocab_size=VOCABULARY)
    layer = describe_layer(graph, graph.unit("vision"), kind, vocab_size=VOCABULARY)
    assert layer.num_parameters == sum(parameter.numel() for parameter in stage.parameters())
    assert layer.forward_flops(UnitLoad(256)) == LayerFlops(2.0 * 256 * layer.num_weights, 4.0 * 64 * 256 * 16)
    stage.layers.requires_grad_(not frozen)
    measured = saved_bytes(stage, *synthetic_input(stage, num_tokens=256, num_sequences=2))
    need = BackwardNeed.INPUT_GRADIENT if frozen else BackwardNeed.FULL
    predicted = layer_activation_bytes(
        graph,
        "vision",
        kind,
        UnitLoad(256),
        need=need,
        vocab_size=VOCABULARY,
        bytes_per_element=4,
        implementation="local",
        recompute=recompute,
    )
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("kind", "counted"), [("audio_embedding", 256), ("windowed_transformer", 256), ("linear_projector", 128)]
)
@pytest.mark.parametrize(
    "audio", [{"merge": "averaged", "chunk_tokens": 16}, {"merge": "averaged", "max_tokens": 500}], ids=["chunks", "whole clips"]
)
def test_sound_is_counted(audio: dict[str, Any], kind: str, counted: int, frozen: bool) -> None:
    """Parameters exactly; what layers keep within a tenth."""
    shape = {**GPT, "has_rotary_positions": False, "has_linear_projector": True, "projector_norm": "merged"}
    ear = {"role": "encoder", **shape, "audio": {"num_mel_bins": 8, **audio}}
    graph = ModelGraph.from_dict({"units": {"ear": ear, "llm": {"role": "backbone", **LLAMA}}})
    if kind not in graph.unit("ear").layers:
        kind = "transformer"
    stage = build_layer(graph, "ear", kind, groups=groups(1), options=BuildOptions(), vocab_size=VOCABULARY)
    layer = describe_layer(graph, graph.unit("ear"), kind, vocab_size=VOCABULARY)
    assert layer.can_be_built
    assert layer.num_parameters == sum(parameter.numel() for parameter in stage.parameters())
    stage.layers.requires_grad_(not frozen)
    measured = saved_bytes(stage, *synthetic_input(stage, num_tokens=counted, num_sequences=2))
    without = BackwardNeed.NONE if kind == "audio_embedding" else BackwardNeed.INPUT_GRADIENT
    predicted = layer_activation_bytes(
        graph,
        "ear",
        kind,
        load_of(graph, "ear", kind, counted),
        need=without if frozen else BackwardNeed.FULL,
        vocab_size=VOCABULARY,
        bytes_per_element=4,
        implementation="local",
    )
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("shape", [MIXTRAL, SHARING], ids=["mixtral", "sharing"])
def test_experts_are_counted(shape: dict[str, Any], recompute: Any, frozen: bool, dtype: Any) -> None:
    """Parameters exactly; what a layer keeps within a hundredth."""
    graph, kind = ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **shape}}}), "moe_transformer"
    options = BuildOptions(Precision(dtype), recompute=recompute)
    stage = build_layer(graph, "llm", kind, groups=groups(1), options=options, vocab_size=VOCABULARY)
    layer = describe_layer(graph, graph.unit("llm"), kind, vocab_size=VOCABULARY)
    assert layer.num_parameters == sum(parameter.numel() for parameter in stage.parameters())
    of_experts = sum(each.numel() for name, each in stage.named_parameters() if ".experts." in name)
    assert layer.num_expert_weights == of_experts
    stage.layers.requires_grad_(not frozen)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(0, 0.1)
    measured = saved_bytes(stage, *synthetic_input(stage, num_tokens=256, num_sequences=2))
    predicted = layer_activation_bytes(
        graph,
        "llm",
        kind,
        UnitLoad(256),
        need=BackwardNeed.INPUT_GRADIENT if frozen else BackwardNeed.FULL,
        vocab_size=VOCABULARY,
        bytes_per_element=dtype.itemsize,
        implementation="local",
        recompute=recompute,
    )
    assert predicted == pytest.approx(measured, rel=0.01)
