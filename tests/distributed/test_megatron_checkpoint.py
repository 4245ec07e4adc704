"""Checkpoints that megatron-core writes of its own models become Braid's and go back, bit for bit, under any of its sizes."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
import yaml

from megatron.runtime.checkpoint.checkpoint import load_checkpoint
from megatron.runtime.checkpoint.megatron_weights import save_megatron
from megatron.runtime.generation.whole_model import empty_session, find_checkpoint, open_model
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config
from megatron.runtime.state.held_tensors import model_tensors
from multimodal.data.image_processing import cut_patches, patch_positions
from multimodal.model.stage_input import PackedInput
from tests.distributed import megatron_checkpoint
from tests.distributed.launch import launch
from tests.distributed.rank_pool import RankPool
from tests.distributed.small_run import LEFT_OUT, train, working_flags
from tests.unit.runtime.report.test_reporting import room_for
from tools.convert import main as convert_main

SHAPE = megatron_checkpoint.SHAPE
BIASED = {**SHAPE, "normalization": "LayerNorm", "activation": "gelu", "add_bias_linear": True}
LLM: dict[str, Any] = {"role": "backbone", **SHAPE}
IMAGE = {"patch_size": 14, "merge_size": 1, "image_size": 28, "class_token": "dropped", "has_pre_norm": True}
VISION = {"role": "encoder", **BIASED, "has_rotary_positions": False, "projector_hidden_size": 48, "projector_norm": "none"}
EXPERTS = {"num_experts": 4, "ffn_hidden_size": 24, "shared_expert_intermediate_size": 48}
UNITS: dict[str, dict[str, Any]] = {
    "groups": {"llm": {**LLM, "num_query_groups": 2, "qk_layernorm": True}},
    "tied": {"llm": {**LLM, **BIASED, "untie_embeddings_and_output_weights": False}},
    "experts": {"llm": {**LLM, "experts": EXPERTS}},
    "llava": {"vision": {**VISION, "image": {**IMAGE, "has_patch_bias": False}}, "llm": LLM},
    "mimo": {
        "left": {**VISION, "image": {**IMAGE, "has_patch_bias": False}},
        "right": {**VISION, "image": {**IMAGE, "has_patch_bias": False}},
        "llm": LLM,
    },
}
Sizes = tuple[int, int, int]
"""Tensor, pipeline and expert parallel."""
QKV = "self_attention.linear_qkv"
NAMES = {
    "groups": {"llm.layers.2.mlp.linear_fc1.weight": ("decoder.layers.mlp.linear_fc1.weight", 1)},
    "tied": {"llm.layers.1.input_layernorm.bias": (f"decoder.layers.0.{QKV}.layer_norm_bias", ...)},
    "experts": {"llm.layers.2.mlp.experts.3.linear_fc2.weight": ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (1, 3))},
    "llava": {
        "vision.layers.0.weight": ("vision_model.conv1.weight", ...),
        "vision.layers.0.norm.bias": ("vision_model.ln_pre.bias", ...),
        f"vision.layers.2.{QKV}.weight": (f"vision_model.decoder.layers.{QKV}.weight", 1),
        "vision.layers.3.mlp.linear_fc2.weight": ("vision_projection.encoder.linear_fc2.weight", ...),
        "llm.layers.3.norm.weight": ("language_model.decoder.final_layernorm.weight", ...),
    },
    "mimo": {
        "left.layers.0.weight": ("modality_submodules.left.encoders.left.conv1.weight", ...),
        "right.layers.3.mlp.linear_fc2.weight": ("modality_submodules.right.input_projections.0.encoder.linear_fc2.weight", ...),
        "llm.layers.1.mlp.linear_fc1.weight": ("language_model.decoder.layers.mlp.linear_fc1.weight", 0),
    },
}
"""Some names here -> those in a checkpoint, and which part of it."""


def write_checkpoint(
    ranks: RankPool, folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, sizes: Sizes = (1, 1, 1), num_ranks: int = 1
) -> Path:
    """Train by megatron-core, which writes a checkpoint, and write the model file; returns the model file."""
    model = folder.parent / "model.yaml"
    model.write_text(yaml.safe_dump({"units": UNITS[kind]}, sort_keys=False))
    ranks.run(megatron_checkpoint.train, kind, folder, dtype, sizes, world_size=num_ranks)
    return model


def convert(*words: str | Path) -> None:
    assert convert_main([*map(str, words)]) == 0


def assert_named(kind: str, folder: Path, checkpoint: Path) -> None:
    """Hold some of the weights of a converted folder against those of the checkpoint by their names."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint, folder.parent / "whole.pt")
    theirs = torch.load(folder.parent / "whole.pt", weights_only=False)
    with open_model(folder) as (session, _):
        ours = {tensor.key.removeprefix("model."): tensor for tensor in model_tensors(session.state)}
        for name, (key, index) in NAMES[kind].items():
            values = torch.cat([piece.values.flatten() for piece in ours[name].pieces])
            assert torch.equal(values, theirs[key][index].flatten()), name


@pytest.mark.parametrize(
    ("kind", "dtype", "sizes", "num_ranks"),
    [
        ("groups", torch.bfloat16, (2, 2, 1), 4),
        ("tied", torch.float32, (1, 1, 1), 2),
        ("experts", torch.bfloat16, (1, 1, 2), 2),
        ("llava", torch.bfloat16, (1, 1, 1), 2),
        ("mimo", torch.bfloat16, (1, 1, 1), 2),
    ],
    ids=str,
)
def test_a_run_of_megatron_goes_on(ranks, tmp_path, kind, dtype, sizes, num_ranks):
    """Its weights go in and out bit for bit, and so does its optimizer's state, also behind a step that is done here."""
    folder = tmp_path / "run"
    model = write_checkpoint(ranks, folder, kind, dtype=dtype, sizes=sizes, num_ranks=num_ranks)
    convert("--load-megatron", folder, "--model", model, "--save", tmp_path / "braid")
    convert("--load", tmp_path / "braid", "--save-megatron", tmp_path / "back")
    assert_named(kind, tmp_path / "braid", folder / "iter_0000007")
    optimizer = build_optimizer_config(lr=1, min_lr=0, weight_decay=0, betas=(0.9, 0.999), eps=1e-8, clip_grad=0, dtype=dtype)
    with empty_session(find_checkpoint(tmp_path / "braid"), optimizer=optimizer) as session:
        loaded = load_checkpoint(tmp_path / "braid", session=session, load_optimizer=True, load_rng=False)
        assert (loaded.step, loaded.units_with_fresh_optimizer) == (7, ())

        def step() -> None:
            session.gradient_norm()
            session.step_optimizers(torch.zeros(1), gathers_later=False)

        parameters = [each for stage in session.stages.values() for each in stage.parameters()]
        megatron_checkpoint.take_step(parameters, [each.optimizer for each in session.optimizers.values()], step)
        save_megatron(tmp_path / "next", session=session, step=8, adapters={}, scheduler=loaded.run_state["rates"])
    pairs = [(folder, tmp_path / "back"), (folder / "third", tmp_path / "next")]
    ranks.run(megatron_checkpoint.compare_trained, kind, pairs, dtype, world_size=1)


def test_an_optimizer_of_other_weights_is_refused(ranks, tmp_path, capsys):
    """As megatron-core writes that of tied embeddings on two pipeline stages."""
    folder, target = tmp_path / "run", tmp_path / "braid"
    model = write_checkpoint(ranks, folder, "tied", sizes=(1, 2, 1), num_ranks=2)
    words = [*map(str, ("--load-megatron", folder, "--model", model, "--save", target))]
    assert convert_main(words) == 2
    assert "the optimizer's state of embedding.word_embeddings.weight does not belong to these weights" in capsys.readouterr().err
    assert not target.exists()
    convert(*words, "--no-load-optim")
    assert_named("tied", target, folder / "iter_0000007")


def test_an_encoder_of_megatron_computes_the_same_here(ranks, tmp_path):
    model = write_checkpoint(ranks, tmp_path / "run", "llava")
    convert("--load-megatron", tmp_path / "run", "--model", model, "--save", tmp_path / "braid")
    pixels = np.random.default_rng(1).normal(size=(28, 28, 3)).astype(np.float32)
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    (theirs,) = ranks.run(megatron_checkpoint.encode_image, tmp_path / "run", image, world_size=1)
    patches = cut_patches(pixels, patch_size=14, merge_size=1)
    places = patch_positions((2, 2), merge_size=1)
    with open_model(tmp_path / "braid") as (session, _), torch.no_grad():
        rows, positions = (np.pad(each, ((0, 1), (0, 0)), constant_values=fill) for each, fill in ((patches, 0), (places, -1)))
        batch = PackedInput((5,), torch.from_numpy(positions), torch.from_numpy(rows))
        ours = session.stages["vision", 0](None, batch)
    assert theirs.abs().max() > 1
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_what_does_not_fit_is_said(ranks, tmp_path, capsys):
    def refusal(*words: str | Path) -> str:
        assert convert_main([*map(str, words), "--save", str(tmp_path / "braid")]) == 2
        return capsys.readouterr().err

    folder = tmp_path / "run"
    model = write_checkpoint(ranks, folder, "groups")
    for change, message in (
        ({"num_layers": 3}, "has 2 layers, but there is model.llm.layers.3."),
        (
            {"qk_layernorm": False},
            "nothing of this model is made of decoder.layers.self_attention.k_layernorm.weight (and 1 others)",
        ),
        ({"add_qkv_bias": True}, "linear_qkv.bias, which is not there; correct the model file"),
        ({"ffn_hidden_size": 32}, "has shape [128, 32], but model.llm.layers.1.mlp.linear_fc1.weight has [64, 32]"),
    ):
        model.write_text(yaml.safe_dump({"units": {"llm": UNITS["groups"]["llm"] | change}}))
        assert message in refusal("--load-megatron", folder, "--model", model)
    assert "give both" in refusal("--load-megatron", folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("8")
    assert "no metadata.json" in refusal("--load-megatron", folder, "--model", model)


def test_a_run_saves_for_megatron_and_goes_on_from_there(tmp_path, capsys):
    saved = tmp_path / "megatron"
    flags = {"--save-megatron": saved, "--save-interval": 1, "--train-iters": 3, "--llm-dp": 1, "--llm-tp": 2, "--vision-dp": 2}
    all_steps, _ = train(tmp_path, {**flags, "--colocate-units": None})
    load = {"--load-megatron": saved / "iter_0000001", "--train-iters": 3, "--save": tmp_path / "own"}
    steps, done = train(tmp_path, {**load, "--vision-dp": 1, "--llm-dp": 1})
    assert [step["step"] for step in steps] == [2, 3], done.output
    for before, after in zip(all_steps[1:], steps, strict=True):
        assert abs(before["loss"] - after["loss"]) < 1e-9 and abs(before["grad_norm"] - after["grad_norm"]) < 1e-9
    steps, _ = train(tmp_path, {**load, "--finetune": None, "--save": LEFT_OUT})
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert abs(steps[0]["loss"] - all_steps[0]["loss"]) > 1e-9

    model = tmp_path / "pairs.yaml"  # of frames
    model.write_text((tmp_path / "model.yaml").read_text().replace("patch_size: 8", "patch_size: 8\n      num_frames: 2"))
    cut = Path(shutil.copytree(saved / "iter_0000001", tmp_path / "cut"))
    for path in cut.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:1000])
    for changes, message in (
        ({"--load-megatron": cut}, "; copy it again"),
        ({"--load-megatron": tmp_path}, "no metadata.json"),
        ({"--dtype": "bfloat16"}, "is in float64, and this run in bfloat16; give --dtype float64, or --finetune"),
        ({"--save-megatron": tmp_path}, "is not empty, and holds no run of Megatron; give a new folder"),
        (
            {"--save-megatron": tmp_path / "no", "--model": model},
            "vision.layers.0.weight: nothing in Megatron's models is like it",
        ),
    ):
        done = launch(
            {**working_flags(tmp_path), "--dtype": "float64", **load, "--save": tmp_path / "new", **changes}, num_ranks=2
        )
        assert all(done.exit_codes) and message in done.output and "Traceback" not in done.output, done.output
    for form in ("--save-megatron", "--save-distributed"):
        with room_for(50_000):
            assert convert_main(["--load", str(tmp_path / "own"), form, str(tmp_path / "full")]) == 2
        assert "File too large; make room or give another folder" in capsys.readouterr().err
    words = ["--load", tmp_path / "own", "--save-distributed", tmp_path / "plain"]
    assert convert_main([*map(str, words), "--averages"]) == 2
    convert(*words)
    embeddings = {"model.llm.layers.0.word_embeddings.weight": torch.empty(384, 32, dtype=torch.float64)}
    torch.distributed.checkpoint.load(embeddings, checkpoint_id=tmp_path / "plain", no_dist=True)
    with open_model(tmp_path / "own") as (session, _):
        ours = {tensor.key: tensor.pieces[0].values for tensor in model_tensors(session.state)}
        for key, values in embeddings.items():
            assert torch.equal(values, ours[key])
