"""What tools/emulate.py makes of a model's flags; that it runs is tested with ranks, in tests/distributed."""

from pathlib import Path

import pytest
import yaml

from multimodal.values.action import Action, ActionKind
from tests.sanity.repository import ROOT
from tools.emulate import build_run

SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256}
MODEL = {"units": {"llm": {"role": "backbone", **SHAPE}}}
PLAN = {"units": {"llm": {"replicas": [{"stages": [{"ranks": [0], "layers": [[0, 2]]}, {"ranks": [1], "layers": [[2, 4]]}]}]}}}
CURVES = {"forward": [0.5, 0.0, 0.0], "input_gradient": [1.0, 0.0, 0.0], "weight_gradient": [0.25, 0.0, 0.0]}


@pytest.fixture
def model_flags(tmp_path: Path) -> list[str]:
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(MODEL, sort_keys=False))
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN, sort_keys=False))
    (tmp_path / "layers.yaml").write_text(yaml.safe_dump({"units": {"llm": {"transformer": [CURVES]}}}))
    cluster = ROOT / "examples" / "clusters" / "cpu.yaml"
    files = {"model": tmp_path / "model.yaml", "plan": tmp_path / "plan.yaml", "cluster": cluster}
    named = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    return [*named, "--layer-costs", str(tmp_path / "layers.yaml"), "--uniform-lengths", "llm=32"]


def test_computations_wait_as_long_as_the_profile_says(model_flags: list[str]) -> None:
    run = build_run(model_flags, "1f1b", "", num_iterations=1)
    assert run.schedule.shape.plan.num_ranks == 2
    seconds = run.costs.compute(Action(ActionKind.BACKWARD, "llm", 0, 0, 0)).seconds
    assert seconds == pytest.approx(1.25, rel=0.01)  # one transformer layer, and word embeddings
