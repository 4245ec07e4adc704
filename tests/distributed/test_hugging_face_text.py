"""Llama, Qwen2 and Qwen3 of transformers: the same logits and gradients in float64, in one process and under any plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.in_order import balance_in_order
from multimodal.cost.layers.registry import read_model
from multimodal.values.model_graph import ModelGraph
from tests.distributed.gradient_case import GradientCase, RankGradients
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_case import FromFolder, PaddedSource, gradients_here, logits_here
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import build_plan
from tests.distributed.wide_transformers import build_wide_model, double_precision, gradients_by_key

VOCABULARY, MULTIPLE = 61, 64
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "rope_theta": 5000.0,
}
SAMPLES = tuple(SampleShape((), length, targets) for length, targets in ((9, 4), (5, 5), (12, 3), (7, 2), (3, 1), (6, 6)))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True))


def llama_of_long_contexts() -> Any:
    """Llama 3.2: low frequencies are slowed down, and word embeddings tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    shape = {key: value for key, value in SHAPE.items() if key != "rope_theta"} | {"num_attention_heads": 2}
    config = LlamaConfig(**shape, rope_parameters={**scaling, "original_max_position_embeddings": 16}, tie_word_embeddings=True)
    return LlamaForCausalLM(config)


def qwen2() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8))


def case_of(graph: ModelGraph, sizes: tuple[int, ...] = (1, 1, 1), **options: Any) -> GradientCase:
    """sizes: tp, pp, dp, cp."""
    plan = build_plan(graph, llm=sizes)
    vocab_size = graph.backbone.vocab_size or 0
    source = PaddedSource(graph, SAMPLES, -(-vocab_size // MULTIPLE) * MULTIPLE, num_tokens=vocab_size)
    lengths = [source.lengths(index) for index in range(len(source))]
    assignment = balance_in_order(lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=1))
    return GradientCase(graph, plan, assignment, source, **options)


def run_transformers(model: Any, source: RandomSource) -> tuple[list[np.ndarray], float]:
    """Logits of the targets, sample by sample, and the loss; gradients are left in the model."""
    divisor = sum(shape.num_target_tokens for shape in SAMPLES)
    logits, loss_sum = [], 0.0
    with double_precision():
        for index in range(len(source)):
            text = source.text(index)
            rows = torch.from_numpy(text.is_target).nonzero()[:, 0]
            found = model(input_ids=torch.from_numpy(text.token_ids)[None]).logits[0, rows]
            loss = torch.nn.functional.cross_entropy(found, torch.from_numpy(text.labels)[rows], reduction="sum")
            (loss / divisor).backward()
            logits.append(found.detach().numpy())
            loss_sum += float(loss)
    return logits, loss_sum


PLANS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "tp 2, pp 2, dp 2": ((2, 2, 2), {}),
    "sequence parallelism, tp 2, cp 2": ((2, 1, 1, 2), {"sequence_parallel": True}),
    "zero 3, tp 2, dp 3": ((2, 1, 3), {"shards_weights": True}),
    "zb-h1, pp 3": ((1, 3, 1), {"builder": "zb-h1", "recompute": "full"}),
}


@pytest.mark.parametrize("build", [llama, llama_of_long_contexts, qwen2, qwen3])
def test_logits_and_gradients_equal_transformers(build: Callable[[], Any], ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = build_wide_model(build, folder, max_shard_size="10KB")
    graph = read_model(folder)
    alone, run = case_of(graph), FromFolder(folder)
    logits, loss_sum = run_transformers(model, alone.source)
    (found,) = ranks.run(logits_here, run, alone, world_size=1)
    for mine, theirs in zip(found, logits, strict=True):
        assert np.abs(mine[:, :VOCABULARY] - theirs).max() < 1e-12
    (gradients,) = ranks.run(gradients_here, run, alone, gradients_by_key(model), world_size=1)
    expected = RankGradients({"llm": loss_sum}, gradients, {})
    for name, (sizes, options) in {"alone": ((1, 1, 1), {}), **PLANS}.items():
        target = tmp_path / name
        case = case_of(graph, sizes, **options)
        assert_matches(case, ranks, run=FromFolder(folder, target), expected=expected)
        for path in folder.iterdir():
            if path.suffix == ".safetensors":
                assert (target / path.name).read_bytes() == path.read_bytes(), f"{path.name} under {name}"
