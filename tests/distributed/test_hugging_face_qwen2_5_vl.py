"""Qwen2.5-VL of transformers: windows, M-RoPE and merger; the same logits and gradients, in one process and under any plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from multimodal.attention.windows import order_by_window
from multimodal.balance.algorithms.distribute_tokens import TokenDistribution
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.in_order import balance_in_order
from multimodal.cost.layers.registry import read_model
from multimodal.data.image_processing import patch_positions
from multimodal.values.model_graph import ModelGraph
from tests.distributed.gradient_case import GradientCase, RankGradients
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_case import FromFolder, PaddedSource, gradients_here, logits_here
from tests.distributed.random_source import SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import build_plan
from tests.distributed.wide_transformers import build_wide_model, double_precision, gradients_by_key

IMAGE_TOKEN, VOCABULARY = 60, 61
SAMPLES = (
    SampleShape((("vision", 3, 5), ("vision", 1, 1)), 9, 4),
    SampleShape((), 5, 5),
    SampleShape((("vision", 2, 2),), 7, 3),
    SampleShape((("vision", 4, 3), ("vision", 1, 5), ("vision", 2, 4)), 8, 2),
)
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": ({"vision": (1, 1, 1), "llm": (1, 1, 1), "colocated": True}, {}),
    "vision dp 2, llm tp 2 and pp 2": ({"vision": (1, 1, 2), "llm": (2, 2, 1)}, {"sequence_parallel": True}),
    "vision tp 2 and pp 2, llm zb-h1": (
        {"vision": (2, 2, 1), "llm": (1, 2, 1)},
        {"builder": "zb-h1", "sequence_parallel": True, "recompute": "full"},
    ),
    "cp 2 of both, weights shared": (
        {"vision": (1, 1, 2, 2), "llm": (1, 1, 2, 2)},
        {"shards_weights": True, "distribution": TokenDistribution.BY_ITEM},
    ),
    "cp 4 of the encoder, blocks": ({"vision": (1, 1, 1, 4), "llm": (2, 1, 1)}, {"attention_backend": "blocks"}),
}


def qwen2_5_vl(**changes: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_heads": 4,
        "patch_size": 2,
        "window_size": 8,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 24,
        "initializer_range": 0.3,
    }
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 3, 2], "rope_theta": 5000.0},
    }
    ids = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": 59, "vision_end_token_id": 58}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, text_config=text, **ids, **changes))


def case_of(graph: ModelGraph, sizes: Mapping[str, Any], **options: Any) -> GradientCase:
    plan = build_plan(graph, **sizes)
    source = PaddedSource(graph, SAMPLES, 64, num_tokens=58)
    lengths = [source.lengths(index) for index in range(len(source))]
    assignment = balance_in_order(lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=1))
    return GradientCase(graph, plan, assignment, source, **options)


def run_transformers(model: Any, source: PaddedSource) -> tuple[list[np.ndarray], float]:
    """Logits of the targets, sample by sample, and the loss; gradients are left in the model."""
    divisor = sum(shape.num_target_tokens for shape in SAMPLES)
    logits, loss_sum = [], 0.0
    with double_precision():
        for index, shape in enumerate(SAMPLES):
            text = source.text(index)
            tokens, kinds = torch.from_numpy(text.token_ids.copy()), torch.zeros(len(text.token_ids), dtype=torch.int64)
            for _, start, length in text.item_starts:
                tokens[start : start + length], kinds[start : start + length] = IMAGE_TOKEN, 1
            given = {"input_ids": tokens[None], "mm_token_type_ids": kinds[None]}
            if shape.items:
                items = range(len(shape.items))
                patches = [torch.from_numpy(source.item(index, item).patches).double() for item in items]
                grids = [(1, *source.item_grid(index, item)) for item in items]
                given |= {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
            rows = torch.from_numpy(text.is_target).nonzero()[:, 0]
            found = model(**given).logits[0, rows]
            loss = torch.nn.functional.cross_entropy(found, torch.from_numpy(text.labels)[rows], reduction="sum")
            (loss / divisor).backward()
            logits.append(found.detach().numpy())
            loss_sum += float(loss.detach())
    return logits, loss_sum


@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_and_gradients_equal_transformers(is_tied: bool, ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = build_wide_model(lambda: qwen2_5_vl(tie_word_embeddings=is_tied), folder, max_shard_size="10KB")
    graph = read_model(folder)
    alone, run = case_of(graph, PLANS["alone"][0]), FromFolder(folder)
    assert isinstance(alone.source, PaddedSource)
    logits, loss_sum = run_transformers(model, alone.source)
    (found,) = ranks.run(logits_here, run, alone, world_size=1)
    for mine, theirs in zip(found, logits, strict=True):
        assert np.abs(mine[:, :VOCABULARY] - theirs).max() < 1e-12
    (gradients,) = ranks.run(gradients_here, run, alone, gradients_by_key(model), world_size=1)
    expected = RankGradients({"llm": loss_sum}, gradients, {})
    for name, (sizes, options) in list(PLANS.items())[: 2 if is_tied else None]:
        target = tmp_path / name
        assert_matches(case_of(graph, sizes, **options), ranks, run=FromFolder(folder, target), expected=expected)
        for path in folder.glob("*.safetensors"):
            assert (target / path.name).read_bytes() == path.read_bytes(), f"{path.name} under {name}"


@pytest.mark.parametrize("grid", [(6, 10), (2, 2), (8, 8), (4, 22)])
def test_windows_are_those_of_transformers(grid: tuple[int, int]) -> None:
    vision_utils = pytest.importorskip("transformers.vision_utils", reason="this transformers has no vision_utils")
    index, bounds = vision_utils.get_vision_window_index(torch.tensor([[1, *grid]]), 2, 112, 14)
    positions = torch.from_numpy(patch_positions(grid, merge_size=2))
    order, lengths = order_by_window(positions, [len(positions)], size=8)
    assert lengths == tuple(bounds.diff().tolist())
    assert order.tolist() == (4 * index[:, None] + torch.arange(4)).flatten().tolist()
