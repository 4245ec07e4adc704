import json
from random import Random

import pytest

from multimodal.balance import BALANCERS
from tests.sanity.repository import ROOT
from tools.balance import main


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
    assert main(flags) == 0, capsys.readouterr().err
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


def test_a_model_gives_the_costs(lengths, capsys):
    flags = base(lengths, replicas="vision=4,llm=4")
    flags[flags.index("--units") : flags.index("--units") + 2] = ["--model", str(ROOT / "examples" / "corpus" / "model.yaml")]
    assert main(flags) == 0
    assert "replicas max/mean" in capsys.readouterr().out


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
