"""Predicted activations against what autograd keeps of real stages on this machine."""

from collections.abc import Iterator, Sequence
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
from multimodal.cost.layers.layer import Layer, LayerFlops
from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.token_shares import BlockShares, RankShare
from multimodal.cost.unit_load import UnitLoad
from multimodal.model.stage_input import PackedInput
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.unit_stage import UnitStage
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import ModelGraph
from tests.unit.cost.cost_cases import layer_activation_bytes, unit_parameters

LLAMA = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 160}
QWEN = {**LLAMA, "add_qkv_bias": True}
GPT = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256, "normalization": "LayerNorm"}
GPT |= {"activation": "gelu", "add_bias_linear": True}
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


FULL, PASSED, NONE = BackwardNeed.FULL, BackwardNeed.INPUT_GRADIENT, BackwardNeed.NONE
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
FROZEN = pytest.mark.parametrize("frozen", [False, True])
RECOMPUTE = pytest.mark.parametrize("recompute", [None, "selective", "full"])


def with_encoder(vision: dict[str, Any], llm: dict[str, Any] = LLAMA, *, name: str = "vision") -> ModelGraph:
    return ModelGraph.from_dict({"units": {name: {"role": "encoder", **vision}, "llm": {"role": "backbone", **llm}}})


def predicted_bytes(
    graph: ModelGraph,
    unit: str,
    kinds: Sequence[str],
    load: UnitLoad,
    need: BackwardNeed,
    *,
    dtype: Any = torch.float32,
    **case: Any,
) -> float:
    given = {"need": need, "vocab_size": VOCABULARY, "bytes_per_element": dtype.itemsize, "implementation": "local", **case}
    return sum(layer_activation_bytes(graph, unit, kind, load, **given) for kind in kinds)


def check_layer(
    graph: ModelGraph,
    unit: str,
    kind: str,
    *,
    counted: int = 256,
    load: UnitLoad | None = None,
    need: BackwardNeed = FULL,
    freezes: bool = False,
    dtype: Any = torch.float32,
    recompute: Any = None,
    within: float = 0.1,
) -> tuple[Layer, UnitStage]:
    """Build a layer: it has as many parameters as its costs say, and keeps as many bytes for its backward within a share."""
    options = BuildOptions(dtype, recompute=recompute)
    stage = build_layer(graph, unit, kind, groups=groups(1), options=options, vocab_size=VOCABULARY)
    layer = describe_layer(graph, graph.unit(unit), kind, vocab_size=VOCABULARY)
    assert layer.is_built_in(layer.unit)
    assert layer.num_parameters == sum(parameter.numel() for parameter in stage.parameters())
    if freezes:
        stage.layers.requires_grad_(False)
    if layer.num_expert_weights:
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.normal_(0, 0.1)
    if load is None:
        merged = graph.unit(unit).merge_factor if kind.endswith("projector") else 1
        load = UnitLoad(counted * merged, 0, counted)
    measured = saved_bytes(stage, *synthetic_input(stage, num_tokens=counted, num_sequences=2))
    predicted = predicted_bytes(graph, unit, [kind], load, need, dtype=dtype, recompute=recompute)
    assert predicted == pytest.approx(measured, rel=within)
    return layer, stage


@pytest.mark.deep(when=lambda frozen, dtype: frozen != (dtype == torch.bfloat16))
@DTYPES
@FROZEN
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
    need = PASSED if frozen else FULL
    check_layer(graph_of(shape), unit, kind, need=need, freezes=frozen, dtype=dtype, recompute=recompute, within=0.05)


@FROZEN
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("flow", [{}, {"condition_tokens": 33, "has_joint_attention": True}], ids=["plain", "joint"])
def test_modulated_layers_keep_what_is_predicted(flow: dict[str, Any], shape: str, frozen: bool) -> None:
    units = graph_of(shape).to_dict()["units"]
    graph = ModelGraph.from_dict({"units": {"llm": units["llm"], "painter": {**units["painter"], "flow": flow}}})
    check_layer(graph, "painter", "modulated_transformer", need=PASSED if frozen else FULL, freezes=frozen)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_parallel_ranks_share_what_is_predicted(shape: str, sequence_parallel: bool) -> None:
    graph, options = graph_of(shape), BuildOptions(sequence_parallel=sequence_parallel)
    stage = build_layer(graph, "llm", "transformer", groups=groups(2), options=options, vocab_size=VOCABULARY)
    measured = saved_bytes(stage, *synthetic_input(stage, num_tokens=128))
    sharing = {"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel}
    predicted = predicted_bytes(graph, "llm", ["transformer"], UnitLoad(128, 0, 128), FULL, **sharing)
    assert predicted / 2 == pytest.approx(measured, rel=0.05)


@pytest.mark.deep(when=lambda dtype, recompute: (recompute == "full") != (dtype == torch.bfloat16))
@RECOMPUTE
@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_context_parallel_ranks_share_what_is_predicted(shape: str, dtype: Any, recompute: Any) -> None:
    graph, num_tokens = graph_of(shape), 512
    options = BuildOptions(dtype, recompute=recompute)
    stage = build_layer(graph, "llm", "transformer", groups=groups(1, context=2), options=options, vocab_size=VOCABULARY)
    share = RankShare(BlockShares(np.array([0, 1, 1, 0], dtype=np.int32), 2, num_tokens, num_tokens // 4), 0)
    hidden = torch.randn(num_tokens // 2, 1, 64, dtype=dtype).requires_grad_()
    batch = PackedInput((300, 212), torch.from_numpy(share.positions), share=share)
    load, case = UnitLoad(num_tokens, 0, num_tokens), {"dtype": dtype, "recompute": recompute, "is_spread": True}
    predicted = predicted_bytes(graph, "llm", ["transformer"], load, FULL, **case)
    assert predicted / 2 == pytest.approx(saved_bytes(stage, hidden, batch, None), rel=0.05)


@RECOMPUTE
@pytest.mark.parametrize("shape", [*SHAPES, "deepstack"])
@pytest.mark.parametrize("unit", ["vision", "llm"])
def test_stages_keep_the_sum_of_their_layers(unit: str, shape: str, recompute: Any) -> None:
    """Parameters exactly; what a whole unit keeps within a tenth, with deepstack, too, where states travel beside others."""
    is_deep, num_tokens = shape == "deepstack", 128
    deep = {**GPT, "image": {**IMAGE, "deepstack_layers": [0, 2], "position_grid": 3}}
    graph = with_encoder(deep, QWEN3) if is_deep else graph_of(shape)
    described = graph.unit(unit)
    stage = UnitStage(
        graph=graph,
        unit_name=unit,
        layers=range(len(described.layers)),
        groups=groups(1),
        options=BuildOptions(recompute=recompute),
        vocab_size=VOCABULARY,
    ).train()
    places, rows = torch.arange(num_tokens), torch.arange(48)
    if unit == "vision":
        corners = (places, places, 128 + places, 128 + places) if is_deep else (places, places)
        batch = PackedInput((64, 64), torch.stack(corners, 1), patches=torch.randn(num_tokens, 16))
        inputs, load = (None, batch), UnitLoad(num_tokens, 0, num_tokens // 4)
    else:
        items = {"item_rows": rows} if is_deep else {}
        batch = PackedInput((100, 28), places, token_ids=places, target_rows=rows, targets=rows, **items)
        inputs = (None, batch, torch.randn(48, 3 * 64)) if is_deep else (None, batch)
        load = UnitLoad(num_tokens, 0, 48)
    predicted = predicted_bytes(graph, unit, described.layers, load, FULL, recompute=recompute)
    assert predicted == pytest.approx(saved_bytes(stage, *inputs), rel=0.1)
    assert unit_parameters(graph, described, vocab_size=VOCABULARY) == sum(each.numel() for each in stage.parameters())


@pytest.mark.parametrize(
    ("shape", "changes", "of_encoder"),
    [
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


@FROZEN
@pytest.mark.parametrize("options", [{}, {"has_pre_norm": True}, {"num_registers": 3, "position_grid": 12}])
def test_learned_positions_are_counted(options: dict[str, Any], frozen: bool) -> None:
    image = {"patch_size": 4, "merge_size": 1, "image_size": 32, "class_token": "dropped", **options}
    graph = with_encoder({**CLIP, "image": image, "projector_norm": "none"})
    kind, need = graph.unit("vision").layers[0], NONE if frozen else FULL
    check_layer(graph, "vision", kind, load=UnitLoad(256), need=need, freezes=frozen)


@FROZEN
@pytest.mark.parametrize("shape", ["llama", "gpt"])
@pytest.mark.parametrize("queries", [{"num_queries": 24}, {"num_queries": 24, "num_layers": 2, "has_self_attention": True}])
def test_queries_are_counted(queries: dict[str, Any], shape: str, frozen: bool) -> None:
    widths = {"hidden_size": 48, "num_attention_heads": 3, "ffn_hidden_size": 80}
    graph = with_encoder({**SHAPES[shape], "image": IMAGE, "queries": {**queries, **widths}})
    kind, need = graph.unit("vision").layers[-1], PASSED if frozen else FULL
    check_layer(graph, "vision", kind, load=UnitLoad(256, 0, 48, 2), need=need, freezes=frozen)


@FROZEN
@RECOMPUTE
def test_windows_are_counted(recompute: Any, frozen: bool) -> None:
    shape = {**LLAMA, "num_query_groups": 4, "add_bias_linear": True}
    graph = with_encoder({**shape, "image": {**IMAGE, "window_size": 16}})
    kind, need = graph.unit("vision").layers[1], PASSED if frozen else FULL
    layer, _ = check_layer(graph, "vision", kind, load=UnitLoad(256), need=need, freezes=frozen, recompute=recompute)
    assert layer.forward_flops(UnitLoad(256)) == LayerFlops(2.0 * 256 * layer.num_weights, 4.0 * 64 * 256 * 16)


@FROZEN
@pytest.mark.parametrize(
    ("kind", "counted"), [("audio_embedding", 256), ("windowed_transformer", 256), ("linear_projector", 128)]
)
@pytest.mark.parametrize(
    "audio", [{"merge": "averaged", "chunk_tokens": 16}, {"merge": "averaged", "max_tokens": 500}], ids=["chunks", "whole clips"]
)
def test_sound_is_counted(audio: dict[str, Any], kind: str, counted: int, frozen: bool) -> None:
    shape = {**GPT, "has_rotary_positions": False, "has_linear_projector": True, "projector_norm": "merged"}
    graph = with_encoder({**shape, "audio": {"num_mel_bins": 8, **audio}}, name="ear")
    kind = kind if kind in graph.unit("ear").layers else "transformer"
    without = NONE if kind == "audio_embedding" else PASSED
    check_layer(graph, "ear", kind, counted=counted, need=without if frozen else FULL, freezes=frozen)


@pytest.mark.deep(when=lambda frozen, dtype: frozen != (dtype == torch.bfloat16))
@DTYPES
@FROZEN
@RECOMPUTE
@pytest.mark.parametrize("shape", [MIXTRAL, SHARING], ids=["mixtral", "sharing"])
def test_experts_are_counted(shape: dict[str, Any], recompute: Any, frozen: bool, dtype: Any) -> None:
    graph, need = ModelGraph.from_dict({"units": {"llm": {"role": "backbone", **shape}}}), PASSED if frozen else FULL
    case = {"load": UnitLoad(256), "need": need, "freezes": frozen, "dtype": dtype, "recompute": recompute, "within": 0.01}
    layer, stage = check_layer(graph, "llm", "moe_transformer", **case)
    assert layer.num_expert_weights == sum(each.numel() for name, each in stage.named_parameters() if ".experts." in name)
