"""Text models of transformers: the same logits and gradients in float64, in one process and under any plan."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from multimodal.cost.layers.registry import read_model
from tests.distributed.hugging_face_comparison import VOCABULARY, Plans, compare_logits, weights_of
from tests.distributed.random_source import SampleShape
from tests.distributed.rank_pool import RankPool

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
    """Positions would slow down in sequences of more than 64 tokens; the upper layers have windows."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    scaling = {"rope_type": "dynamic", "rope_theta": SHAPE["rope_theta"], "factor": 2.0}
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    shape = {key: value for key, value in SHAPE.items() if key != "rope_theta"}
    config = Qwen2Config(**shape, rope_parameters=scaling, max_position_embeddings=64, tie_word_embeddings=True, **window)
    return Qwen2ForCausalLM(config)


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8))


PLAIN = {key: value for key, value in SHAPE.items() if key != "rope_theta"}


def qwen3_with_attention_biases() -> Any:
    """Positions divided by one factor."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    scaling = {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}
    return Qwen3ForCausalLM(Qwen3Config(**PLAIN, head_dim=8, attention_bias=True, rope_parameters=scaling))


def llama_with_mlp_biases() -> Any:
    """YaRN: the pairs between those that turn often and rarely are divided by something between 1 and the factor."""
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0}
    sizes = {"head_dim": 16, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**PLAIN, **sizes, mlp_bias=True, rope_parameters=scaling))


def llama_of_two_lengths() -> Any:
    """LongRoPE: sequences of more than 6 tokens, which most samples are, have factors of their own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    factors = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 6.0], "original_max_position_embeddings": 6}
    scaling = {"rope_type": "longrope", "rope_theta": 50.0, **factors}
    sizes = {"max_position_embeddings": 24}
    return LlamaForCausalLM(LlamaConfig(**PLAIN, **sizes, attention_bias=True, rope_parameters=scaling))


def mistral() -> Any:
    """Samples are several windows long."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=3))


def phi3() -> Any:
    """Queries, keys and values in one tensor, gate and up in another; LongRoPE's factors of short sequences."""
    from transformers import Phi3Config, Phi3ForCausalLM

    factors = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 6.0]}
    lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    scaling = {"rope_type": "longrope", "rope_theta": 50.0, **factors, "original_max_position_embeddings": 32}
    return Phi3ForCausalLM(Phi3Config(**PLAIN, **lengths, rope_parameters=scaling, pad_token_id=None, sliding_window=4))


GEMMA = {**PLAIN, "hidden_size": 16, "head_dim": 8, "query_pre_attn_scalar": 6, "num_hidden_layers": 4, "sliding_window": 3}
GEMMA["pad_token_id"] = None  # transformers never train the row of the token that pads


def gemma2() -> Any:
    """Scores and logits are bounded by values that they exceed; every second layer has windows."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    caps = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
    return Gemma2ForCausalLM._from_config(Gemma2Config(**GEMMA, **caps), attn_implementation="eager")


def gemma3() -> Any:
    """Layers with windows rotate by another base; the others' positions are scaled."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    of_all = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    bases = {"rope_parameters": {"full_attention": of_all, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}}
    types = {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]}
    return Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA, **bases, **types))


def mixtral(**changes: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, experts_implementation="eager", **changes))


def mixtral_with_windows() -> Any:
    return mixtral(sliding_window=3)


def qwen3_moe(**changes: Any) -> Any:
    """Weights of the chosen experts are their share among all, and those of the published models among the chosen ones."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": False}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, head_dim=8, experts_implementation="eager", **experts, **changes))


def qwen3_moe_with_windows() -> Any:
    """In all layers, whatever max_window_layers says."""
    return qwen3_moe(use_sliding_window=True, sliding_window=4, max_window_layers=2)


PLANS: Plans = {
    "tp 2, pp 2": ({"llm": (2, 2, 1)}, {}),
    "sequence parallelism, tp 2, cp 2": ({"llm": (2, 1, 1, 2)}, {"sequence_parallel": True}),
    "zero 3, tp 2, dp 2": ({"llm": (2, 1, 2)}, {"shards_weights": True}),
    "zb-h1, pp 3": ({"llm": (1, 3, 1)}, {"builder": "zb-h1", "recompute": "full"}),
}


@pytest.mark.deep(when=lambda build: build in (llama, qwen3))  # of both there is one with more to it
@pytest.mark.parametrize(
    "build",
    [
        llama,
        llama_of_long_contexts,
        llama_with_mlp_biases,
        llama_of_two_lengths,
        gemma2,
        gemma3,
        mistral,
        phi3,
        qwen2,
        qwen3,
        qwen3_with_attention_biases,
    ],
)
def test_logits_and_gradients_equal_transformers(build: Callable[[], Any], ranks: RankPool, tmp_path: Path) -> None:
    compare_logits(build, tmp_path / "model", ranks, shapes=SAMPLES).assert_under_plans(PLANS, ranks)


def test_internlm2_is_a_llama_under_other_names(ranks: RankPool, tmp_path: Path) -> None:
    """Its programs are not executed: a Llama's weights are packed as they expect them, group of heads by group."""
    llama = compare_logits(llama_without_biases, tmp_path / "llama", ranks, shapes=SAMPLES)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(as_internlm2(weights_of(llama.folder)), folder / "model.safetensors")
    config = {key: value for key, value in SHAPE.items() if key != "rope_theta"} | {"rope_theta": 5000.0, "bias": False}
    named = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "rms_norm_eps": 1e-6, "head_dim": 6}
    (folder / "config.json").write_text(json.dumps({**config, **named}))
    graph = read_model(folder)
    assert graph == read_model(llama.folder)
    replace(llama, folder=folder, graph=graph).assert_under_plans(PLANS, ranks)


def llama_without_biases() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def as_internlm2(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A Llama's weights as InternLM2's program reads them: [groups, queries + key + value, channels] rows of one tensor."""
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    found = {}
    for key, value in weights.items():
        if ".q_proj." in key:
            parts = [weights[key.replace(".q_proj.", f".{each}_proj.")] for each in ("q", "k", "v")]
            groups = [part.unflatten(0, (SHAPE["num_key_value_heads"], -1, 6)) for part in parts]
            found[key.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(groups, dim=1).flatten(0, 2)
        elif "self_attn" not in key or "o_proj" in key:
            name = next((key.replace(theirs, ours) for theirs, ours in names.items() if theirs in key), key)
            found[name] = value.contiguous()
    return found


WITH_EXPERTS: Plans = {
    "shared by two, tp 2, dp 2": ({"llm": (2, 1, 2), "experts": 2}, {"sequence_parallel": True}),
    "shared by two, pp 2, dp 4": ({"llm": (1, 2, 4), "experts": 2}, {"recompute": "full"}),
    "zero 3, tp 2, dp 2": ({"llm": (2, 1, 2)}, {"shards_weights": True}),
}


@pytest.mark.parametrize("build", [mixtral, qwen3_moe, mixtral_with_windows, qwen3_moe_with_windows])
def test_experts_equal_those_of_transformers(build: Callable[[], Any], ranks: RankPool, tmp_path: Path) -> None:
    compare_logits(build, tmp_path / "model", ranks, shapes=SAMPLES).assert_under_plans(WITH_EXPERTS, ranks)
