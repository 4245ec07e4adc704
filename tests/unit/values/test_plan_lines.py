import re
from dataclasses import replace

import pytest

from multimodal.plan.planners.disttrain import plan_disttrain
from multimodal.plan.planners.plan_file import plan_text
from multimodal.plan.planners.search.prediction import predict_run
from multimodal.values.checks.validate_plan import read_plan, validate_plan
from multimodal.values.errors import PlanError
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.unit.plan.planners.planning_cases import TWO, request


@pytest.fixture
def plan_file(tmp_path):
    asked = request(TWO)
    run = plan_disttrain(asked)
    path = tmp_path / "plan.yaml"
    path.write_text(plan_text(path.name, run, predict_run(run, asked), made_for={"model": "two"}, cluster="C.yaml"))
    assert read_plan(path, graph=TWO) == run.plan
    return path


def edit(path, pattern, replacement):
    """Replace the first match and return the line it was on."""
    lines = path.read_text().splitlines()
    index = next(index for index, line in enumerate(lines) if re.search(pattern, line) and not line.startswith("#"))
    lines[index] = re.sub(pattern, replacement, lines[index])
    path.write_text("\n".join(lines))
    return index + 1


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        (r"layers: \[\[0, ", "layers: [[1, ", "must cover layers 0 to"),
        (r"ranks: \[\d+", "ranks: [99", r"ranks \[99\] do not exist|ascending order|needs"),
        (r"layers: .*}", "}", r"stages\[0\]: 'layers' is missing"),
        (r"tensor_parallel_size: \d", "tensor_parallel_size: 3", "is not divisible by tensor parallel size 3"),
        (r"    replicas:", "    microbatch_shares: [0]\n    replicas:", "microbatch_shares are all 0; give one|found"),
        (
            r"    replicas:",
            "    microbatch_shares: [1, 1, 1]\n    replicas:",
            "give one share for each replica of 'vision' that serves",
        ),
    ],
)
def test_an_edited_plan_is_refused_with_its_line(plan_file, pattern, replacement, message):
    line = edit(plan_file, pattern, replacement)
    with pytest.raises(PlanError, match=message) as caught:
        read_plan(plan_file, graph=TWO, world_size=8)
    found = int(re.search(r"plan\.yaml, line (\d+):", str(caught.value))[1])
    assert abs(found - line) <= 1, f"line {line} was edited, {caught.value}"


def test_a_missing_unit_points_to_the_units(plan_file):
    text = plan_file.read_text()
    plan_file.write_text(text[: text.index("  llm:")])
    with pytest.raises(PlanError, match=r"line \d+: the plan says nothing of unit 'llm'") as caught:
        read_plan(plan_file, graph=TWO)
    line = int(re.search(r"line (\d+)", str(caught.value))[1])
    assert plan_file.read_text().splitlines()[line - 1] == "units:"


@pytest.mark.parametrize(
    ("unit", "shares", "message"),
    [
        ("llm", (1, 1), "unit 'llm': found 2 microbatch_shares for 1 replicas; give one for each"),
        ("llm", (0,), "unit 'llm': microbatch_shares are \\[0\\]; give every replica of the LLM a share of at least 1"),
        ("vision", (0,), "unit 'vision': microbatch_shares are all 0; give one replica at least something to do"),
        ("vision", (1, 2), "2 microbatch_shares for each of the 1 replicas of 'llm' are for 2 replicas, found 1; give one share"),
    ],
)
def test_shares_that_fit_nobody_are_refused(unit, shares, message):
    units = {
        name: UnitPlan((Replica((Stage((rank,), ((0, len(TWO.unit(name).layers)),)),)),))
        for rank, name in enumerate(TWO.unit_names)
    }
    plan = Plan({**units, unit: replace(units[unit], microbatch_shares=shares)})
    with pytest.raises(PlanError, match=message):
        validate_plan(plan, graph=TWO, world_size=2)
