from functools import cache

import pytest

from multimodal.plan.planners.templates.plan_templates import plan_templates
from multimodal.plan.planners.templates.reconfigure import Reconfigurer
from multimodal.plan.planners.templates.simulate_trace import (
    NodeChange,
    Pauses,
    read_trace,
    simulate_restarts,
    simulate_templates,
)
from multimodal.values.errors import ConfigError
from tests.unit.plan.planners.planning_cases import TEXT_ONLY, request, with_memory

PAUSES = Pauses(recovery=3.0, restart=100.0, checkpoint_interval=50.0)


@cache
def reconfigurer():
    asked = with_memory(request(TEXT_ONLY, num_gpus=24, micro_batch_size=1), 0.5)
    return Reconfigurer(plan_templates(asked, fault_tolerance=1), 25e9)


def test_spans_follow_each_other_and_a_loss_costs_the_running_step():
    one = reconfigurer()
    changes = [NodeChange(20.0, -1), NodeChange(40.0, 1), NodeChange(41.0, -2)]
    found = simulate_templates(one, changes, until=100.0, pauses=PAUSES)
    for span, following in zip(found.spans, found.spans[1:], strict=False):
        assert span.end == following.start and span.end > span.start
    assert found.spans[0].num_nodes == 6
    assert [span.state for span in found.spans][:3] == ["train", "recover", "train"]
    assert found.spans[1].end - found.spans[1].start >= 3.0
    assert found.num_steps < sum(span.num_steps for span in found.spans) + 1
    assert len(found.changes) == 3 and found.spans[-1].num_nodes == 4


def test_with_too_few_nodes_a_run_waits_and_then_restarts():
    one = reconfigurer()
    found = simulate_templates(one, [NodeChange(10.0, -3), NodeChange(30.0, 2)], until=300.0, pauses=PAUSES)
    states = [(span.state, span.start, span.end) for span in found.spans]
    assert states[1] == ("wait", 10.0, 30.0) and states[2] == ("restart", 30.0, 130.0) and states[3][0] == "train"


def test_a_restart_loses_what_was_done_since_the_newest_checkpoint():
    def step_seconds(num_nodes):
        return 1.0 if num_nodes >= 4 else None

    found = simulate_restarts(step_seconds, [NodeChange(70.0, -1)], num_nodes=6, until=270.0, pauses=PAUSES)
    assert [(span.state, span.end) for span in found.spans] == [("train", 70.0), ("restart", 170.0), ("train", 270.0)]
    assert found.num_steps == 50 + 100
    waiting = simulate_restarts(step_seconds, [NodeChange(70.0, -3)], num_nodes=6, until=100.0, pauses=PAUSES)
    assert waiting.spans[-1].state == "wait" and waiting.num_steps == 50
    assert simulate_restarts(step_seconds, [], num_nodes=6, until=270.5, pauses=PAUSES).num_steps == 270


def test_traces_are_read_and_wrong_lines_named(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("# spot\nseconds,nodes\n10,-2\n\n20.5,+1 # one returns\n")
    assert read_trace(path, num_nodes=4) == (NodeChange(10.0, -2), NodeChange(20.5, 1))
    cases = [
        ("10,-2\n5,1\n", "line 2: 5 s is before 10 s"),
        ("10,-5\n", "line 1: -1 nodes would be there, of 4 at the start"),
        ("10,1\n", "line 1: 5 nodes would be there"),
        ("10\n", "line 1: expected seconds,nodes such as 3600,-2, found '10'"),
        ("nan,1\n", "line 1: nan s is before"),
        ("1,1.5\n", "line 1: expected seconds,nodes"),
    ]
    for text, problem in cases:
        path.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            read_trace(path, num_nodes=4)
    with pytest.raises(ConfigError, match="no such file"):
        read_trace(tmp_path / "none.csv", num_nodes=4)
