"""Runs and tools that start from a folder of Hugging Face and end with one; what is wrong with a folder, on every rank."""

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from safetensors.torch import load_file, save_file

from megatron.runtime.hugging_face.save_weights import save_hugging_face
from multimodal.cost.layers.registry import read_model
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.index.sample_indexer import IndexOptions
from multimodal.data.manifest import ManifestSource
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.hugging_face.adapter_files import ADAPTER_WEIGHTS, PREFIX, TOKENS_ENDING
from multimodal.values.errors import BraidError
from tests.distributed.gradient_case import GradientCase, build_session
from tests.distributed.hugging_face_comparison import BETAS, DECAY, ONE_STEP, RATE, FromFolder, case_of, step_in_torch, weights_of
from tests.distributed.hugging_face_models import TEXTS
from tests.distributed.launch import Launched, launch, train
from tests.distributed.mutations.run import small_llava
from tests.distributed.rank_pool import RankPool
from tests.distributed.wide_transformers import build_wide_model, randomize_vectors
from tests.unit.data.chat.templates import write_tokenizer
from tools import convert

SHAPE = {"vocab_size": 263, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "initializer_range": 0.3}


def small_qwen2(**changes: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SHAPE | changes))


def write_manifest(folder: Path) -> Path:
    folder.mkdir()
    lines = [
        {"id": str(index), "segments": [{"type": "text", "role": "document", "text": "a text " * (index + 1)}]}
        for index in range(4)
    ]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "manifest.jsonl"


def test_a_run_steps_as_transformers_with_adamw(tmp_path: Path) -> None:
    folder, target, log = tmp_path / "model", tmp_path / "trained", tmp_path / "log.jsonl"
    model = build_wide_model(lambda: small_qwen2(vocab_size=265, tie_word_embeddings=True), folder, max_shard_size="9KB")
    (folder / "tokenizer_config.json").write_text("{}")
    manifest = write_manifest(tmp_path / "data")
    source = ManifestSource(
        open_sample_files(manifest), graph=read_model(folder), tokenizer=ByteTokenizer(), options=IndexOptions(64)
    )
    expected_loss = step_in_torch(model, source, rate=RATE, decay=DECAY, betas=BETAS)
    files = {"--load-hf": folder, "--save-hf": target, "--data-path": manifest, "--log-json": log}
    flags = {**ONE_STEP, **files, "--llm-tp": 2, "--llm-dp": 1, "--seq-length": 64}
    entries, _ = train(flags, num_ranks=2)
    assert entries[0]["loss"] == pytest.approx(expected_loss, rel=1e-12)
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in folder.iterdir())
    trained = weights_of(target)
    for name, parameter in model.state_dict().items():
        if name in trained:
            assert (trained[name] - parameter).abs().max() < 1e-9, name
    evaluated = flags | {"--load-hf": target, "--save-hf": tmp_path / "same", "--split": "0,1", "--eval-iters": 1}
    evaluated |= {"--llm-tp": 1, "--llm-pp": 2, "--skip-train": None}  # stages are cut by the held-out samples' lengths
    _, done = train(evaluated, num_ranks=2)
    assert "step 0: held out: loss" in done.output
    for path in target.glob("*.safetensors"):
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes()
    again = launch(flags, num_ranks=2)
    assert "is there already; give another folder, or remove it" in again.output
    assert again.exit_codes != (0, 0)


def test_added_tokens_learn_beside_adapters(tmp_path: Path) -> None:
    """Seven of nine have a row in the model that no token has had. The run goes on, and writes what it trained for PEFT, too."""
    folder, targets = tmp_path / "model", [tmp_path / name for name in ("whole", "adapter")]
    small_qwen2().save_pretrained(folder)
    own, stop = ByteTokenizer().num_own_tokens, ByteTokenizer().vocab_size
    data = {"--data-path": write_manifest(tmp_path / "data"), "--tokenizer-type": "ByteTokenizer", "--num-workers": 0}
    flags = {**data, "--load-hf": folder, "--llm-tp": 2, "--global-batch-size": 4, "--lr": RATE, "--lora-rank": 2}
    flags |= {"--split": "100"}
    flags |= {"--save": tmp_path / "run", "--load": tmp_path / "run", "--save-interval": 2, "--lr-decay-iters": 4}
    _, done = train({**flags, "--train-iters": 2}, num_ranks=2)
    assert f"adapters of rank 2, rows of {stop - own} new tokens" in done.output
    train({**flags, "--train-iters": 4, "--save-hf": targets[0], "--save-adapter": targets[1]}, num_ranks=2)
    before, after, adapter = (
        load_file(path) for path in (*(each / "model.safetensors" for each in (folder, targets[0])), targets[1] / ADAPTER_WEIGHTS)
    )
    for key in ("model.embed_tokens", "lm_head"):
        rows = after[f"{key}.weight"]
        assert torch.equal(rows[:own], before[f"{key}.weight"][:own]) and len(rows) == stop
        assert torch.equal(rows[own:], adapter[f"{PREFIX}{key}{TOKENS_ENDING}"])


def test_tools_convert_in_both_directions(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = small_qwen2().bfloat16()
    randomize_vectors(model)
    first, checkpoints, second, third = (tmp_path / name for name in ("first", "checkpoints", "second", "third"))
    model.save_pretrained(first, max_shard_size="9KB")
    assert convert.main(["--load-hf", str(first), "--save", str(checkpoints)]) == 0
    assert convert.main(["--load", str(checkpoints), "--save-hf", str(second)]) == 0
    assert convert.main(["--load", str(checkpoints), "--save-hf", str(third), "--like", str(first)]) == 0
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in third.iterdir()
    }
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(40)[None]
    found, expected = (AutoModelForCausalLM.from_pretrained(folder) for folder in (second, first))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found(tokens).logits, expected(tokens).logits)


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def change_weights(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Of model.safetensors; None: is left out."""

    def change(folder: Path) -> None:
        weights = {**load_file(folder / "model.safetensors"), **changes}
        save_file({key: value for key, value in weights.items() if value is not None}, folder / "model.safetensors")

    return change


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def name_a_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"lm_head.weight": "model-00001-of-00002.safetensors", "model.norm.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another architecture": (change_config(architectures=["GPT2LMHeadModel"]), r"architectures is \['GPT2LMHead.*expected"),
    "another shape": (change_config(num_attention_heads=2), "would need num_attention_heads 2, found 4"),
    "a missing shard": (name_a_missing_shard, "model-00002-of-00002.safetensors: no such file, though"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor .* is there"),
    "a file cut off": (truncate, "model.safetensors: cannot be read"),
    "a missing tensor": (change_weights(**{"model.norm.weight": None}), "model.norm.weight is missing"),
    "a tensor too many": (change_weights(extra=torch.zeros(2)), "nothing of this model is made of extra"),
    "values that are no numbers": (
        change_weights(**{"lm_head.weight": torch.full((263, 16), torch.nan)}),
        "model.safetensors: lm_head.weight has values that are not finite",
    ),
    "rows that config.json has not": (
        change_weights(**{"lm_head.weight": torch.zeros(9, 16)}),
        r"lm_head.weight has shape \[9, 16\], but config.json gives it 263 rows of 16",
    ),
    "quantised weights": (
        change_weights(**{"model.norm.weight": torch.zeros(16, dtype=torch.int8)}),
        "model.norm.weight is of type I8",
    ),
    "scaled positions": (change_config(rope_parameters={"rope_type": "dynamic-ntk", "factor": 2.0}), "are of type 'dynamic-ntk'"),
}


def messages_of_loading(case: GradientCase, folders: dict[str, Path]) -> dict[str, str]:
    session, messages = build_session(case), {}
    for name, folder in folders.items():
        messages[name] = _message(lambda folder=folder: FromFolder(folder).load(session))
    return messages


def message_of_saving(case: GradientCase, folder: Path, target: Path) -> str:
    session = FromFolder(folder).session(case)
    return _message(lambda: save_hugging_face(target, session=session, like=folder))


def _message(action: Callable[[], Any]) -> str:
    try:
        action()
    except BraidError as problem:
        return str(problem)
    return ""


def test_what_is_wrong_is_said_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    good = tmp_path / "good"
    small_qwen2().save_pretrained(good)
    folders = {}
    for name, (spoil, _) in WRONG.items():
        folders[name] = tmp_path / name.replace(" ", "-")
        shutil.copytree(good, folders[name])
        spoil(folders[name])
    case = case_of(read_model(good), TEXTS, {"llm": (2, 1, 1)})
    first, second = ranks.run(messages_of_loading, case, folders, world_size=2)
    assert first == second
    for name, (_, expected) in WRONG.items():
        assert re.search(expected, first[name]), f"{name}: {first[name]}"
        assert str(folders[name]) in first[name]


def give_a_larger_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    words = {f"word{index}": index for index in range(264)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))


def be_a_llava(folder: Path, *, image_token: int) -> None:
    (folder / "model.safetensors").unlink()
    small_llava(image_token).save_pretrained(folder)
    write_tokenizer(folder)


BYTES = ("--tokenizer-type", "ByteTokenizer")
WRONG_RUNS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...], str]] = {
    "a config that contradicts the weights": (
        change_config(num_attention_heads=2),
        BYTES,
        r"k_proj.bias has shape \[8\], but config.json gives it 16 rows of 1; the two are not of one model",
    ),
    "a head that is not the embeddings": (
        change_config(tie_word_embeddings=True),
        BYTES,
        "lm_head.weight is there beside model.embed_tokens.weight, which it differs from, .* make its tie_word_embeddings false",
    ),
    "no tokenizer": (lambda folder: None, (), "there is no tokenizer.json; copy the model's own there"),
    "a larger tokenizer": (
        give_a_larger_tokenizer,
        (),
        "the tokenizer has 264 tokens, but the vocabulary of unit 'llm' 263; give the model's own: --tokenizer-type",
    ),
    "a tokenizer with another placeholder": (
        partial(be_a_llava, image_token=8),
        ("--vision-tp", "2", "--colocate-units"),
        r"the placeholder \(image\) is token \d+ of the tokenizer, but .*config.json says image_token_index 8; "
        ".* no chat template is used: ",
    ),
}


def test_a_run_of_what_is_wrong_ends_on_every_rank(tmp_path: Path) -> None:
    """One message names the fix, and all ranks end by themselves."""
    manifest = write_manifest(tmp_path / "data")
    shared = ("--data-path", manifest, "--llm-tp", 2, "--global-batch-size", 4, "--train-iters", 1, "--lr", RATE)

    def run(name: str) -> Launched:
        spoil, flags, _ = WRONG_RUNS[name]
        folder = tmp_path / name.replace(" ", "-")
        small_qwen2().save_pretrained(folder)
        spoil(folder)
        return launch(["--load-hf", folder, *shared, "--num-workers", 0, "--split", "100", *flags], num_ranks=2)

    with ThreadPoolExecutor(4) as pool:
        for name, done in zip(WRONG_RUNS, pool.map(run, WRONG_RUNS), strict=True):
            assert 0 not in done.exit_codes, f"{name}: {done.output}"
            messages = [line for line in done.output.splitlines() if "error:" in line]
            assert len(messages) == 1 and re.search(WRONG_RUNS[name][2], messages[0]), f"{name}: {done.output}"
            assert "Traceback" not in done.output, done.output


def grow(case: GradientCase, folder: Path, target: Path) -> None:
    save_hugging_face(target, session=FromFolder(folder).session(case), like=folder)


def test_a_vocabulary_grows_by_new_rows(ranks: RankPool, tmp_path: Path) -> None:
    """Tokens that the tokenizer has beyond the model's: their rows start at random, as large as the others, and are written."""
    good, target, alone = (tmp_path / name for name in ("good", "grown", "alone"))
    small_qwen2().save_pretrained(good)
    graph = read_model(good)
    larger = replace(graph, units=(replace(graph.backbone, vocab_size=270),))
    ranks.run(grow, case_of(larger, TEXTS, {"llm": (2, 1, 1)}), good, target, world_size=2)
    ranks.run(grow, case_of(larger, TEXTS, {"llm": (1, 1, 1)}), good, alone, world_size=1)
    before, after, of_one = (load_file(folder / "model.safetensors") for folder in (good, target, alone))
    assert json.loads((target / "config.json").read_text())["vocab_size"] == 270
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        assert after[key].shape == (270, 16)
        assert torch.equal(after[key][:263], before[key])
        assert after[key][263:].abs().min() > 0
        assert float(after[key][263:].std()) == pytest.approx(float(before[key].std()), rel=0.25)
        assert torch.equal(after[key], of_one[key]), "whatever the plan"


def test_a_failed_export_leaves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """The folder that it is to be in is a file, which shows when rank 0 looks; every rank says so."""
    good, target = tmp_path / "good", tmp_path / "out" / "model"
    small_qwen2().save_pretrained(good)
    target.parent.write_text("a file")
    found = ranks.run(message_of_saving, case_of(read_model(good), TEXTS, {"llm": (2, 1, 1)}), good, target, world_size=2)
    assert found[0] == found[1]
    assert "out" in found[0]
