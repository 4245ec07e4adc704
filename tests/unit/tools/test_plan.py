import json
from itertools import pairwise

import pytest
import yaml

from multimodal.plan.planners import PLANNERS
from multimodal.plan.planners.templates.template_set import TemplateSet
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.validate import read_plan
from tests.sanity.repository import ROOT
from tools.plan import main
from tools.simulate import main as simulate_main

SHAPE = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 1024}
MODEL = {"units": {"vision": {"role": "encoder", **SHAPE}, "llm": {"role": "backbone", **SHAPE, "vocab_size": 1024}}}
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
    """Run the command that a plan file gives for the simulator, and return its report."""
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
    assert tuple(answer)[: len(KEYS)] == KEYS and answer["planner"] == "disttrain"
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


def test_whose_layers_run_is_a_choice_that_the_plan_keeps(flags, tmp_path, capsys):
    data = ["--uniform-lengths", "vision=64,llm=2048", "--planner", "megatron", "--output", str(tmp_path / "plan.yaml"), "--json"]
    fused, local = (json.loads(plan(capsys, *flags, *data, *more)) for more in ([], ["--transformer-impl", "local"]))
    assert (fused["transformer_impl"], local["transformer_impl"]) == ("transformer_engine", "local")
    assert local["peak_memory_bytes"] > fused["peak_memory_bytes"]
    assert "--transformer-impl local" in (tmp_path / "plan.yaml").read_text()


def test_comparison_lists_every_planner_and_draws(flags, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    data = ["--uniform-lengths", "vision=64,llm=128", "--planner", "disttrain", "--compare", "megatron,entrain"]
    picture = tmp_path / "plans.png"
    text = plan(capsys, *flags, *data, "--picture", str(picture))
    assert all(name in text for name in ("megatron", "entrain", "disttrain")) and picture.stat().st_size > 1000
    answer = json.loads(plan(capsys, *flags, *data, "--json"))
    assert set(answer["compare"]) == {"megatron", "entrain", "disttrain"}


@pytest.mark.deep(when=lambda units: units == ("llm",))
@pytest.mark.parametrize("units", [("vision", "llm"), ("llm",)])
def test_a_comparison_of_all_has_a_row_of_optimus_and_braid_is_not_behind_it(flags, tmp_path, capsys, units):
    (tmp_path / "model.yaml").write_text(
        yaml.safe_dump({"units": {name: MODEL["units"][name] for name in units}}, sort_keys=False)
    )
    tokens = "vision=64,llm=128" if "vision" in units else "llm=128"
    data = ["--uniform-lengths", tokens, "--planner", "braid", "--compare", "all", "--time-budget", "0.3", "--json"]
    data += ["--global-batch-size", "4"]
    compared = json.loads(plan(capsys, *flags, *data))["compare"]
    assert set(compared) >= set(PLANNERS) and "error" not in compared["optimus"]
    planned = [compared[name] for name in PLANNERS if "error" not in compared[name]]
    trained = [each for each in planned if not any("never run" in note for note in each["notes"])]
    assert compared["braid"]["iteration_seconds"] <= min(each["iteration_seconds"] for each in trained) * (1 + 1e-9)


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


def test_templates_are_compared_by_their_first_replicas(flags, capsys):
    data = ["--uniform-lengths", "vision=64,llm=128", "--planner", "megatron", "--compare", "megatron,oobleck", "--json"]
    answer = json.loads(plan(capsys, *flags, *data))
    found = answer["compare"]["oobleck"]
    assert found["iteration_seconds"] > 0 and found["num_gpus_used"] == 4
