"""What --load-hf gives a run beside weights, and what it excludes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.runtime.feed.data_sets import with_vocabulary
from megatron.runtime.flags.arguments import parse_arguments
from megatron.runtime.flags.configuration import RunConfig
from multimodal.cost.layers.registry import read_model
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.errors import ConfigError, ModelError
from multimodal.values.model_graph import Lora
from tests.unit.runtime.flags.conftest import HUGGING_FACE, write_hugging_face


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hugging_face(tmp_path / "model")


def parse(line: str) -> RunConfig:
    flags = f"{line} --data-path m.jsonl --lr 1e-3 --train-iters 2 --global-batch-size 2"
    return parse_arguments(flags.split(), environ={})


def test_the_folder_is_the_model(folder: Path) -> None:
    config = parse(f"--load-hf {folder}")
    assert config.model.model == config.checkpoint.load_hf == folder
    model = parse(f"--model {folder}")
    assert (model.checkpoint.load_hf, model.data.tokenizer_type) == (None, "ByteTokenizer")


def test_its_tokenizer_is_taken_unless_another_is_asked_for(folder: Path) -> None:
    taken = parse(f"--load-hf {folder}").data
    assert (taken.tokenizer_type, taken.tokenizer_model) == ("HuggingFaceTokenizer", str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"--load-hf .*: there is no tokenizer.json; copy the model's own there"):
        parse(f"--load-hf {folder}")
    assert parse(f"--load-hf {folder} --tokenizer-type ByteTokenizer").data.tokenizer_type == "ByteTokenizer"


def test_a_config_that_is_not_known_is_an_error_of_the_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**HUGGING_FACE, "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match="cannot be trained here; expected one of LlamaForCausalLM"):
        parse(f"--load-hf {folder}")


def test_a_vocabulary_grows_for_special_tokens_alone(folder: Path) -> None:
    graph = read_model(folder)
    assert with_vocabulary(graph, ByteTokenizer()).backbone.vocab_size == ByteTokenizer().vocab_size == 265
    for frozen in (replace(graph.backbone, freeze_module=True), replace(graph.backbone, lora=Lora(2))):
        for vocab_size, grown in ((260, 265), (320, 320)):
            unit = with_vocabulary(replace(graph, units=(replace(frozen, vocab_size=vocab_size),)), ByteTokenizer()).backbone
            assert (unit.vocab_size, unit.new_tokens) == (grown, (256, 265)), "also where there are rows to spare"
            assert [bool(unit.new_rows(kind)) for kind in unit.layers] == [True, False, False, True]
    (folder / "config.json").write_text(json.dumps({**HUGGING_FACE, "vocab_size": 255}))
    with pytest.raises(
        ConfigError, match="the tokenizer has 256 tokens, but the vocabulary of unit 'llm' 255; give the model's own"
    ):
        with_vocabulary(read_model(folder), ByteTokenizer())


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


def test_adapters_say_what_is_trained(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    model = parse(f"--load-hf {folder} --load-adapter {adapter}").model
    assert (model.lora_rank, model.lora_alpha, model.lora_targets) == (2, 8.0, ("llm.transformer.linear_proj",))
    with pytest.raises(ConfigError, match=r"--lora-rank would be ignored: --load-adapter .* says which adapters there are"):
        parse(f"--load-hf {folder} --load-adapter {adapter} --lora-rank 4")
    described = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**described, "lora_dropout": 0.05}))
    with pytest.raises(ConfigError, match=r"lora_dropout is 0.05 in adapter_config.json, .*; make it 0 there"):
        parse(f"--load-hf {folder} --load-adapter {adapter}")
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    (adapter / "adapter_model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(ConfigError, match="adapter_model.safetensors: is no safetensors file"):
        parse(f"--load-hf {folder} --load-adapter {adapter}")
    with pytest.raises(ConfigError, match="nowhere: there is no adapter_config.json; give a folder that save_pretrained"):
        parse(f"--load-hf {folder} --load-adapter {tmp_path / 'nowhere'}")
