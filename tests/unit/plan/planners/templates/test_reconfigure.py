import random
from functools import cache
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate_trace import NodeChange, Pauses, read_trace, simulate_restarts, simulate_templates
from multimodal.plan.planners.templates import reconfigure
from multimodal.plan.planners.templates.plan_templates import plan_templates
from multimodal.plan.planners.templates.template_set import PipelineTimes
from multimodal.values.errors import ConfigError, PlanError
from tests.unit.plan.planners.planning_cases import TEXT_ONLY, request, with_memory

NUM_NODES = 9


@cache
def reconfigurer(memory_gb=0.5, horizon=60.0):
    asked = with_memory(request(TEXT_ONLY, num_gpus=4 * NUM_NODES, micro_batch_size=1), memory_gb)
    return reconfigure.Reconfigurer(plan_templates(asked, fault_tolerance=1), 25e9, horizon_seconds=horizon)


def held_layers(one, pipelines):
    return {
        node: set(one.templates.layers_of_node[len(each.nodes), index])
        for each in pipelines
        for index, node in enumerate(each.nodes)
    }


def check(one, before, lost, joined, found):
    """All nodes are used once, by templates of the set, at least f + 1 times; each layer comes once from a node that has it."""
    nodes = [node for each in found.pipelines for node in each.nodes]
    there = ({node for each in before for node in each.nodes} - set(lost)) | set(joined)
    assert sorted(nodes) == sorted(there)
    sizes = {template.nodes for template in one.templates.templates}
    assert sizes.issuperset(len(each.nodes) for each in found.pipelines)
    assert len(found.pipelines) > one.templates.tolerance.fault_tolerance
    assert sum(each.num_microbatches for each in found.pipelines) == one.templates.num_microbatches
    assert min(each.num_microbatches for each in found.pipelines) >= 1
    held, wanted = held_layers(one, before), held_layers(one, found.pipelines)
    received = {(copy.target, copy.layer) for copy in found.copies}
    assert len(received) == len(found.copies)
    assert all(copy.source in there and copy.layer in held[copy.source] for copy in found.copies)
    lacking = {(node, layer) for node in nodes for layer in wanted[node] - held.get(node, set())}
    assert received == {each for each in lacking if each[1] not in found.missing_layers}
    survivors = set().union(*(held[node] for node in there if node in held))
    assert not survivors.intersection(found.missing_layers)


@settings(max_examples=25)
@given(st.data())
def test_any_losses_and_returns_leave_a_run_that_uses_all_nodes(data):
    one = reconfigurer(memory_gb=data.draw(st.sampled_from([0.35, 0.5, 16.0])))
    pipelines, next_node = one.start(), NUM_NODES
    for _ in range(4):
        nodes = [node for each in pipelines for node in each.nodes]
        spare = len(nodes) - one.templates.fewest_nodes
        lost = data.draw(st.lists(st.sampled_from(nodes), max_size=min(4, spare), unique=True)) if spare else []
        most = NUM_NODES - len(nodes) + len(lost)
        joined = range(next_node, next_node + data.draw(st.integers(0, most)))
        next_node += len(joined)
        found = one.reconfigure(pipelines, lost=lost, joined=joined)
        check(one, pipelines, lost, joined, found)
        if len(lost) <= one.templates.tolerance.fault_tolerance:
            assert not found.missing_layers
        pipelines = found.pipelines


@pytest.mark.parametrize(
    ("left", "num_joined", "how", "sizes"),
    [
        ([2, 3, 3], 0, "reinstantiate", [2, 3, 3]),
        ([1, 4, 3], 0, "borrow", [2, 3, 3]),
        ([1, 2, 2, 2], 0, "merge", [2, 2, 3]),
        ([1, 1, 2, 2], 0, "merge", [2, 2, 2]),
        ([0, 3, 2], 0, "reinstantiate", [2, 3]),
        ([1, 2, 3], 1, "reinstantiate", [2, 2, 3]),
        ([2, 2], 1, "reinstantiate", [2, 3]),
        ([2, 2], 4, "reinstantiate", [2, 2, 2, 2]),
        ([2, 2], 5, "reinstantiate", [2, 2, 2, 3]),
        ([1, 3], 0, "borrow", [2, 2]),
        ([1, 2], 0, None, []),  # it would leave too few replicas
        ([0, 7], 0, None, []),
    ],
)
def test_a_smaller_template_a_borrowed_node_and_a_merged_pipeline(left, num_joined, how, sizes):
    """Oobleck, Figure 2.8, with templates of 2 nodes and more."""
    one = reconfigurer()
    assert one.templates.least_nodes == 2
    found = reconfigure.change_least(one.templates, left, num_joined)
    assert (found is None) == (how is None) and (found is None or (found[0], sorted(found[1])) == (how, sizes))


def test_with_a_long_horizon_the_shortest_step_is_taken():
    short, long = reconfigurer(horizon=1e-9), reconfigurer(horizon=1e9)
    for lost in ([0], [0, 1], [0, 3, 5]):
        quick, fast = (each.reconfigure(each.start(), lost=lost) for each in (short, long))
        assert quick.copy_seconds <= fast.copy_seconds and fast.step_seconds <= quick.step_seconds


def test_too_few_nodes_are_refused_with_what_they_lack():
    one = reconfigurer()
    pipelines = one.reconfigure(one.start(), lost=range(NUM_NODES - one.templates.fewest_nodes)).pipelines
    last = [node for each in pipelines for node in each.nodes]
    with pytest.raises(PlanError, match=f"{len(last) - 1} nodes are left, but 2 replicas of 2 nodes need 4; wait for nodes"):
        one.reconfigure(pipelines, lost=last[:1])
    with pytest.raises(PlanError, match="node 77 is lost and was not there"):
        one.reconfigure(pipelines, lost=[77])
    with pytest.raises(PlanError, match=f"node {last[0]} .* joins and is there already"):
        one.reconfigure(pipelines, joined=last[:1])


def test_layers_that_nobody_has_any_more_are_named():
    one = reconfigurer()
    pipelines = (reconfigure.Pipeline(tuple(range(4)), 12), reconfigure.Pipeline(tuple(range(4, 9)), 12))
    held = held_layers(one, pipelines)
    owners = [node for node in held if 0 in held[node]]
    found = one.reconfigure(pipelines, lost=owners)
    assert 0 in found.missing_layers
    check(one, pipelines, owners, (), found)


def test_copies_are_spread_over_those_that_have_a_layer():
    wanted = {0: [0, 1], 1: [0, 1], 2: [0, 1], 3: [0, 1]}
    copies, missing = reconfigure.deal_copies(wanted, {0: [0, 1], 1: [0, 1]}, [100, 100])
    assert not missing and len(copies) == 4
    assert sorted(copy.source for copy in copies) == [0, 0, 1, 1]
    assert reconfigure.copy_seconds(copies, bytes_per_second=100.0) == 2.0
    assert reconfigure.deal_copies({0: [0]}, {1: [1]}, [5, 5]) == ((), (0,))


def random_templates(draw, *, least):
    """Pipelines of consecutive numbers of nodes: more nodes are faster, not always in proportion."""
    found = {}
    for nodes in range(least, least + draw.randint(1, 4)):
        stages = [draw.uniform(0.5, 1.0) / nodes for _ in range(nodes)]
        found[nodes] = PipelineTimes(tuple(stages), tuple(2 * each for each in stages))
    return found


def least_step(times, sizes, count):
    def steps(left, rest):
        if len(rest) == 1:
            yield times[rest[0]].seconds(left)
            return
        for own in range(1, left - len(rest) + 2):
            yield from (max(times[rest[0]].seconds(own), other) for other in steps(left - own, rest[1:]))

    return min(steps(count, sizes))


def test_shares_are_the_best_of_all():
    draw = random.Random(0)
    for _ in range(40):
        times = random_templates(draw, least=1)
        sizes = [draw.choice(list(times)) for _ in range(draw.randint(1, 4))]
        count = draw.randint(len(sizes), 12)
        found = reconfigure.share_batch(times, sizes, num_microbatches=count)
        assert found.step_seconds == pytest.approx(least_step(times, sizes, count))
        assert sum(each.num_microbatches for each in found.instances) == count
        assert sorted(each.nodes for each in found.instances) == sorted(sizes)
        assert min(each.num_microbatches for each in found.instances) >= 1


def test_instances_are_the_best_of_all_combinations():
    draw = random.Random(1)
    for _ in range(40):
        times = random_templates(draw, least=draw.randint(1, 2))
        num_nodes, num_microbatches, least_replicas = draw.randint(3, 8), draw.randint(3, 12), draw.randint(1, 2)
        combinations = [
            sizes
            for count in range(least_replicas, num_microbatches + 1)
            for sizes in combinations_with_replacement(times, count)
            if sum(sizes) == num_nodes
        ]
        if not combinations:
            with pytest.raises(PlanError):
                reconfigure.instantiate(times, num_nodes, num_microbatches, least_replicas)
            continue
        wanted = min(
            reconfigure.share_batch(times, sizes, num_microbatches=num_microbatches).step_seconds for sizes in combinations
        )
        found = reconfigure.instantiate(times, num_nodes, num_microbatches, least_replicas)
        assert found.step_seconds == pytest.approx(wanted)
        assert sum(each.nodes for each in found.instances) == num_nodes
        assert len(found.instances) >= least_replicas


def test_what_cannot_be_is_refused_with_what_would_work():
    times = {2: PipelineTimes((1.0, 1.0), (2.0, 2.0))}
    with pytest.raises(PlanError, match="3 nodes cannot hold 2 replicas of at least 2 nodes each; use 4 nodes"):
        reconfigure.instantiate(times, 3, 8, 2)
    with pytest.raises(PlanError, match="1 microbatches cannot be shared by 2 replicas; make it at least 2"):
        reconfigure.instantiate(times, 4, 1, 2)
    with pytest.raises(PlanError, match="5 nodes cannot all be used by at most 8 replicas"):
        reconfigure.instantiate(times, 5, 8)
    with pytest.raises(PlanError, match="make it at least 3 microbatches"):
        reconfigure.share_batch(times, [2, 2, 2], num_microbatches=2)


PAUSES = Pauses(recovery=3.0, restart=100.0, checkpoint_interval=50.0)


@cache
def reconfigurer_of_trace():
    asked = with_memory(request(TEXT_ONLY, num_gpus=24, micro_batch_size=1), 0.5)
    return reconfigure.Reconfigurer(plan_templates(asked, fault_tolerance=1), 25e9)


def test_spans_follow_each_other_and_a_loss_costs_the_running_step():
    one = reconfigurer_of_trace()
    changes = [NodeChange(20.0, -1), NodeChange(40.0, 1), NodeChange(41.0, -2)]
    found = simulate_templates(one, changes, until=100.0, pauses=PAUSES)
    for span, following in zip(found.spans, found.spans[1:], strict=False):
        assert span.end == following.start and span.end > span.start
    assert found.spans[0].num_nodes == 6
    assert [span.state for span in found.spans][:3] == ["train", "recover", "train"]
    assert found.spans[1].end - found.spans[1].start >= 3.0
    assert found.num_steps < sum(span.num_steps for span in found.spans) + 1
    assert len(found.changes) == 3 and found.spans[-1].num_nodes == 4


def test_what_waits_for_the_end_of_a_step_takes_effect_once_and_an_announced_loss_costs_no_step():
    one = reconfigurer_of_trace()
    step = one.templates.step_seconds
    lost, joins = NodeChange(10.1 * step, -1), NodeChange(10.2 * step, 1)
    announced = Pauses(recovery=3.0, is_announced=True)
    both = simulate_templates(one, [lost, joins], until=100 * step, pauses=announced)
    assert both.spans[0].end == pytest.approx(11 * step) and both.spans[1].state == "recover" and len(both.changes) == 1
    assert simulate_templates(one, [lost], until=10.5 * step, pauses=PAUSES).num_steps == 10
    cut = simulate_templates(one, [joins, NodeChange(10.3 * step, -1)], until=100 * step, pauses=PAUSES)
    assert cut.spans[0].end == pytest.approx(10.3 * step) and len(cut.changes) == 1


def test_with_too_few_nodes_a_run_waits_and_then_restarts():
    one = reconfigurer_of_trace()
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


def test_traces_are_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("# spot\nseconds,nodes\n10,-2\n\n20.5,+1 # one returns\n")
    assert read_trace(path, num_nodes=4) == (NodeChange(10.0, -2), NodeChange(20.5, 1))
    with pytest.raises(ConfigError, match="no such file"):
        read_trace(tmp_path / "none.csv", num_nodes=4)
