"""pretrain_mllm.py as a user runs it, over real processes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from megatron.runtime.checkpoint.checkpoint import load_checkpoint
from megatron.runtime.generation.drawing import make_item
from megatron.runtime.generation.whole_model import open_model
from megatron.runtime.training.plan_steps import measured_after
from multimodal.plan.planners.templates import template_set as sets
from multimodal.plan.planners.templates.template_plan import plan_instances
from tests.distributed.conftest import Once
from tests.distributed.launch import REPOSITORY, Launched, launch
from tests.distributed.launch import train as launch_training
from tests.distributed.mutations.files import replaced
from tests.distributed.small_run import (
    LEFT_OUT,
    MODEL,
    SIZED_OTHERWISE,
    manifest_entries,
    train,
    working_flags,
    write_working_files,
)

Entries = list[dict[str, Any]]
STEPS: dict[str, object] = {"--train-iters": 3, "--global-batch-size": 4, "--micro-batch-size": 1}
ON_TWO: dict[str, object] = {**STEPS, "--train-iters": 4, "--vision-dp": 2, "--llm-dp": 2, "--colocate-units": None}
ON_TWO |= {"--dtype": "float32", "--global-batch-size": 2}  # half of the data: other samples in every other step


def values_of(entries: Entries, name: str = "loss") -> list[float]:
    return [entry[name] for entry in entries]


def assert_alike(found: Entries, expected: Entries, *names: str) -> None:
    for name in ("loss", "grad_norm", *names):
        assert values_of(found, name) == pytest.approx(values_of(expected, name), rel=0, abs=1e-9)


Alone = tuple[Path, Entries]
"""The folder of the data, which are random, and three float64 steps in one process."""


@pytest.fixture
def alone(once: Once) -> Alone:
    return once(train_alone)


def train_alone(folder: Path) -> Alone:
    write_working_files(folder)
    (folder / "model.yaml").write_text(yaml.safe_dump(replaced(MODEL, ("units", "llm", "num_layers"), 4), sort_keys=False))
    return folder, train(folder, STEPS, num_ranks=1)[0]


def train_beside(alone: Alone, folder: Path, flags: Mapping[str, object], **how: Any) -> tuple[Entries, Launched]:
    return train(alone[0], {**STEPS, "--log-json": folder / "log.jsonl", **flags}, **how)


@pytest.mark.deep(when=lambda num_ranks: num_ranks == 6)  # below is a run that cuts sequences
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (5, {"--vision-dp": 2, "--llm-pp": 3, "--balance": "orchmllm", "--vision-micro-batch-size": 3}),
        (3, {"--llm-pp": 2, "--llm-vpp": 2, "--schedule": "zb-v", "--micro-batch-size": 2}),
        (6, {"--vision-cp": 2, "--llm-cp": 2, "--llm-pp": 2, "--context-parallel-block-size": 8}),
    ],
)
def test_any_sizes_log_the_same_losses(tmp_path: Path, alone: Alone, num_ranks: int, flags: dict[str, object]) -> None:
    entries, launched = train_beside(alone, tmp_path, flags, num_ranks=num_ranks)
    assert_alike(entries, alone[1])
    assert f"{len(manifest_entries())} training samples, 4 a step" in launched.outputs[0]


def test_layers_are_measured_ever_more_rarely() -> None:
    due = {measured_after(number, first=100, interval=20) for number in range(101, 500)}
    assert due == {120, 140, 180, 260, 420, 740}


@pytest.mark.deep(when=lambda source: not source)
@pytest.mark.parametrize("source", [{}, {"--lengths-from": "decode", "--num-workers": LEFT_OUT}], ids=["index", "decode"])
def test_steps_decided_by_measured_layers_log_the_same_losses(tmp_path: Path, alone: Alone, source: dict[str, object]) -> None:
    """Balance and order change behind step 2; a run that is resumed there goes on by what was measured before."""
    how = {"--balance": "auto", "--schedule": "zb-memory", "--measure-interval": 2, "--vision-dp": 2, "--llm-pp": 2}
    how |= {"--save": tmp_path, "--load": tmp_path, **source}
    entries, said = [], []
    for more in ({"--exit-interval": 2}, {}):
        found, launched = train_beside(alone, tmp_path, how | more, num_ranks=4)
        entries += found
        said.append(launched.output.count("layers measured up to this step"))
    assert said == [1, 0]
    assert_alike(entries, alone[1])
    measured = [
        json.loads((tmp_path / f"step_{step:08d}" / "braid.json").read_text())["run_state"]["measured"] for step in (2, 3)
    ]
    assert measured[0] == measured[1] and measured[0]["step"] == 2


def test_a_run_on_several_nodes_says_where_its_groups_are(tmp_path: Path, alone: Alone) -> None:
    """Ranks that take themselves for those of two nodes: the encoder in front would put the LLM's group on both."""
    found, launched = train_beside(alone, tmp_path, {"--llm-tp": 2}, num_ranks=3, environment={"LOCAL_WORLD_SIZE": "2"})
    assert "ranks go to llm, vision, in this order" in launched.outputs[0]
    assert_alike(found, alone[1])


def write_manifest(folder: Path, entries: Entries) -> Path:
    path = folder / "data" / "other.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_prefix_trains_alike_whatever_the_sizes_and_the_backend(tmp_path: Path) -> None:
    """Against one process under a dense mask; and it is no causal mask. Samples have none to two images before their text."""
    write_working_files(tmp_path)
    entries = manifest_entries()
    for index, entry in enumerate(entries):
        image, text = entry["segments"]
        entry["segments"] = [*[image] * (index % 3), {"type": "text", "role": "user", "text": f"user {index}"}, text]
    causal = {**STEPS, "--data-path": write_manifest(tmp_path, entries)}
    prefix = {**causal, "--attention-mask": "prefix"}
    dense, _ = train(tmp_path, prefix | {"--attention-backend": "dense"}, num_ranks=1)
    sizes = {"--llm-cp": 2, "--context-parallel-block-size": 8, "--balance": "orchmllm"}
    assert_alike(train(tmp_path, prefix | sizes, num_ranks=3)[0], dense)
    others = values_of(train(tmp_path, causal, num_ranks=1)[0])
    assert all(abs(loss - other) > 1e-5 for loss, other in zip(values_of(dense), others, strict=True))


def test_a_balancer_that_is_predicted_to_lose_is_named_once(tmp_path: Path) -> None:
    """Long texts among short ones: as they come, one of three replicas gets none of them and another one three."""
    write_working_files(tmp_path)
    texts = [[{"type": "text", "role": "assistant", "text": "x" * (1000 if index % 2 == 0 else 20)}] for index in range(9)]
    manifest = write_manifest(tmp_path, [{"id": index, "segments": segments} for index, segments in enumerate(texts)])
    flags = {name: value for name, value in working_flags(tmp_path).items() if name not in (*SIZED_OTHERWISE, "--train-iters")}
    flags |= {"--data-path": manifest, "--global-batch-size": 9, "--num-epochs": 1.5, "--seq-length": 2048}
    flags |= {"--colocate-units": None, "--micro-batch-size": 1, "--balance": "none"}
    launched = launch(flags, num_ranks=3, environment={"BRAID_TEST_ASKS_FOR_BETTER": "1"})
    assert launched.exit_codes == (0,) * 3, launched.output
    warning = "warning: with --balance none and --schedule 1f1b the first global batch is predicted to take "
    assert launched.output.count(warning) == launched.outputs[0].count(warning) == 1, launched.output
    assert "1.5 epochs are 2 steps" in launched.output and "step 2 done" in launched.output


def template(nodes: int, *stages: tuple[int, int, int, int]) -> sets.PipelineTemplate:
    """stages: first layer, last layer, GPUs, node."""
    return sets.PipelineTemplate(nodes, 1, 1.0, tuple(sets.TemplateStage(*stage, 1.0, 2.0) for stage in stages))


def test_replicas_of_templates_train_as_one_process_and_save_for_any_plan(tmp_path: Path, alone: Alone) -> None:
    """One replica on two nodes and one on one; the first stage of each holds the encoder and the LLM's first layers."""
    chain, instances = (sets.ChainUnit("vision", 3), sets.ChainUnit("llm", 6)), (sets.Instance(2, 2), sets.Instance(1, 1))
    cut = (template(1, (0, 5, 1, 0), (6, 8, 1, 0)), template(2, (0, 4, 2, 0), (5, 6, 1, 1), (7, 8, 1, 1)))
    batch = {"micro_batch_size": 1, "num_microbatches": 3, "recompute_granularity": None}
    sizes = {"num_nodes": 3, "gpus_per_node": 2, "tolerance": sets.Tolerance(1), "layer_bytes": (1,) * 9, **batch}
    templates = sets.TemplateSet(**sizes, chain=chain, instances=instances, templates=cut)
    plan = plan_instances(templates, templates.instances, llm="llm")
    assert [replica.ranks for replica in plan.units["vision"].replicas] == [(0, 1), (4,)]
    assert plan.units["llm"].is_unlike and plan.units["llm"].microbatch_shares == (2, 1)
    plan.to_file(tmp_path / "plan.yaml")
    saved = {"--save": tmp_path / "saved", "--load": tmp_path / "saved", "--save-interval": 2}
    how = {"--sequence-parallel": None, "--balance": "auto", "--schedule-passes": "reduce-by-layer"}
    how |= {**SIZED_OTHERWISE, "--plan": tmp_path / "plan.yaml", "--exit-interval": 2}
    entries, _ = train_beside(alone, tmp_path, saved | how, num_ranks=6)
    entries += train_beside(alone, tmp_path, saved, num_ranks=1)[0]
    assert_alike(entries, alone[1])


def test_a_generator_trains_alike_whatever_its_sizes(tmp_path: Path) -> None:
    """Other replicas and tensor parallel sizes, sequence parallelism, microbatches, a split backward; it shows what it draws."""
    Image.new("L", (16, 8)).save(tmp_path / "place.png")
    image = {"type": "image", "role": "assistant", "path": "place.png"}
    asked = {"id": "47", "segments": [{"type": "text", "role": "user", "text": "draw 47"}, image]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(asked))
    flags = {"--config": REPOSITORY / "examples" / "digits_generator" / "config.yaml", "--llm-pp": 1, "--num-workers": 0}
    flags |= {**STEPS, "--global-batch-size": 4, "--micro-batch-size": 2, "--dtype": "float64", "--eval-iters": 0}
    flags["--log-json"] = tmp_path / "log.jsonl"
    shows = {"--sample-prompts": tmp_path / "prompts.jsonl", "--sample-guidance-scale": 2, "--eval-iters": 1}
    places = {"--save": tmp_path / "saved", "--report-dir": tmp_path, "--generator-ema-decay": 0.5}
    *alone, drawn = launch_training({**flags, **shows, **places}, num_ranks=1)[0]
    (answer,) = drawn["samples"]
    assert (answer["asked"], answer["answer"]) == ("draw 47", "an image of 16x8 pixels")
    with open_model(tmp_path / "saved") as model:
        expected = make_item(model, "draw 47", size=(16, 8), guidance_scale=2)
        parameters = [*model[0].stages["painter", 0].parameters()]
        averages = [parameter.detach().clone() for parameter in parameters]
        load_checkpoint(tmp_path / "saved", session=model[0], load_optimizer=False, load_rng=False)
        assert not any(map(torch.equal, averages, parameters)), "they are those of the last step"
    assert np.array_equal(np.asarray(Image.open(tmp_path / answer["image"])), np.asarray(expected))
    assert all(0 < entry["generator_loss"] < entry["loss"] for entry in alone)
    assert alone[2]["generator_loss"] < alone[0]["generator_loss"]
    sizes = {"--vision-dp": 1, "--llm-dp": 1, "--painter-tp": 2, "--painter-dp": 1, "--no-colocate-units": None}
    how = {"--sequence-parallel": None, "--schedule": "zb-h1", "--micro-batch-size": 3}
    assert_alike(launch_training({**flags, **sizes, **how}, num_ranks=4)[0], alone, "generator_loss")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_does_not_end_training(tmp_path: Path) -> None:
    """One warning, one line a step."""
    write_working_files(tmp_path)
    given = {**working_flags(tmp_path), "--train-iters": 3, "--log-interval": 1, "--log-json": "/dev/full"}
    launched = launch(given, num_ranks=1)
    assert launched.exit_codes == (0,), launched.output
    lines = launched.output.splitlines()
    assert [line.startswith("warning: --log-json /dev/full: cannot be written (No space") for line in lines].count(True) == 1
    first = next(index for index, line in enumerate(lines) if line.startswith("step 1/3 "))
    assert [line.split("  ")[0] for line in lines[first : first + 3]] == ["step 1/3", "step 2/3", "step 3/3"]


@pytest.fixture
def whole_run(once: Once) -> Alone:
    return once(train_without_interruption)


def train_without_interruption(folder: Path) -> Alone:
    return folder, train(folder, ON_TWO)[0]


def test_the_log_has_the_step_and_its_split(whole_run: Alone) -> None:
    assert values_of(whole_run[1], "step") == [1, 2, 3, 4]
    for entry in whole_run[1]:
        parts = [entry[f"{part}_seconds"] for part in ("compute", "communication", "waiting", "optimizer")]
        assert all(part >= 0 for part in parts)
        assert 0 < sum(parts) <= entry["step_seconds"] * 1.05
        assert entry["tokens_per_second"] == pytest.approx(entry["num_tokens"] / entry["step_seconds"])
        assert entry["num_target_tokens"] > 0
        assert entry["mfu"] > 0
        assert entry["peak_activation_bytes"] > 0


def test_bfloat16_stays_close_to_float32(tmp_path: Path, whole_run: Alone) -> None:
    coarse, _ = train_beside(whole_run, tmp_path, {**ON_TWO, "--dtype": "bfloat16", "--peak-tflops": 1})
    assert values_of(coarse) == pytest.approx(values_of(whole_run[1]), rel=0.03)
    assert values_of(coarse) != values_of(whole_run[1])


def test_the_sharded_float32_optimizer_stays_close_to_float64(tmp_path: Path, alone: Alone) -> None:
    flags = {"--dtype": "float32", "--vision-dp": 2, "--llm-dp": 2}
    entries, _ = train_beside(alone, tmp_path, flags, num_ranks=4)
    assert values_of(entries) == pytest.approx(values_of(alone[1]), rel=1e-4)


def test_a_frozen_encoder_trains_its_projector(tmp_path: Path, alone: Alone) -> None:
    found, expected = values_of(train_beside(alone, tmp_path, {"--freeze": "vision"})[0]), values_of(alone[1])
    assert found[0] == pytest.approx(expected[0], abs=1e-9)
    assert found[2] != pytest.approx(expected[2], abs=1e-9)
    assert found[2] < found[0]
