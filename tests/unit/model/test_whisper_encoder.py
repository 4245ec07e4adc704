"""Whisper's encoder of transformers, layer for layer under the names of its weights, on clips of the one length that it takes."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")


from multimodal.data.audio.audio_processing import audio_positions, frames_to_patches
from multimodal.hugging_face.qwen_forms import WHISPER
from multimodal.hugging_face.weight_names import rows_of
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.values.model_graph import AudioInput, ModelGraph
from tests.distributed.wide_transformers import double_precision, randomize_vectors
from tests.unit.model.rank_groups import build_stage

MAX_TOKENS, HIDDEN, GRID = 6, 16, (12, 1)
SHAPE = {"num_attention_heads": 4, "ffn_hidden_size": 20, "hidden_size": HIDDEN}
EAR = {"role": "encoder", "num_layers": 2, **SHAPE, "normalization": "LayerNorm", "activation": "gelu", "add_bias_linear": True}
EAR |= {"has_rotary_positions": False, "has_linear_projector": True}
EAR["audio"] = {"num_mel_bins": 4, "merge_factor": 1, "max_tokens": MAX_TOKENS}
GRAPH = ModelGraph.from_dict({"units": {"ear": EAR, "llm": {"role": "backbone", "num_layers": 1, **SHAPE}}})


def whisper() -> Any:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    shape = {"d_model": HIDDEN, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 20, "init_std": 0.3}
    config = WhisperConfig(**shape, num_mel_bins=4, max_source_positions=MAX_TOKENS)
    torch.manual_seed(3)
    with double_precision():
        model = WhisperEncoder(config).eval()
        randomize_vectors(model)
    return model


@torch.no_grad()
def fill(stage: UnitStage, weights: dict[str, torch.Tensor]) -> None:
    """Take a model's weights; the projector, which it lacks, changes nothing."""
    for name, parameter in stage.named_parameters():
        parameter.zero_()
        if name.startswith("layers.3.weight"):
            torch.nn.init.eye_(parameter)
            continue
        for rows in rows_of(WHISPER.names, stage.unit, name, num_rows=parameter.shape[0]):
            if rows.key in weights:
                part = weights[rows.key].flatten(1) if weights[rows.key].dim() > 1 else weights[rows.key]
                parameter[rows.target : rows.target + rows.num_rows] = part[rows.start : rows.start + rows.num_rows]


@pytest.mark.usefixtures("world_of_one")
def test_hidden_states_are_those_of_transformers() -> None:
    """Two clips packed end to end."""
    stage = build_stage(GRAPH, "ear")
    model = whisper()
    fill(stage, dict(model.state_dict()))
    audio = GRAPH.unit("ear").audio
    assert isinstance(audio, AudioInput)
    frames = np.random.default_rng(0).standard_normal((2, *GRID[:1], 4)).astype(np.float32)
    patches = [frames_to_patches(clip, GRID, audio=audio).patches for clip in frames]
    positions = torch.from_numpy(np.concatenate([audio_positions(GRID, audio=audio)] * 2))
    batch = PackedInput((MAX_TOKENS,) * 2, positions, patches=torch.from_numpy(np.concatenate(patches)))
    with double_precision():
        expected = model(torch.from_numpy(frames).double().transpose(1, 2)).last_hidden_state.flatten(0, 1)
    found = stage(None, batch)
    assert isinstance(found, torch.Tensor)
    assert (found - expected).abs().max() < 1e-12
