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

from multimodal.cost.layers.registry import read_model
from multimodal.data.audio.audio_files import read_audio
from multimodal.data.audio.audio_processing import log_mel
from multimodal.data.manifest import ManifestSource
from multimodal.data.packing import pack_language_microbatch
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.assignment import Atom
from tests.distributed.hugging_face_comparison import step_in_torch
from tests.distributed.launch import launch
from tests.distributed.test_hugging_face_audio import omni_thinker
from tests.distributed.wide_transformers import build_wide_model
from tools import convert

TOKENIZER = ByteTokenizer()
IMAGE_TOKEN, AUDIO_TOKEN = TOKENIZER.special.image, 255
RATE, DECAY, BETAS = 0.01, 0.1, (0.9, 0.99)
CLIPS = {"a.wav": (16000, 5000), "b.wav": (8000, 900)}
"""Rate and samples."""
SAMPLES = (("picture.png", "a.wav", "b.wav"), ("b.wav",), (), ("picture.png",))
PLANS: Mapping[str, tuple[str, ...]] = {
    "apart": ("--vision-dp", "1", "--audio-dp", "1", "--llm-tp", "2", "--llm-dp", "1", "--schedule", "1f1b"),
    "together": (
        *("--colocate-units", "--llm-cp", "2", "--audio-cp", "2", "--balance", "orchmllm", "--schedule", "zb-h1"),
        *("--data-parallel-sharding-strategy", "optim_grads_params"),
    ),
}


def write_manifest(folder: Path) -> Path:
    folder.mkdir()
    Image.effect_noise((9, 14), 60).convert("RGB").save(folder / "picture.png")
    for name, (rate, count) in CLIPS.items():
        wavfile.write(folder / name, rate, np.random.default_rng(count).integers(-9000, 9000, count, dtype=np.int16))
    lines = []
    for index, names in enumerate(SAMPLES):
        items = [
            {"type": "image", "path": name, "unit": "vision"} if name.endswith("png") else {"type": "audio", "path": name}
            for name in names
        ]
        lines.append({"id": index, "segments": [*items, {"type": "text", "role": "document", "text": "a text " * (index + 1)}]})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "manifest.jsonl"


def items_of(source: ManifestSource, index: int, token_ids: torch.Tensor) -> Mapping[str, Any]:
    """What transformers' model takes of a sample; it has a placeholder for each kind of item."""
    packed = pack_language_microbatch([Atom(index)], source=source, index_of_sample={index: index}, merge_sizes={"vision": 2})
    given: dict[str, Any] = {"attention_mask": torch.ones_like(token_ids)[None], "position_ids": packed.position_ids.T[:, None]}
    frames, grids, patches = [], [], []
    for item, start, length in source.text(index).item_starts:
        name, grid = SAMPLES[index][item], source.item_grid(index, item)
        if name.endswith("png"):
            grids.append((1, *grid))
            patches.append(torch.from_numpy(source.item(index, item).patches).double())
            continue
        token_ids[start : start + length] = AUDIO_TOKEN
        rate, count = CLIPS[name]
        samples = read_audio(str(source._manifest.parent / name), num_samples=-(-count * 16000 // rate), where="")
        frames.append(torch.from_numpy(log_mel(samples, num_frames=grid[0], most_samples=10**9, num_mel_bins=4)).double())
    if grids:
        given |= {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    if frames:
        is_heard = [torch.ones(len(each), dtype=torch.int64) for each in frames]
        given["input_features"] = torch.nn.utils.rnn.pad_sequence(frames, batch_first=True).transpose(1, 2)
        given["feature_attention_mask"] = torch.nn.utils.rnn.pad_sequence(is_heard, batch_first=True)
    return given


def wide_thinker() -> Any:
    return omni_thinker(vocab_size=TOKENIZER.vocab_size, image_token_index=IMAGE_TOKEN, audio_token_index=AUDIO_TOKEN)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}


def test_a_step_with_images_and_sound_is_that_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = build_wide_model(wide_thinker, folder, max_shard_size="20KB")
    manifest = write_manifest(tmp_path / "data")
    source = ManifestSource(manifest, graph=read_model(folder), tokenizer=TOKENIZER, seq_length=256)
    expected_loss = step_in_torch(model, source, inputs=items_of, rate=RATE, decay=DECAY, betas=BETAS)
    stepped = tmp_path / "stepped"
    model.save_pretrained(stepped)
    shared = {
        "--load-hf": folder,
        "--data-path": manifest,
        "--global-batch-size": 4,
        "--train-iters": 1,
        "--lr": RATE,
        "--weight-decay": DECAY,
        "--adam-beta1": BETAS[0],
        "--adam-beta2": BETAS[1],
        "--clip-grad": 0,
        "--dtype": "float64",
        "--num-workers": 0,
        "--split": "100",
        "--seq-length": 256,
    }
    for name, plan in PLANS.items():
        target, log = tmp_path / name, tmp_path / f"{name}.jsonl"
        flags = {**shared, "--save-hf": target, "--log-json": log}
        done = launch([*(part for pair in flags.items() for part in pair), *plan], num_ranks=4)
        assert done.exit_codes == (0,) * 4, done.output
        assert json.loads(log.read_text().splitlines()[0])["loss"] == pytest.approx(expected_loss, rel=1e-12), name
        trained = weights_of(target)
        for key, expected in weights_of(stepped).items():
            assert (trained[key] - expected).abs().max() < 1e-9, (name, key)
    unchanged = {key for key, value in weights_of(folder).items() if torch.equal(trained[key], value)}
    assert unchanged == {"audio_tower.audio_bos_eos_token.weight"}


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
