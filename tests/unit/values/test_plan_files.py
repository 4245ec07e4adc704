"""Plan files with a slip are refused with file, line and fix, and cost neither time nor memory."""

import re

import pytest

from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.validate import read_plan, validate_plan

SHAPE = Transformer(4, 16, 2, 32)
GRAPH = ModelGraph((Unit("llm", Role.BACKBONE, SHAPE),))
TWO = ModelGraph((Unit("vision", Role.ENCODER, SHAPE), Unit("llm", Role.BACKBONE, SHAPE)), (("vision", "llm"),))
TEXT = """\
units:
  llm:
    tensor_parallel_size: 1
    replicas:
      - stages:
          - {ranks: [0], layers: [[0, 3]]}
          - {ranks: [1], layers: [[3, 6]]}
"""


TWO_UNITS = """\
# Found by a search, with words about it.
units:
  vision:
    replicas:
      - stages:
          - {ranks: [0], layers: [[0, 6]]}
  llm:
    replicas:
      - stages:
          - {ranks: [1], layers: [[0, 6]]}
"""


def refusal_of(tmp_path, text, graph=GRAPH, world_size=None):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        read_plan(path, graph=graph, world_size=world_size)
    found = re.fullmatch(r".*/plan\.yaml, line (\d+): (.*)", str(caught.value))
    assert found, caught.value
    return int(found[1]), found[2]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("[3, 6]", "[3, 1000000000000]", 7, "layers[0][1]: expected an integer of at most 10,002, found 1000000000000"),
        ("[3, 6]", "[3, 5000]", 5, "must cover layers 0 to 5 once each"),
        ("[3, 6]", "[4, 6]", 5, "must cover layers 0 to 5 once each"),
        ("[3, 6]", "[2, 6]", 5, "must cover layers 0 to 5 once each"),
        ("[[3, 6]]", "[[3, 6], [6, 6]]", 5, "must cover layers 0 to 5 once each"),
        ("[[3, 6]]", "[]", 7, "layers: expected a list with at least 1 entry, found []"),
        ("[1]", "[-1]", 7, "ranks[0]: expected an integer of at least 0, found -1"),
        ("[1]", "[1000000000000]", 7, "ranks[0]: expected an integer of at most 1,048,575"),
        ("[1]", "[1000000]", 1, "ranks [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, ...] have nothing to do"),
        ("size: 1", "size: 1000000000000", 3, "tensor_parallel_size: expected an integer of at most 1,048,576"),
        ("size: 1", "size: 1\n    data_parallel_size: 1", 4, "unknown key 'data_parallel_size'; known keys are replicas"),
        ("replicas", "replica", 4, "did you mean 'replicas'?"),
        ("ranks: [1]", "ranks: [1], ranks: [1]", 7, "'ranks' is there twice"),
        ("units:", "units: {}\nmore:", 2, "unknown key 'more'; known keys are units"),
    ],
)
def test_a_slip_is_named_with_its_line(tmp_path, old, new, line, message):
    assert TEXT.count(old) == 1
    found_line, problem = refusal_of(tmp_path, TEXT.replace(old, new))
    assert message in problem
    assert found_line == line


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("ranks: [1]", "ranks: [99]", 10, "ranks [99] do not exist"),
        ("ranks: [1], layers: [[0, 6]]", "ranks: [1]", 10, "stages[0]: 'layers' is missing"),
        ("llm:", "llm:\n    tensor_parallel_size: 3", 8, "is not divisible by tensor parallel size 3"),
        ("llm:", "llm:\n    microbatch_shares: [1, 1]", 8, "unit 'llm': found 2 microbatch_shares for 1 replicas; give one for"),
        ("llm:", "llm:\n    microbatch_shares: [0]", 8, "[0]; give every replica of the LLM a share of at least 1"),
        ("vision:", "vision:\n    microbatch_shares: [0]", 4, "unit 'vision': microbatch_shares are all 0; give one replica at"),
        ("vision:", "vision:\n    microbatch_shares: [1, 2]", 4, "of 'llm' are for 2 replicas, found 1; give one share for each"),
        ("vision:", "vision:\n    microbatch_shares: [-1]", 4, "microbatch_shares[0]: expected an integer of at least 0"),
        (TWO_UNITS[TWO_UNITS.index("  llm") :], "", 2, "the plan says nothing of unit 'llm'"),
    ],
)
def test_a_slip_in_one_of_two_units_is_named_with_its_line(tmp_path, old, new, line, message):
    found_line, problem = refusal_of(tmp_path, TWO_UNITS.replace(old, new), TWO, world_size=2)
    assert message in problem and found_line == line


def test_a_plan_made_in_python_is_checked_without_listing_its_layers():
    for ranges in (((0, 10**12),), ((0, 3), (3, 10**12)), ((0, 6), (6, 6))):
        plan = Plan({"llm": UnitPlan((Replica((Stage((0,), ranges),)),))})
        with pytest.raises(PlanError, match="must cover layers 0 to 5 once each"):
            validate_plan(plan, graph=GRAPH, world_size=1)


def test_ranks_beyond_all_bounds_are_not_listed_either():
    plan = Plan({"llm": UnitPlan((Replica((Stage((10**12,), ((0, 6),)),)),))})
    with pytest.raises(PlanError, match=r"ranks \[0, 1, .*15, \.\.\.\] have nothing to do"):
        validate_plan(plan, graph=GRAPH, world_size=plan.num_ranks)
