"""Training commands of Megatron become files that the run's own parser takes, and every flag of theirs is answered."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from benchmarks.baselines import COMPARED
from megatron.runtime.flags.arguments import parse_arguments
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.search.goodput import Failures, goodput_of, plan_for_goodput
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.prediction import Prediction
from multimodal.plan.planners.templates.template_set import TemplateSet
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.validate import read_plan
from tests.distributed.launch import train
from tests.sanity.repository import ROOT
from tools.from_megatron import MOCK
from tools.from_megatron import main as from_megatron
from tools.megatron_command import read_command
from tools.plan import build_parser, build_request, main
from tools.simulate import main as simulate_main

UNIT_SHAPE = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 1024}
MODEL = {"units": {"vision": {"role": "encoder", **UNIT_SHAPE}, "llm": {"role": "backbone", **UNIT_SHAPE, "vocab_size": 1024}}}
LENGTHS = "sample_id,image_sizes,text_tokens_gpt2\na,56x56;84x56,12\nb,,40\nc,112x112,7\nd,168x112,90\n"
KEYS = ("planner", "iteration_seconds", "ideal_seconds", "mfu", "num_gpus_used", "tokens_per_second_per_gpu")
KEYS += ("peak_memory_bytes", "units", "planning_seconds")


@pytest.fixture
def flags(tmp_path):
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(MODEL, sort_keys=False))
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    cluster = str(ROOT / "examples" / "clusters" / "a40.yaml")
    return ["--model", str(tmp_path / "model.yaml"), "--cluster", cluster, "--num-gpus", "4", "--global-batch-size", "8"]


def plan(capsys, *flags):
    assert main(flags) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def check_simulated_alike(capsys, output, answer):
    comment = next(line for line in output.read_text().splitlines() if "tools/simulate.py" in line)
    simulated = comment.split("tools/simulate.py --plan plan.yaml ")[1].split()
    assert simulate_main(["--plan", str(output), *simulated, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["iteration_seconds"] == pytest.approx(answer["iteration_seconds"])
    assert report["peak_memory_bytes"] == answer["peak_memory_bytes"]
    return report


def test_json_has_the_keys_and_the_plan_file_runs_in_the_simulator(flags, tmp_path, capsys):
    data = ["--lengths", str(tmp_path / "lengths.csv")]
    output = tmp_path / "plan.yaml"
    answer = json.loads(plan(capsys, *flags, *data, "--planner", "disttrain", "--output", str(output), "--json"))
    assert {*KEYS} <= answer.keys() and answer["planner"] == "disttrain"
    assert set(answer["units"]["llm"]) == {"dp", "tp", "cp", "pp", "ep", "virtual_stages", "gpus"}
    found = read_plan(output, graph=ModelGraph.from_file(tmp_path / "model.yaml"), world_size=answer["num_gpus_used"])
    assert found.units["llm"].data_parallel_size == answer["units"]["llm"]["dp"]
    report = check_simulated_alike(capsys, output, answer)
    assert report["checkpoint"] == answer["checkpoint"]
    assert answer["checkpoint"]["num_files"] == answer["num_gpus_used"] + 2


def test_a_baseline_that_cannot_be_run_is_predicted_and_says_so(flags, tmp_path, capsys):
    data = ["--uniform-lengths", "vision=64,llm=128", "--planner", "encoders-replicated", "--fix", "llm:pp=2"]
    output = tmp_path / "plan.yaml"
    answer = json.loads(plan(capsys, *flags, *data, "--output", str(output), "--json"))
    (note,) = answer["notes"]
    assert "predicted and never run" in note
    text = output.read_text()
    assert f"#   {note}\n" in text and "pretrain_mllm.py" not in text and "tools/simulate.py" not in text
    table = plan(capsys, *flags, *data)
    assert "--schedule" not in table and "predicted and never run" in " ".join(table.split())


def test_a_context_parallel_plan_is_written_and_simulated_alike(flags, tmp_path, capsys):
    data = ["--uniform-lengths", "vision=64,llm=2048", "--planner", "disttrain", "--fix", "llm:cp=2,tp=1"]
    output = tmp_path / "plan.yaml"
    answer = json.loads(plan(capsys, *flags, *data, "--output", str(output), "--json"))
    assert answer["units"]["llm"]["cp"] == 2 and answer["units"]["vision"]["cp"] == 1
    sizes = answer["units"]["llm"]
    assert sizes["gpus"] == 2 * sizes["dp"] * sizes["pp"]
    llm = read_plan(output, graph=ModelGraph.from_file(tmp_path / "model.yaml")).units["llm"]
    assert llm.context_parallel_size == 2 and {len(stage.ranks) for stage in llm.replicas[0].stages} == {2}
    check_simulated_alike(capsys, output, answer)
    table = plan(capsys, *flags, *data, "--compare", "megatron")
    assert "tp x cp x pp x dp" in table and "llm 1x2x" in table


def test_comparison_lists_every_planner_and_draws(flags, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    data = ["--uniform-lengths", "vision=64,llm=128", "--planner", "disttrain", "--compare", "megatron,entrain"]
    picture = tmp_path / "plans.png"
    text = plan(capsys, *flags, *data, "--picture", str(picture))
    assert all(name in text for name in ("megatron", "entrain", "disttrain")) and picture.stat().st_size > 1000
    answer = json.loads(plan(capsys, *flags, *data, "--json"))
    assert set(answer["compare"]) == {"megatron", "entrain", "disttrain"}


@pytest.mark.deep(when=lambda units: len(units) > 1)  # searches are compared with all planners in tests/unit/plan/planners
@pytest.mark.parametrize("units", [("vision", "llm"), ("llm",)])
def test_a_comparison_of_all_has_a_row_of_optimus_and_braid_is_not_behind_it(flags, tmp_path, capsys, units):
    (tmp_path / "model.yaml").write_text(
        yaml.safe_dump({"units": {name: MODEL["units"][name] for name in units}}, sort_keys=False)
    )
    data = ["--uniform-lengths", "vision=64,llm=128" if "vision" in units else "llm=128", "--global-batch-size", "4"]
    data += ["--planner", "braid", "--compare", "all", "--time-budget", "0.1", "--json"]
    compared = json.loads(plan(capsys, *flags, *data))["compare"]
    assert set(compared) >= set(COMPARED) and "error" not in compared["optimus"]
    planned = [each for each in compared.values() if "error" not in each]
    trained = [each["iteration_seconds"] for each in planned if not any("never run" in note for note in each["notes"])]
    assert compared["braid"]["iteration_seconds"] <= min(trained) * (1 + 1e-9)


def test_freezing_and_fixed_sizes_reach_the_planner(flags, capsys):
    data = ["--uniform-lengths", "vision=64,llm=128", "--planner", "cornstarch", "--json"]
    free = json.loads(plan(capsys, *flags, *data))
    frozen = json.loads(plan(capsys, *flags, *data, "--freeze", "vision", "--freeze", "vision", "llm", "--fix", "llm:pp=2,dp=1"))
    assert frozen["units"]["llm"]["pp"] == 2 and frozen["units"]["llm"]["dp"] == 1
    assert frozen["peak_memory_bytes"] != free["peak_memory_bytes"]


def test_preferring_per_gpu_never_uses_more_per_token(flags, capsys):
    data = ["--uniform-lengths", "vision=64,llm=128", "--planner", "disttrain", "--json"]
    time_first, per_gpu = (json.loads(plan(capsys, *flags, *data, *more)) for more in ([], ["--prefer", "per-gpu"]))
    assert per_gpu["tokens_per_second_per_gpu"] >= time_first["tokens_per_second_per_gpu"]
    assert per_gpu["num_gpus_used"] <= time_first["num_gpus_used"]


@pytest.mark.parametrize(("mtbf_hours", "fewest_spares", "most_spares"), [(200, 2, 12), (20_000, 1, 2), (1e8, 0, 0)])
def test_as_many_nodes_are_spares_as_deliver_most(flags, mtbf_hours, fewest_spares, most_spares):
    """For planners whose plans take all GPUs and are alike, every number of nodes is tried here."""
    request, failures = (
        build_request(build_parser().parse_args([*flags, "--uniform-lengths", "vision=64,llm=128"])),
        Failures(mtbf_hours),
    )

    def plan_alike(asked):
        replicas = tuple(Replica((Stage((rank,), ((0, 6),)),)) for rank in range(asked.num_gpus))
        return PredictedRun(PlannedRun(Plan({"llm": UnitPlan(replicas)})), Prediction(1.0, 1.0, 0.5, 10.0, 0, {}))

    whole = request.changed(num_gpus=4 * 48)
    found = plan_for_goodput(plan_alike, whole, failures)
    tried = [goodput_of(plan_alike(request.changed(num_gpus=4 * nodes)), whole, failures) for nodes in range(1, 49)]
    best = max(tried, key=lambda each: each.tokens_per_second)
    assert goodput_of(found, whole, failures) == best and fewest_spares <= best.num_spares <= most_spares
    assert best.tokens_per_second == pytest.approx(best.num_nodes * 40 * best.available_share * best.running_share)
    assert found.run.notes == (best.describe(),)
    with pytest.raises(PlanError, match="6 GPUs are no whole number of nodes of 4"):
        plan_for_goodput(plan_alike, request.changed(num_gpus=6), failures)


def test_the_goodput_of_a_plan_is_told(flags, capsys):
    data = ["--uniform-lengths", "vision=64,llm=128", "--planner", "disttrain", "--json", "--mtbf-hours", "1000"]
    answer = json.loads(plan(capsys, *flags, *data))
    assert answer["goodput"]["available_share"] == pytest.approx(1000 / 1024) and answer["notes"][0].startswith("goodput ")
    assert answer["goodput"]["running_share"] == pytest.approx(1 / (1 + 25 / 60 / 1000))


def test_nodes_are_down_as_a_chain_of_failures_and_repairs_has_it():
    """The states of its stationary distribution: how many of three nodes are down."""
    fails, repaired, failures = 1 / 50, 1 / 10, Failures(50, repair_hours=10)
    rates = np.zeros((4, 4))
    for down in range(3):
        rates[down, down + 1], rates[down + 1, down] = (3 - down) * fails, (down + 1) * repaired
    rates -= np.diag(rates.sum(axis=1))
    shares = np.linalg.lstsq(np.vstack([rates.T, np.ones(4)]), np.array([0, 0, 0, 0, 1.0]))[0]
    found = [failures.available_share(num_nodes=3, num_spares=spares) for spares in range(4)]
    assert found == pytest.approx(shares.cumsum())


def test_templates_are_planned_written_and_described(flags, tmp_path, capsys):
    data = ["--uniform-lengths", "vision=64,llm=128", "--num-gpus", "12", "--planner", "oobleck", "--fault-tolerance", "1"]
    output = tmp_path / "templates.yaml"
    answer = json.loads(plan(capsys, *flags, *data, "--output", str(output), "--json"))
    found = TemplateSet.from_file(output)
    assert [each["nodes"] for each in answer["templates"]] == [1, 2] and answer["planning_seconds"] > 0
    for each in answer["templates"]:
        assert each["stages"][0][0] == 0 and each["stages"][-1][1] == 11 and each["iteration_seconds"] > 0
        assert all(stage[0] == before[1] + 1 for before, stage in pairwise(each["stages"]))
        assert sum(gpus for _, _, gpus in each["stages"]) == 4 * each["nodes"]
    assert sum(each["nodes"] for each in answer["instances"]) == 3 and len(answer["instances"]) == len(found.instances) >= 2
    assert answer["iteration_seconds"] == max(each["seconds"] for each in answer["instances"])
    text = plan(capsys, *flags, *data, "--output-plan", str(tmp_path / "plan.yaml"))
    made = Plan.from_file(tmp_path / "plan.yaml")
    assert made.num_ranks == 12
    assert made.units["llm"].microbatch_shares == tuple(each.num_microbatches for each in found.instances)
    assert "--balance whole-sample" in (tmp_path / "plan.yaml").read_text()
    assert "templates of 1 to 2 nodes of 4 GPUs" in text and "runs on 2 nodes and more" in text


WRITTEN = yaml.safe_load((ROOT / "tests" / "golden" / "training_scripts.yaml").read_text())


def filled(script: str | dict[str, str]) -> str:
    """Return a script or a command with the words in capitals replaced."""
    text, own = (WRITTEN["bases"][script["base"]], script) if isinstance(script, dict) else (script, {})
    for word, meaning in (own | WRITTEN["words"]).items():
        text = text.replace(word, meaning) if word.isupper() else text
    return text


SCRIPTS, COMMANDS = ({name: filled(text) for name, text in WRITTEN[kind].items()} for kind in ("scripts", "commands"))


def convert(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    script = folder / "train.sh"
    script.write_text(SCRIPTS.get(name, ""))
    words = ["--", *COMMANDS[name].split()] if name in COMMANDS else [str(script), "WORKSPACE=/w", "TILED=1", "/data", "/ckpt"]
    assert from_megatron(["--output", str(folder / "out"), *words]) == 0
    config, model = (yaml.safe_load((folder / "out" / file).read_text()) for file in ("config.yaml", "model.yaml"))
    return config, model["units"], (folder / "out" / "report.txt").read_text()


@pytest.mark.parametrize("name", [*SCRIPTS, *COMMANDS])
def test_what_is_written_is_a_run(tmp_path: Path, name: str) -> None:
    *_, report = convert(name, tmp_path)
    world_size = report.partition("--nproc-per-node ")[2].split()[0]
    parse_arguments(["--config", str(tmp_path / "out" / "config.yaml")], environ={"WORLD_SIZE": world_size})
    assert "unknown:" not in report
    assert not Path("/tmp/never-written").exists()


def test_a_script_s_variables_branches_and_strings(tmp_path: Path) -> None:
    config, units, report = convert("mistral and clip, batch", tmp_path)
    assert (config["global-batch-size"], config["train-iters"], config["lr-warmup-iters"]) == (128, 100, 10)
    assert config["freeze-LM"] and config["freeze-ViT"]
    assert (config["tensor-model-parallel-size"], config["vision-tp"]) == (4, 4)
    assert (config["save"], config["split"], config["seq-length"]) == ("/w/out", "99,1,0", 4096)
    assert config["make-vocab-size-divisible-by"] == 512  # padded there to a multiple of 128 for each tensor parallel rank
    assert units["vision"]["image"]["max_tiles"] == 12 and units["vision"]["image"]["merge_size"] == 2
    assert units["llm"]["rotary_scaling"] == [8.0, 1.0, 4.0, 8192.0] and units["llm"]["ffn_hidden_size"] == 14336
    assert "--special-tokens <image> <img> </img>: items take" in report


def test_arrays_and_arguments(tmp_path: Path) -> None:
    config, units, report = convert("mimo, vision and sound", tmp_path)
    assert (config["data-path"], config["pretrained-checkpoint"]) == (["/data"], "/ckpt-braid")
    assert list(units) == ["vision", "audio", "llm"] and units["audio"]["num_layers"] == 6
    assert "convert.py --load-megatron /ckpt" in report


def test_what_a_program_reads_from_its_environment(tmp_path: Path) -> None:
    config, units, report = convert("bridge, mimo", tmp_path)
    plan = yaml.safe_load((tmp_path / "out" / config["plan"]).read_text())["units"]
    assert [len(plan[unit]["replicas"][0]["stages"][0]["ranks"]) for unit in ("vision", "llm")] == [4, 2]
    assert units["llm"]["num_layers"] == 32 and "freeze-LM" not in config and "argument" not in report
    assert read_command([str(tmp_path / "train.sh")]).unset == ()


def test_a_job_s_processes_and_a_gated_quick_gelu(tmp_path: Path) -> None:
    _, units, report = convert("batch", tmp_path)
    assert "--nproc-per-node 4 " in report and units["llm"]["activation"] == "quick_geglu" and "ARGS" not in report
    config, _, report = convert("job, mock text", tmp_path)
    assert "--nproc-per-node 2 " in report and config["data-path"] == MOCK and "script uses" not in report
    config, _, report = convert("gpt", tmp_path)
    assert "--sequence-parallel: Megatron, too, leaves it out" in report and "sequence-parallel" not in config
    assert (config["tokenizer-model"], config["lr-wsd-decay-iters"], config["no-kernel-fusion"]) == ("v.json", 2, True)
    assert "left to do:\n  model: a recipe's code is not read" in convert("bridge", tmp_path)[2]
    config, _, report = convert("yi and siglip", tmp_path)
    assert "file:" in report.partition("--disable-vision-class-token")[0].rpartition("\n\n")[2], "which has none anyway"


def test_sizes_of_a_module_become_a_plan(tmp_path: Path) -> None:
    config, *_ = convert("mimo, hetero", tmp_path)
    plan = yaml.safe_load((tmp_path / "out" / config["plan"]).read_text())["units"]
    ranks = {unit: [stage["ranks"] for replica in plan[unit]["replicas"] for stage in replica["stages"]] for unit in plan}
    assert ranks == {"vision": [[0, 1], [2, 3]], "llm": [[4, 5], [6, 7]]}


def test_what_nobody_sets_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPTS["mimo, vision"].replace("MORE", "") + "\n: $LOAD_NAME")
    assert read_command([str(script)]).unset == ("argument 1", "LOAD_NAME")
    words = f"{filled('GPT')} --save --save-interval 2 --profile --adam-beta1 1 --tensorboard-dir".split()
    assert from_megatron(["--output", str(tmp_path), "--", *words]) == 0
    config, report = yaml.safe_load((tmp_path / "config.yaml").read_text()), (tmp_path / "report.txt").read_text()
    assert config["save-interval"] == 2 and config["profile"] and not {"save", "tensorboard-dir"} & config.keys()
    assert all(f"{each} in the script; set it" in report for each in ("--save has no value", "--tensorboard-dir has no value"))
    assert all(each in report for each in ("--profile starts CUDA's profiler", "--adam-beta1: must be at least 0 and below 1"))


def test_a_script_that_starts_much_and_kills_is_read(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f"kill -9 $$\nfor ((i = 0; i < 300; i++)); do prepare_shard --number-of-the-shard $i {'--and-more ' * 40}; done\n"
        "torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 --lr 1e-3 --min-lr 1e-4\n"
    )
    command = read_command([str(script)])
    assert (command.program, command.world_size, command.flags["lr"]) == ("pretrain_gpt.py", 2, ("1e-3",))


TINY = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "projector_hidden_size": 48}
HERE = {"tokenizer-type": "ByteTokenizer", "seq-length": 512, "train-iters": 2, "global-batch-size": 8}
"""What a run needs that its script does not say, or says too largely for a test."""
NOT_HERE = "tokenizer-model", "load", "pretrained-checkpoint", "save", "split", "eval-iters", "eval-interval", "lr-warmup-iters"


@pytest.mark.deep(when=lambda name: name not in ("mimo", "job, mock text"))
@pytest.mark.parametrize("name", [*SCRIPTS, *COMMANDS])
def test_what_is_written_trains_a_small_model(tmp_path: Path, name: str) -> None:
    """Two steps of the written run, with its sizes of modules and its flags, of narrow layers."""
    config, units, report = convert(name, tmp_path)
    for unit in units.values():
        unit |= {key: size for key, size in TINY.items() if key in unit and not (key == "num_layers" and "plan" in config)}
        unit |= {"num_query_groups": 4} if "num_query_groups" in unit else {}
        image = unit.get("image", {})
        image |= {"image_size": 2 * image["patch_size"] * image["merge_size"]} if "image_size" in image else {}
    is_shown = any("image_size" in unit.get("image", {}) for unit in units.values())
    samples = [{"text": "ab" * (10 + number)} for number in range(32)]
    if is_shown:
        Image.new("RGB", (40, 30), (9, 99, 200)).save(tmp_path / "a.png")
        turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A thing."}]
        samples = [{"image": "a.png", "conversations": turns}] * 32
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, samples)))
    config = {key: value for key, value in config.items() if key not in NOT_HERE} | HERE
    if config.get("data-path") != MOCK:
        config["data-path"] = "digits" if len(units) > 1 and not is_shown else str(tmp_path / "data.jsonl")
    (tmp_path / "out" / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "out" / "model.yaml").write_text(json.dumps({"units": units}))
    num_ranks = int(report.partition("--nproc-per-node ")[2].split()[0])
    flags = {"--config": tmp_path / "out" / "config.yaml", "--log-json": tmp_path / "log"}
    steps, _ = train(flags, num_ranks=num_ranks)
    assert [step["step"] for step in steps if "loss" in step] == [1, 2]
