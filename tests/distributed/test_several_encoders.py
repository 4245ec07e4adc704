"""pretrain_mllm.py with encoders of images and of sound, from one manifest, against transformers; any plan does the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from safetensors.torch import load_file, save_file

from megatron.runtime.feed.packing import pack_language_microbatch
from multimodal.cost.layers.registry import read_model
from multimodal.data.audio import log_mel, read_audio
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.index.sample_indexer import IndexOptions
from multimodal.data.manifest import ManifestSource
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.assignment import Atom
from multimodal.values.model_graph import ImageInput
from tests.distributed.hugging_face_comparison import BETAS, DECAY, ONE_STEP, RATE, step_in_torch, weights_of
from tests.distributed.hugging_face_models import MAX_TOKENS, omni_thinker, qwen2_audio
from tests.distributed.launch import train
from tests.distributed.wide_transformers import build_wide_model
from tools import convert

TOKENIZER = ByteTokenizer()
IMAGE_TOKEN, AUDIO_TOKEN = TOKENIZER.special.image, 255
MAX_FRAMES = 2 * MAX_TOKENS
CLIPS = {"a.wav": (16000, 5000), "b.wav": (8000, 900)}
"""Rate and samples."""
SAMPLES = (("picture.png", "a.wav", "b.wav"), ("b.wav",), (), ("picture.png",))
SHARED = {"--colocate-units": None, "--data-parallel-sharding-strategy": "optim_grads_params"}
CUT = {"--llm-cp": 2, "--audio-cp": 2, "--balance": "orchmllm", "--schedule": "zb-h1"}


def write_manifest(folder: Path, *, has_pictures: bool) -> Path:
    folder.mkdir()
    Image.effect_noise((9, 14), 60).convert("RGB").save(folder / "picture.png")
    for name, (rate, count) in CLIPS.items():
        wavfile.write(folder / name, rate, np.random.default_rng(count).integers(-9000, 9000, count, dtype=np.int16))
    lines = []
    for index, names in enumerate(SAMPLES):
        items = [
            {"type": "image", "path": name, "unit": "vision"} if name.endswith("png") else {"type": "audio", "path": name}
            for name in names
            if has_pictures or not name.endswith("png")
        ]
        lines.append({"id": index, "segments": [*items, {"type": "text", "role": "document", "text": "a text " * (index + 1)}]})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "manifest.jsonl"


def normalised(patches: np.ndarray, *, mean: tuple[float, ...], deviation: tuple[float, ...]) -> torch.Tensor:
    """In float32 as a run does it, by numpy: comparisons widen torch's float32."""
    repeats = 3 // len(mean)
    means, deviations = (np.array(each * repeats, np.float32)[:, None] for each in (mean, deviation))
    values = (patches.astype(np.float32) / np.float32(255)).reshape(len(patches), 3, -1)
    return torch.from_numpy(((values - means) / deviations).reshape(len(patches), -1)).double()


def items_of(source: ManifestSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    """What transformers' model takes of a sample; it has a placeholder for each kind of item."""
    given: dict[str, Any] = {"attention_mask": torch.ones_like(token_ids)[None]}
    frames, grids, patches = [], [], []
    for item, start, length in source.text(index).item_starts:
        found = source._samples.item(index, item)
        if source._graph.unit(found.unit).audio is None:
            grids.append((1, *found.grid))
            image = source._graph.unit(found.unit).image
            patches.append(normalised(source.item(index, item).patches, mean=image.mean, deviation=image.std))
            continue
        token_ids[start : start + length] = AUDIO_TOKEN
        samples = read_audio(found.path, num_samples=found.size[0], where="")
        shown = log_mel(samples, num_frames=found.grid[0] + 2, most_samples=160 * MAX_FRAMES, num_mel_bins=4)
        frames.append((found.grid[0], torch.from_numpy(np.pad(shown, ((0, MAX_FRAMES - len(shown)), (0, 0)))).double()))
    if grids:
        given |= {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    if frames:
        given["input_features"] = torch.stack([each for _, each in frames]).transpose(1, 2)
        given["feature_attention_mask"] = torch.tensor(
            [[frame < count for frame in range(MAX_FRAMES)] for count, _ in frames]
        ).long()
    if source._graph.backbone.transformer.rotary_sections:
        packed, _ = pack_language_microbatch([Atom(index)], source=source, images={"vision": ImageInput(merge_size=2)})
        given["position_ids"] = packed.positions.T[:, None]
    return given


def wide_thinker() -> Any:
    return omni_thinker(vocab_size=TOKENIZER.vocab_size, image_token_index=IMAGE_TOKEN, audio_token_index=AUDIO_TOKEN)


def wide_qwen2_audio() -> Any:
    return qwen2_audio(vocab_size=TOKENIZER.vocab_size, audio_token_index=AUDIO_TOKEN)


@pytest.mark.deep(when=lambda make: make is not wide_thinker)
@pytest.mark.parametrize(
    ("make", "plan", "fixed"),
    [
        (wide_thinker, CUT, "audio_tower.audio_bos_eos_token.weight"),
        (wide_qwen2_audio, {"--llm-tp": 2}, "audio_tower.embed_positions.weight"),
    ],
)
def test_a_step_is_that_of_transformers(make: Any, plan: dict[str, object], fixed: str, tmp_path: Path) -> None:
    """With what is not trained left as it was."""
    folder = tmp_path / "model"
    model = build_wide_model(make, folder, max_shard_size="20KB")
    manifest = write_manifest(tmp_path / "data", has_pictures=make is wide_thinker)
    source = ManifestSource(open_sample_files(manifest), graph=read_model(folder), tokenizer=TOKENIZER, options=IndexOptions(256))
    expected_loss = step_in_torch(model, source, inputs=items_of, rate=RATE, decay=DECAY, betas=BETAS)
    stepped = tmp_path / "stepped"
    model.save_pretrained(stepped)
    trained = tmp_path / "trained"
    flags = {**ONE_STEP, **SHARED, "--load-hf": folder, "--data-path": manifest, "--seq-length": 256, "--save-hf": trained}
    entries, _ = train({**flags, "--log-json": tmp_path / "log.jsonl", **plan}, num_ranks=4)
    assert entries[0]["loss"] == pytest.approx(expected_loss, rel=1e-12)
    found = weights_of(trained)
    for key, expected in weights_of(stepped).items():
        assert (found[key] - expected).abs().max() < 1e-9, key
    unchanged = {key for key, value in weights_of(folder).items() if torch.equal(found[key], value)}
    assert unchanged == {fixed}


def test_the_thinker_of_a_whole_model(tmp_path: Path) -> None:
    """Its weights have a longer name there, and what makes speech stands beside them: it is copied."""
    torch.manual_seed(3)
    model = omni_thinker()
    first, checkpoints, second = (tmp_path / name for name in ("first", "checkpoints", "second"))
    model.save_pretrained(first)
    tensors = {f"thinker.{key}": value for key, value in load_file(first / "model.safetensors").items()}
    save_file({**tensors, "talker.head.weight": torch.ones(3)}, first / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((first / "config.json").read_text())
    whole = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": config}
    (first / "config.json").write_text(json.dumps(whole))
    assert convert.main(["--load-hf", str(first), "--save", str(checkpoints)]) == 0
    assert convert.main(["--load", str(checkpoints), "--save-hf", str(second), "--like", str(first)]) == 0
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
