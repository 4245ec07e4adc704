"""Encoders of sound of transformers as they are (HuBERT, a Whisper's): plain torch's gradients, those of one process, export."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

import multimodal
from megatron.runtime.hugging_face.unit_weights import load_units
from multimodal.model.layers.opaque_module import find_unused
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph, Unit
from tests.distributed import hugging_face_comparison as comparison
from tests.distributed.gradient_case import GradientCase, build_session, plan_case, run_step
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_models import llama
from tests.distributed.random_source import SampleShape
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_composition import run_and_save
from tests.distributed.wide_transformers import double_precision

CONVOLUTIONS = {"conv_dim": (8, 8, 8), "conv_kernel": (10, 3, 2), "conv_stride": (5, 2, 2)}
SEEN, STEP, MOST = 30, 20, 12
"""Samples that a token is made of, samples from one to the next, tokens of the Whisper's longest clip."""
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
CLIPS = {"hubert": (SEEN + 4 * STEP, SEEN + 9 * STEP + 7, SEEN + 5 * STEP + 19), "whisper": (9, 16, 2 * MOST)}
"""Samples, and frames."""


def hubert() -> Any:
    from transformers import HubertConfig, HubertModel

    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return HubertModel(HubertConfig(**SHAPE, **CONVOLUTIONS, **positions, feat_extract_norm="group", initializer_range=0.3))


def whisper() -> Any:
    """A model that is no family here, with the encoder of one."""
    from transformers import WhisperConfig, WhisperForAudioClassification

    shape = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 4}
    beside = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "vocab_size": 30}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    config = WhisperConfig(**shape, **beside, **ids, max_source_positions=MOST, classifier_proj_size=4, init_std=0.3)
    return WhisperForAudioClassification(config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(1)
    llama().save_pretrained(folder / "llm")
    hubert().save_pretrained(folder / "hubert")
    whisper().save_pretrained(folder / "whisper")
    return folder


def composed(folders: Path, target: Path, encoder: str) -> ModelGraph:
    encoders, output = {"audio": folders / encoder}, target / "model.yaml"
    return multimodal.compose(llm=folders / "llm", encoders=encoders, merge_size=3, output=output)


def case_of(graph: ModelGraph, encoder: str, sizes: dict[str, Any], **options: Any) -> GradientCase:
    first, second, third = ((("audio", length, 1),) for length in CLIPS[encoder])
    shapes = (SampleShape(first, 5, 3), SampleShape((*second, *first), 6, 2), SampleShape((), 4, 2), SampleShape(third, 7, 3))
    return comparison.case_of(graph, shapes, sizes, **options)


@pytest.mark.parametrize("encoder", ["hubert", "whisper"])
def test_gradients_equal_one_process_and_files_are_as_they_were(
    folders: Path, encoder: str, ranks: RankPool, tmp_path: Path
) -> None:
    graph = composed(folders, tmp_path, encoder)
    alone = case_of(graph, encoder, {"audio": (1, 1, 1), "llm": (1, 1, 1), "colocated": True})
    (expected,) = ranks.run(run_and_save, alone, world_size=1)
    for name, case in (
        ("replicas", case_of(graph, encoder, {"audio": (1, 1, 2), "llm": (2, 1, 1)})),
        ("zero 3", case_of(graph, encoder, {"audio": (1, 1, 2), "llm": (1, 1, 2), "colocated": True}, shards_weights=True)),
    ):
        assert_matches(case, ranks, run=partial(run_and_save, target=str(tmp_path / name)), expected=expected)
        theirs = (folders / encoder / "model.safetensors").read_bytes()
        assert (tmp_path / name / "audio" / "model.safetensors").read_bytes() == theirs


def heard_and_expected(case: GradientCase, folder: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """What a layer gives for each clip, and the module of transformers for what its feature extractor would; on one rank."""
    session, outputs = build_session(case), []
    load_units(session)
    (stage,) = [stage for (unit, _), stage in session.stages.items() if unit == "audio"]
    stage.layers["0"].register_forward_hook(lambda module, inputs, output: outputs.append(output[:, 0].detach().numpy()))
    run_step(session, plan_case(case))
    found = [row for output in outputs for row in output]
    module, source, pairs = module_of(folder), case.source, []
    for index, shape in enumerate(source.shapes):  # type: ignore[attr-defined]
        for item, (_, length, _) in enumerate(shape.items):
            with torch.no_grad(), double_precision():
                theirs = module(given_to(source, index, item, length)).last_hidden_state[0]
            num_tokens = (length - SEEN) // STEP + 1 if "hubert" in folder else (length - 1) // 2 + 1
            mine, found = np.stack(found[:num_tokens]), found[num_tokens:]
            pairs.append((mine, theirs[:num_tokens].numpy()))
    assert not found
    return pairs


def module_of(folder: str) -> Any:
    from transformers import HubertModel, WhisperForAudioClassification

    if "hubert" in folder:
        return HubertModel.from_pretrained(folder).double().eval()
    return WhisperForAudioClassification.from_pretrained(folder).encoder.double().eval()


def given_to(source: Any, index: int, item: int, length: int) -> torch.Tensor:
    """Samples with a mean of 0 and a variance of 1, up to the last whole token; or frames and silence up to the longest clip."""
    audio = source.graph.unit("audio").audio
    if audio.waveform is not None:
        samples = np.random.default_rng((0, index, item)).standard_normal(length).astype(np.float32)
        samples = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
        whole = SEEN + (length - SEEN) // STEP * STEP
        return torch.from_numpy(samples[:whole]).double()[None]
    num_frames = 2 * ((length - 1) // 2 + 1) + 1
    frames = source.frames(index, item).copy()
    frames[num_frames:] = frames[:num_frames].max() - 2
    return torch.from_numpy(frames.T.copy()).double()[None]


@pytest.mark.parametrize("encoder", ["hubert", "whisper"])
def test_every_clip_is_heard_as_in_transformers(folders: Path, encoder: str, ranks: RankPool, tmp_path: Path) -> None:
    case = case_of(composed(folders, tmp_path, encoder), encoder, {"audio": (1, 1, 1), "llm": (1, 1, 1), "colocated": True})
    (pairs,) = ranks.run(heard_and_expected, case, str(folders / encoder), world_size=1)
    assert [len(mine) for mine, _ in pairs] == ([5, 10, 5, 6] if encoder == "hubert" else [5, 8, 5, 12])
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, atol=1e-9)


def test_what_does_not_fit_is_said(folders: Path, tmp_path: Path) -> None:
    graph = composed(folders, tmp_path, "hubert")
    unit = graph.unit("audio")
    assert unit.module is not None and unit.audio is not None

    def changed(waveform: dict[str, Any], *, left_out: str = "", **audio: Any) -> Unit:
        plain = graph.to_dict()
        entry = plain["units"]["audio"]
        entry["audio"] |= {"waveform": entry["audio"]["waveform"] | waveform, **audio}
        entry.pop(left_out, None)
        return ModelGraph.from_dict(plain).unit("audio")

    for message, wrong in (
        ("or of sound in one piece", lambda: changed({}, chunk_tokens=4)),
        ("widths has 3 numbers and steps 2, expected one of each", lambda: changed({"steps": [5, 2]})),
        ("a token sees 1 samples of 20", lambda: changed({"widths": [1, 1, 1]})),
        ("waveform is what modules of transformers take", lambda: changed({}, left_out="module")),
    ):
        with pytest.raises(ModelError, match=message):
            wrong()
    other = changed({"steps": [5, 2, 1]}).audio
    assert other is not None
    with pytest.raises(ModelError, match=r"gives \[\d+, 16\] for a clip, but the unit has 9 tokens of hidden_size 16"):
        find_unused(unit, unit.module, other)
    assert find_unused(unit, unit.module, unit.audio) == {"masked_spec_embed"}
