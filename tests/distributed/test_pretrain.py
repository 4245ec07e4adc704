"""pretrain_mllm.py as a user runs it, over real processes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron.runtime.checkpoint.checkpoint import load_checkpoint
from megatron.runtime.generation.drawing import draw_image
from megatron.runtime.generation.whole_model import open_model
from megatron.runtime.training.plan_steps import measured_after
from multimodal.plan.planners.templates.template_plan import plan_instances
from multimodal.plan.planners.templates.template_set import ChainUnit, Instance, PipelineTemplate, TemplateSet, TemplateStage
from tests.distributed.conftest import Once
from tests.distributed.launch import REPOSITORY, as_arguments, launch

QUIET = ("--no-progress-bar", "--num-workers", 0)
SETTINGS = ("--eval-iters", 0, *QUIET)
BATCH = {"--global-batch-size": 16, "--micro-batch-size": 4}


def train(log: Path, *flags: object, num_ranks: int, example: str = "digits", evaluates: bool = False) -> list[dict[str, Any]]:
    """Train an example; returns the log's entries."""
    config = ("--config", REPOSITORY / "examples" / example / "config.yaml")
    batch = as_arguments({flag: value for flag, value in BATCH.items() if flag not in flags})
    settings = (*QUIET, "--eval-iters", int(evaluates), *batch)
    launched = launch([*config, *settings, "--log-json", log, *flags], num_ranks=num_ranks)
    assert launched.exit_codes == (0,) * num_ranks, launched.output
    return [json.loads(line) for line in log.read_text().splitlines()]


def losses(entries: list[dict[str, Any]]) -> list[float]:
    """The losses, step by step."""
    return [entry["loss"] for entry in entries]


@pytest.fixture
def one_process(once: Once) -> list[dict[str, Any]]:
    """Three float64 steps in one process."""
    return once(train_in_one_process)


def train_in_one_process(folder: Path) -> list[dict[str, Any]]:
    flags = ("--dtype", "float64", "--train-iters", 3, "--vision-dp", 1, "--llm-pp", 1)
    return train(folder / "log.jsonl", *flags, num_ranks=1)


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (5, ("--vision-dp", 2, "--llm-pp", 3, "--balance", "orchmllm", "--vision-micro-batch-size", 5)),
        (3, ("--vision-dp", 1, "--llm-pp", 2, "--llm-vpp", 2, "--schedule", "zb-v", "--micro-batch-size", 5)),
        (6, ("--vision-cp", 2, "--vision-dp", 1, "--llm-cp", 2, "--llm-pp", 2, "--context-parallel-block-size", 16)),
    ],
)
def test_any_sizes_log_the_same_losses(
    tmp_path: Path, one_process: list[dict[str, Any]], num_ranks: int, flags: tuple[object, ...]
) -> None:
    entries = train(tmp_path / "log.jsonl", "--dtype", "float64", "--train-iters", 3, *flags, num_ranks=num_ranks)
    assert losses(entries) == pytest.approx(losses(one_process), rel=0, abs=1e-9)
    norms = [[entry["grad_norm"] for entry in found] for found in (entries, one_process)]
    assert norms[0] == pytest.approx(norms[1], rel=0, abs=1e-9)


def test_layers_are_measured_ever_more_rarely() -> None:
    due = {measured_after(number, first=100, interval=20) for number in range(101, 500)}
    assert due == {120, 140, 180, 260, 420, 740}


def test_steps_decided_by_measured_layers_log_the_same_losses(tmp_path: Path, one_process: list[dict[str, Any]]) -> None:
    """Balance and order change behind step 2; a run that is resumed there goes on by what was measured before."""
    config, log = ("--config", REPOSITORY / "examples" / "digits" / "config.yaml"), tmp_path / "log.jsonl"
    how = ("--balance", "auto", "--schedule", "zb-memory", "--measure-interval", 2, "--dtype", "float64", "--train-iters", 3)
    places = ("--save", tmp_path, "--load", tmp_path, "--log-json", log)
    said = []
    for more in (("--exit-interval", 2), ()):
        launched = launch([*config, *SETTINGS, *as_arguments(BATCH), *how, *places, *more], num_ranks=4)
        assert launched.exit_codes == (0,) * 4, launched.output
        said.append(launched.output.count("layers measured up to this step"))
    assert said == [1, 0]
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert losses(entries) == pytest.approx(losses(one_process), rel=0, abs=1e-9)
    measured = [
        json.loads((tmp_path / f"step_{step:08d}" / "braid.json").read_text())["run_state"]["measured"] for step in (2, 3)
    ]
    assert measured[0] == measured[1] and measured[0]["step"] == 2


def test_a_run_on_several_nodes_says_where_its_groups_are(tmp_path: Path, one_process: list[dict[str, Any]]) -> None:
    """Ranks that take themselves for those of two nodes: the encoder in front would put the LLM's group on both."""
    config = ("--config", REPOSITORY / "examples" / "digits" / "config.yaml", *SETTINGS, *as_arguments(BATCH))
    sizes = ("--vision-dp", 1, "--llm-pp", 1, "--llm-tp", 2, "--dtype", "float64", "--train-iters", 3)
    launched = launch([*config, *sizes, "--log-json", tmp_path / "log.jsonl"], num_ranks=3, environment={"LOCAL_WORLD_SIZE": "2"})
    assert launched.exit_codes == (0,) * 3, launched.output
    assert "ranks go to llm, vision, in this order" in launched.outputs[0]
    found = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert losses(found) == pytest.approx(losses(one_process), rel=0, abs=1e-9)


def write_manifest(folder: Path) -> Path:
    """Ten samples with none to two images before their text."""
    lines = []
    for index in range(10):
        Image.effect_noise((16 + 8 * (index % 3), 24), 80).save(folder / f"{index}.png")
        images: list[dict[str, Any]] = [{"type": "image", "path": f"{index}.png"}] * (index % 3)
        texts = [{"type": "text", "role": role, "text": f"{role} {index}"} for role in ("user", "assistant")]
        lines.append(json.dumps({"id": index, "segments": [*images, *texts]}))
    path = folder / "manifest.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_prefix_trains_alike_whatever_the_sizes_and_the_backend(tmp_path: Path) -> None:
    """Against one process under a dense mask; and it is no causal mask."""
    data = ("--data-path", write_manifest(tmp_path), "--split", "100", "--global-batch-size", 8)
    common = ("--dtype", "float64", "--train-iters", 3, *data)
    prefix = (*common, "--attention-mask", "prefix")
    one = ("--vision-dp", 1, "--llm-pp", 1)
    dense = train(tmp_path / "dense.jsonl", *prefix, *one, "--attention-backend", "dense", num_ranks=1)
    sizes = ("--vision-dp", 1, "--llm-cp", 2, "--llm-pp", 1, "--context-parallel-block-size", 8, "--balance", "orchmllm")
    spread = train(tmp_path / "spread.jsonl", *prefix, *sizes, num_ranks=3)
    for key in ("loss", "grad_norm"):
        found, expected = ([entry[key] for entry in entries] for entries in (spread, dense))
        assert found == pytest.approx(expected, rel=0, abs=1e-9)
    causal = train(tmp_path / "causal.jsonl", *common, *one, num_ranks=1)
    assert all(abs(loss - other) > 1e-5 for loss, other in zip(losses(dense), losses(causal), strict=True))


def test_a_balancer_that_is_predicted_to_lose_is_named_once(tmp_path: Path) -> None:
    """Long texts among short ones: as they come, one of three replicas gets none of them and another one three."""
    texts = [[{"type": "text", "role": "assistant", "text": "x" * (1000 if index % 2 == 0 else 20)}] for index in range(9)]
    lines = (json.dumps({"id": index, "segments": segments}) for index, segments in enumerate(texts))
    (tmp_path / "manifest.jsonl").write_text("\n".join(lines))
    data = ("--data-path", tmp_path / "manifest.jsonl", "--split", "100", "--global-batch-size", 9, "--num-epochs", 1.5)
    sizes = ("--colocate-units", "--llm-pp", 1, "--micro-batch-size", 1, "--seq-length", 2048, "--balance", "none")
    config = ("--config", REPOSITORY / "examples" / "digits" / "config.yaml")
    launched = launch([*config, *SETTINGS, *data, *sizes], num_ranks=3)
    assert launched.exit_codes == (0,) * 3, launched.output
    warning = "warning: with --balance none and --schedule 1f1b the first global batch is predicted to take "
    assert launched.output.count(warning) == launched.outputs[0].count(warning) == 1, launched.output
    assert "1.5 epochs are 2 steps" in launched.output and "step 2/2" in launched.output


def template(nodes: int, *stages: tuple[int, int, int, int]) -> PipelineTemplate:
    """stages: first layer, last layer, GPUs, node."""
    return PipelineTemplate(nodes, 1, 1.0, tuple(TemplateStage(*stage, 1.0, 2.0) for stage in stages))


def test_replicas_of_templates_train_as_one_process_and_save_for_any_plan(
    tmp_path: Path, one_process: list[dict[str, Any]]
) -> None:
    """One replica on two nodes and one on one; the first stage of each holds the encoder and the LLM's first layers."""
    templates = TemplateSet(
        num_nodes=3,
        gpus_per_node=2,
        fault_tolerance=1,
        micro_batch_size=4,
        num_microbatches=3,
        recompute_granularity=None,
        chain=(ChainUnit("vision", 4), ChainUnit("llm", 8)),
        layer_bytes=(1,) * 12,
        instances=(Instance(2, 2), Instance(1, 1)),
        templates=(template(1, (0, 7, 1, 0), (8, 11, 1, 0)), template(2, (0, 5, 2, 0), (6, 8, 1, 1), (9, 11, 1, 1))),
    )
    plan = plan_instances(templates, templates.instances, llm="llm")
    assert [replica.ranks for replica in plan.units["vision"].replicas] == [(0, 1), (4,)]
    assert plan.units["llm"].is_unlike and plan.units["llm"].microbatch_shares == (2, 1)
    plan.to_file(tmp_path / "plan.yaml")
    how = ("--sequence-parallel", "--micro-batch-size", 4, "--balance", "whole-sample", "--schedule-passes", "reduce-by-layer")
    common = ("--dtype", "float64", "--save", tmp_path / "saved", "--load", tmp_path / "saved", "--save-interval", 2)
    given = (*common, *how, "--plan", tmp_path / "plan.yaml", "--train-iters", 3, "--exit-interval", 2)
    entries = train(tmp_path / "log.jsonl", *given, num_ranks=6)
    alone = ("--vision-dp", 1, "--llm-pp", 1, "--train-iters", 3)
    entries += train(tmp_path / "alone.jsonl", *common, *alone, num_ranks=1)
    for key in ("loss", "grad_norm"):
        found, expected = ([entry[key] for entry in each] for each in (entries, one_process))
        assert found == pytest.approx(expected, rel=0, abs=1e-9)


def test_a_generator_trains_alike_whatever_its_sizes(tmp_path: Path) -> None:
    """Other replicas and tensor parallel sizes, sequence parallelism, microbatches, a split backward; it shows what it draws."""
    common = ("--dtype", "float64", "--train-iters", 3, "--llm-pp", 1)
    Image.new("L", (16, 8)).save(tmp_path / "place.png")
    image = {"type": "image", "role": "assistant", "path": "place.png"}
    asked = {"id": "47", "segments": [{"type": "text", "role": "user", "text": "draw 47"}, image]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(asked))
    shows = ("--sample-prompts", tmp_path / "prompts.jsonl", "--sample-guidance-scale", 2)
    places = ("--save", tmp_path / "saved", "--report-dir", tmp_path, "--generator-ema-decay", 0.5)
    log = train(tmp_path / "one.jsonl", *common, *shows, *places, num_ranks=1, example="digits_generator", evaluates=True)
    *alone, _, drawn = log
    (answer,) = drawn["samples"]
    assert (answer["asked"], answer["answer"]) == ("draw 47", "an image of 16x8 pixels")
    with open_model(tmp_path / "saved") as model:
        expected = draw_image(model, "draw 47", size=(16, 8), guidance_scale=2)
        load_checkpoint(tmp_path / "saved", session=model[0], load_optimizer=False, load_rng=False)
        of_last_weights = draw_image(model, "draw 47", size=(16, 8), guidance_scale=2)
    shown = np.asarray(Image.open(tmp_path / answer["image"]))
    assert np.array_equal(shown, np.asarray(expected)) and not np.array_equal(shown, np.asarray(of_last_weights))
    assert all(0 < entry["generator_loss"] < entry["loss"] for entry in alone)
    assert alone[2]["generator_loss"] < alone[0]["generator_loss"]
    sizes = ("--vision-dp", 1, "--llm-dp", 1, "--painter-tp", 2, "--painter-dp", 1)
    how = ("--no-colocate-units", "--sequence-parallel", "--schedule", "zb-h1", "--micro-batch-size", 3)
    apart = train(tmp_path / "apart.jsonl", *common, *sizes, *how, num_ranks=4, example="digits_generator")
    for key in ("loss", "generator_loss", "grad_norm"):
        found, expected = ([entry[key] for entry in entries] for entries in (apart, alone))
        assert found == pytest.approx(expected, rel=0, abs=1e-9)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_does_not_end_training() -> None:
    """One warning, one line a step."""
    config = ("--config", REPOSITORY / "examples" / "digits" / "config.yaml", *SETTINGS)
    flags = ("--train-iters", 3, "--global-batch-size", 16, "--log-interval", 1, "--vision-dp", 1, "--llm-pp", 1)
    launched = launch([*config, *flags, "--log-json", "/dev/full"], num_ranks=1)
    assert launched.exit_codes == (0,), launched.output
    lines = launched.output.splitlines()
    assert [line.startswith("warning: --log-json /dev/full: cannot be written (No space") for line in lines].count(True) == 1
    first = next(index for index, line in enumerate(lines) if line.startswith("step 1/3 "))
    assert [line.split("  ")[0] for line in lines[first : first + 3]] == ["step 1/3", "step 2/3", "step 3/3"]


@pytest.fixture
def whole_run(once: Once) -> list[dict[str, Any]]:
    """Four float32 steps without interruption."""
    return once(train_without_interruption)


def train_without_interruption(folder: Path) -> list[dict[str, Any]]:
    return train(folder / "log.jsonl", "--train-iters", 4, num_ranks=4)


@pytest.fixture
def stopped_run(tmp_path: Path, once: Once) -> Path:
    """A folder of the same run, stopped after two steps, to go on in: `log.jsonl` and `checkpoints`."""
    return Path(shutil.copytree(once(train_half), tmp_path / "stopped"))


def train_half(folder: Path) -> Path:
    flags = ("--train-iters", 4, "--exit-interval", 2, "--save", folder / "checkpoints", "--load", folder / "checkpoints")
    train(folder / "log.jsonl", *flags, num_ranks=4)
    return folder


def test_the_log_has_the_step_and_its_split(whole_run: list[dict[str, Any]]) -> None:
    assert [entry["step"] for entry in whole_run] == [1, 2, 3, 4]
    for entry in whole_run:
        parts = [entry[f"{part}_seconds"] for part in ("compute", "communication", "waiting", "optimizer")]
        assert all(part >= 0 for part in parts)
        assert 0 < sum(parts) <= entry["step_seconds"] * 1.05
        assert entry["tokens_per_second"] == pytest.approx(entry["num_tokens"] / entry["step_seconds"])
        assert entry["num_target_tokens"] > 0
        assert entry["mfu"] > 0
        assert entry["peak_activation_bytes"] > 0


def test_bfloat16_stays_close_to_float32(tmp_path: Path, whole_run: list[dict[str, Any]]) -> None:
    coarse = train(tmp_path / "log.jsonl", "--train-iters", 4, "--bf16", num_ranks=4)
    assert losses(coarse) == pytest.approx(losses(whole_run), rel=0.03)
    assert losses(coarse) != losses(whole_run)


def test_the_sharded_float32_optimizer_stays_close_to_float64(tmp_path: Path, one_process: list[dict[str, Any]]) -> None:
    entries = train(tmp_path / "log.jsonl", "--train-iters", 3, "--vision-dp", 2, "--llm-pp", 1, "--llm-dp", 2, num_ranks=4)
    assert losses(entries) == pytest.approx(losses(one_process), rel=1e-4)


def test_a_frozen_encoder_trains_its_projector(tmp_path: Path, one_process: list[dict[str, Any]]) -> None:
    entries = train(
        tmp_path / "log.jsonl",
        "--dtype",
        "float64",
        "--train-iters",
        3,
        "--freeze",
        "vision",
        "--vision-dp",
        1,
        "--llm-pp",
        1,
        num_ranks=2,
    )
    assert losses(entries)[0] == pytest.approx(losses(one_process)[0], abs=1e-9)
    assert losses(entries)[2] != pytest.approx(losses(one_process)[2], abs=1e-9)
    assert losses(entries)[2] < losses(entries)[0]


def test_resuming_under_the_same_plan_changes_nothing(whole_run: list[dict[str, Any]], stopped_run: Path) -> None:
    log = stopped_run / "log.jsonl"
    assert losses([json.loads(line) for line in log.read_text().splitlines()]) == losses(whole_run)[:2]
    flags = ("--train-iters", 4, "--save", stopped_run / "checkpoints", "--load", stopped_run / "checkpoints")
    assert losses(train(log, *flags, num_ranks=4)) == losses(whole_run)
