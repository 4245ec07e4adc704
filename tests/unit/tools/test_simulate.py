import json
from random import Random

import pytest
import yaml

from multimodal.balance import BALANCERS
from multimodal.schedule.chrome_trace import read_timeline, write_chrome_trace
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.errors import DataError
from multimodal.values.timeline import Timeline, TimelineEvent
from tests.sanity.repository import ROOT
from tools.balance import main as run_balance
from tools.simulate import main
from tools.trace import IDLE, Share, compare_timelines
from tools.trace import main as trace

SHAPE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256}
MODEL = {"units": {"vision": {"role": "encoder", **SHAPE}, "llm": {"role": "backbone", **SHAPE}}}
VISION = {"replicas": [{"stages": [{"ranks": [rank], "layers": [[0, 6]]}]} for rank in (0, 1)]}
LLM = {"replicas": [{"stages": [{"ranks": [2], "layers": [[0, 3]]}, {"ranks": [3], "layers": [[3, 6]]}]}]}
PLAN = {"units": {"vision": VISION, "llm": LLM}}
LENGTHS = "sample_id,image_sizes,text_tokens_gpt2,audio_seconds\na,56x56;84x56,12,0\nb,,40,0\nc,112x112,7,1.5\n"


@pytest.fixture
def flags(tmp_path):
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(MODEL, sort_keys=False))
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN, sort_keys=False))
    (tmp_path / "lengths.csv").write_text(LENGTHS)
    cluster = str(ROOT / "examples" / "clusters" / "a40.yaml")
    model = ["--model", str(tmp_path / "model.yaml"), "--plan", str(tmp_path / "plan.yaml"), "--cluster", cluster]
    return [*model, "--schedule", "1f1b"]


def simulate(capsys, *flags):
    assert main(flags) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def costs_file(tmp_path, **table):
    path = tmp_path / "costs.yaml"
    path.write_text(yaml.safe_dump(table))
    return str(path)


def test_values_per_microbatch_and_sends_count(tmp_path, capsys):
    units = {
        "vision": {"upstream": [], "stages": [{"forward": [1.0, 2.0]}]},
        "llm": {"upstream": ["vision"], "stages": [{"forward": 1.0, "backward": [1.0, 3.0]}]},
    }
    costs = costs_file(tmp_path, num_microbatches=2, send_seconds=0.25, units=units)
    report = simulate(capsys, "--costs", costs, "--schedule", "gpipe", "--json")
    # vision: 0-1, 1-3; llm: forward 1.25-2.25, forward 3.25-4.25, backwards until 8.25
    assert report["iteration_seconds"] == pytest.approx(8.25, abs=1e-9)
    assert report["stages"][0] == {"unit": "llm", "replica": 0, "stage": 0, "microbatch_seconds": [2.0, 4.0]}


def test_memory_that_a_table_of_costs_does_not_tell_is_unknown(capsys):
    assert main(["--costs", str(ROOT / "examples/costs/cornstarch-vlm-m.yaml"), "--schedule", "1f1b"]) == 0
    printed = capsys.readouterr().out
    assert "unknown" in printed and "0.000" not in printed


def test_context_parallel_ranks_have_whole_items_unless_told_otherwise(flags, tmp_path, capsys):
    vision = {"context_parallel_size": 2, "replicas": [{"stages": [{"ranks": [0, 1], "layers": [[0, 6]]}]}]}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"units": {**PLAN["units"], "vision": vision}}))
    rows = ("a,1120x1120;1120x1120,12,0", "b,1120x1120;1120x1120,12,0")
    (tmp_path / "lengths.csv").write_text("\n".join((LENGTHS.splitlines()[0], *rows)))
    data = ["--lengths", str(tmp_path / "lengths.csv"), "--json", "--context-parallel-distribution"]
    by_item, spread = (simulate(capsys, *flags, *data, name)["stages"] for name in ("by-item", "lpt"))
    assert by_item == simulate(capsys, *flags, *data[:-1])["stages"]
    seconds = [
        [sum(stage["microbatch_seconds"]) for stage in stages if stage["unit"] == "vision"] for stages in (by_item, spread)
    ]
    assert seconds[0] < seconds[1], "nothing is gathered, nor repeated"


@pytest.mark.parametrize("data", [["--uniform-lengths", "vision=64,llm=128"], ["--lengths", "{folder}/lengths.csv"]])
def test_a_plan_is_simulated_on_a_cluster(flags, tmp_path, capsys, data):
    data = [word.format(folder=tmp_path) for word in data]
    report = simulate(capsys, *flags, *data, "--num-iterations", "2", "--global-batch-size", "6", "--json")
    assert len(report["iterations"]) == 2
    assert (report["num_lanes"], report["num_microbatches"]) == (4, 6)
    assert 0 < report["mfu"] < 1
    assert report["ideal_seconds"] <= report["iteration_seconds"]
    updating = report["update_seconds"] / report["iteration_seconds"]
    assert report["busy_fraction"] + sum(report["bubble"].values()) + updating == pytest.approx(1.0)
    assert report["peak_memory_bytes"] == max(lane["peak_memory_bytes"] for lane in report["lanes"]) > 0


def test_measured_layers_change_the_step(flags, tmp_path, capsys):
    data = ["--uniform-lengths", "vision=64,llm=128", "--json"]
    plain = simulate(capsys, *flags, *data)
    full = simulate(capsys, *flags, *data, "--recompute-granularity", "full")
    assert plain["iteration_seconds"] < full["iteration_seconds"]
    assert full["peak_memory_bytes"] < plain["peak_memory_bytes"]
    curves = {"forward": [1.0, 0.0, 0.0], "input_gradient": [2.0, 0.0, 0.0], "weight_gradient": [1.0, 0.0, 0.0]}
    costs = costs_file(tmp_path, units={"llm": {"transformer": [curves]}})
    slow = simulate(capsys, *flags, *data, "--layer-costs", costs)
    assert slow["iteration_seconds"] == pytest.approx((8 + 1) * 2 * 4, rel=0.01)  # two layers a stage


def test_passes_rewrite_the_schedule(flags, capsys):
    data = ["--uniform-lengths", "vision=64,llm=128", "--json"]
    assert simulate(capsys, *flags, *data)["bubble"]["dp_all_gather"] == 0
    report = simulate(capsys, *flags, *data, "--schedule-passes", "gather-parameters")
    assert report["schedule"] == "1f1b + gather-parameters"
    assert report["bubble"]["dp_all_gather"] > 0


def test_trace_and_picture_show_the_first_step(flags, tmp_path, capsys):
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    data = ["--uniform-lengths", "vision=64,llm=128", "--global-batch-size", "2"]
    assert main([*flags, *data, "--trace", str(trace), "--picture", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "1f1b: 2 microbatches on 4 lanes" in shown
    assert "of 48 GB" in shown
    boxes = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    timeline = read_timeline(trace)
    assert len(boxes) == len(timeline.events) > 0
    assert max(box["ts"] + box["dur"] for box in boxes) == pytest.approx(timeline.duration_seconds * 1e6)
    arrows = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "message"]
    sent, received = ({event["id"] for event in arrows if event["ph"] == end} for end in "sf")
    assert sent == received and 2 * len(sent) == len(arrows) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plan_that_does_not_fit_is_refused_with_its_line(flags, tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    lines = path.read_text().splitlines()
    (number,) = (index for index, line in enumerate(lines) if "llm:" in line)
    path.write_text("\n".join([*lines[: number + 1], "    context_parallel_size: 2", *lines[number + 1 :]]) + "\n")
    assert main([*flags, "--uniform-lengths", "vision=64,llm=128"]) == 2
    error = capsys.readouterr().err
    assert "tp 1 x cp 2 needs 2 ranks, found 1 [2]" in error and error.count("\n") == 1
    shown = int(error.split("plan.yaml, line ")[1].split(":")[0])
    assert "ranks" in "\n".join(path.read_text().splitlines()[shown - 1 : shown + 1])


FORWARDS = [Action(ActionKind.FORWARD, "llm", 0, stage, 0) for stage in (0, 1)]
RECEIVE = Action(ActionKind.RECEIVE_FORWARD, "llm", 0, 1, 0, Place("llm", 0, 0, 0))


def timeline_of(first, second):
    events = (
        TimelineEvent(FORWARDS[0], 0, 0.0, first),
        TimelineEvent(RECEIVE, 1, 0.0, first),
        TimelineEvent(FORWARDS[1], 1, first, first + second),
    )
    return Timeline(((0,), (1, 2)), events)


@pytest.fixture
def files(tmp_path):
    write_chrome_trace(timeline_of(1.0, 2.0), tmp_path / "a.json")
    write_chrome_trace(timeline_of(1.5, 2.0), tmp_path / "b.json.gz")
    return str(tmp_path / "a.json"), str(tmp_path / "b.json.gz")


def test_time_is_told_by_kind_and_lane():
    difference = compare_timelines(timeline_of(1.0, 2.0), timeline_of(1.5, 2.0))
    assert (difference.first_seconds, difference.second_seconds) == (3.0, 3.5)
    assert difference.by_kind == (Share("F", -1, 3.0, 3.5), Share("RF", -1, 1.0, 1.5), Share(IDLE, -1, 3.0, 3.5))
    assert difference.by_lane == (
        Share("F", 0, 1.0, 1.5),
        Share(IDLE, 0, 2.0, 2.0),
        Share("F", 1, 2.0, 2.0),
        Share("RF", 1, 1.0, 1.5),
        Share(IDLE, 1, 1.0, 1.5),
    )


def test_timelines_of_other_lanes_are_refused():
    with pytest.raises(DataError, match="2 lanes on 3 ranks against 1 lanes on 1 ranks"):
        compare_timelines(timeline_of(1.0, 2.0), Timeline(((0,),), ()))


def test_diff_reads_timelines_and_traces(files, tmp_path, capsys):
    assert trace(["diff", *files, "--picture", str(tmp_path / "both.png")]) == 0
    assert "A takes 3 s, B 3.5 s: +16.7%" in capsys.readouterr().out
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert trace(["diff", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["by_kind"][1]
    assert found == {"kind": "RF", "lane": -1, "first_seconds": 1.0, "second_seconds": 1.5}


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    """60 samples of 0 to 3 images, some with audio."""
    random = Random(3)
    rows = ["sample_id,image_sizes,text_tokens_gpt2,audio_seconds"]
    for index in range(60):
        images = ";".join(f"{28 * random.randint(2, 30)}x{28 * random.randint(2, 30)}" for _ in range(random.randint(0, 3)))
        rows.append(f"{index},{images},{random.randint(5, 900)},{random.choice([0, 0, 2.5])}")
    path = tmp_path_factory.mktemp("lengths") / "lengths.csv"
    path.write_text("\n".join(rows))
    return str(path)


def balance(capsys, *flags):
    assert run_balance(flags) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def base(path, **changes):
    given = {"lengths": path, "units": "vision,audio,llm", "replicas": "vision=4,audio=2,llm=4", "global-batch-size": "32"}
    given |= {"microbatches": "2", "balance": "orchmllm", "gpus-per-node": "2", "num-batches": "2", **changes}
    return [part for name, value in given.items() for part in (f"--{name}", value)]


@pytest.mark.parametrize("name", BALANCERS)
def test_every_balancer_reports_every_unit(lengths, capsys, name):
    report = balance(capsys, *base(lengths, balance=name), "--json")
    assert set(report["units"]) == {"vision", "audio", "llm"} and report["num_batches"] == 2
    for measured in report["units"].values():
        assert measured["replica_imbalance"] >= 1 and measured["microbatch_imbalance"] >= 1 and measured["milliseconds"] > 0
        for what in ("replica", "microbatch"):
            assert 1 <= measured[f"{what}_imbalance_of_longest"] <= measured[f"{what}_imbalance"] * (1 + 1e-9)
        assert measured["inter_node_bytes"]["after"] <= measured["inter_node_bytes"]["before"]


def test_not_balancing_moves_and_changes_nothing(lengths, capsys):
    for measured in balance(capsys, *base(lengths, balance="none"), "--json")["units"].values():
        assert measured["replica_imbalance"] == measured["replica_imbalance_before"]
        assert measured["microbatch_time_std"]["after"] == measured["microbatch_time_std"]["before"]
        assert measured["inter_node_bytes"] == {"before": 0, "after": 0}


def test_balancing_evens_out_replicas_and_is_repeatable(lengths, capsys):
    report = balance(capsys, *base(lengths), "--json")
    for unit in ("vision", "llm"):
        measured = report["units"][unit]
        assert measured["replica_imbalance"] < 1.05 < measured["replica_imbalance_before"]
    again = balance(capsys, *base(lengths), "--json")
    other_seed = balance(capsys, *base(lengths, seed="5"), "--json")
    key = "replica_imbalance_before"
    assert again["units"]["llm"][key] == report["units"]["llm"][key] != other_seed["units"]["llm"][key]


def test_declared_costs_count(lengths, capsys):
    padded = balance(capsys, *base(lengths), "--unit-costs", "audio=padded,llm=linear+quadratic:0.001", "--json")
    linear = balance(capsys, *base(lengths), "--json")
    assert padded["units"]["llm"]["replica_imbalance_before"] > linear["units"]["llm"]["replica_imbalance_before"]


def test_encoders_that_encoders_feed_are_balanced_and_move_no_data(tmp_path, lengths, capsys):
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256}
    units = {
        "siglip": {"role": "encoder", **shape},
        "joint": {"role": "encoder", **shape, "join": "sequence", "queries": {"num_queries": 16}},
        "llm": {"role": "backbone", **shape},
    }
    model = tmp_path / "model.yaml"
    model.write_text(json.dumps({"units": units, "edges": [["siglip", "joint"], ["joint", "llm"]]}))
    flags = base(lengths, replicas="siglip=4,joint=4,llm=4")
    place = flags.index("--units")
    report = balance(capsys, *flags[:place], *flags[place + 2 :], "--model", str(model), "--json")
    assert set(report["units"]) == set(units)
    joint = report["units"]["joint"]
    assert joint["replica_imbalance"] < joint["replica_imbalance_before"]
    assert joint["inter_node_bytes"] == {"before": 0, "after": 0}
