"""One run of the flags' parser, and small models."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.flags.configuration import RunConfig

SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
ENCODER, BACKBONE = {"role": "encoder", **SHAPE}, {"role": "backbone", **SHAPE}
UNITS = {"vision": ENCODER, "language": BACKBONE}
BASE = {"--data-path": "digits", "--lr": "1e-3", "--train-iters": "10", "--global-batch-size": "8", "--vision-dp": "1"}

HUGGING_FACE = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 4}
HUGGING_FACE |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 260}


def write_hugging_face(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HUGGING_FACE))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_adapter(folder: Path) -> Path:
    """PEFT's files of one adapter of rank 2, by hand."""
    folder.mkdir()
    name = "base_model.model.model.layers.1.self_attn.o_proj"
    entries = {
        f"{name}.lora_A.weight": {"dtype": "F32", "shape": [2, 32], "data_offsets": [0, 256]},
        f"{name}.lora_B.weight": {"dtype": "F32", "shape": [32, 2], "data_offsets": [256, 512]},
    }
    header = json.dumps(entries).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(512)
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 8}))
    return folder


class Parse(Protocol):
    def __call__(self, line: str = "", *, world_size: int = 2, units: Mapping[str, Any] = UNITS) -> RunConfig: ...


@pytest.fixture
def parse_on_base(tmp_path: Path) -> Parse:
    """Parse a line of flags on top of a base that is right; a flag of the line takes the place of the base's."""

    def run(line: str = "", *, world_size: int = 2, units: Mapping[str, Any] = UNITS) -> RunConfig:
        (tmp_path / "model.yaml").write_text(yaml.safe_dump({"units": dict(units)}, sort_keys=False))
        given = line.split()
        has_sizes = "vision" not in units or not {"--colocate-units", "--plan"}.isdisjoint(given)
        base = [pair for pair in BASE.items() if pair[0] not in given and not (pair[0] == "--vision-dp" and has_sizes)]
        flags = ["--model", str(tmp_path / "model.yaml"), *(part for pair in base for part in pair), *given]
        return parse_arguments(flags, environ={"WORLD_SIZE": str(world_size)})

    return run
