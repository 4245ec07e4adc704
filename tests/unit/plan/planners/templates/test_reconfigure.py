from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.plan.planners.templates.plan_templates import plan_templates
from multimodal.plan.planners.templates.reconfigure import Pipeline, Reconfigurer, change_least, copy_seconds, deal_copies
from multimodal.values.errors import PlanError
from tests.unit.plan.planners.planning_cases import TEXT_ONLY, request, with_memory

NUM_NODES = 9


@cache
def reconfigurer(memory_gb=0.5, fault_tolerance=1, horizon=60.0):
    asked = with_memory(request(TEXT_ONLY, num_gpus=4 * NUM_NODES, micro_batch_size=1), memory_gb)
    return Reconfigurer(plan_templates(asked, fault_tolerance=fault_tolerance), 25e9, horizon_seconds=horizon)


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
    assert len(found.pipelines) > one.templates.fault_tolerance
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
        if len(lost) <= one.templates.fault_tolerance:
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
    ],
)
def test_a_smaller_template_a_borrowed_node_and_a_merged_pipeline(left, num_joined, how, sizes):
    """Oobleck, Figure 2.8, with templates of 2 nodes and more."""
    one = reconfigurer()
    assert one.templates.least_nodes == 2
    found = change_least(one.templates, left, num_joined)
    assert found is not None and (found[0], sorted(found[1])) == (how, sizes)


def test_the_three_steps_give_up_where_they_would_leave_too_few_replicas():
    assert change_least(reconfigurer().templates, [1, 3], 0) == ("borrow", (2, 2))
    assert change_least(reconfigurer().templates, [1, 2], 0) is None
    assert change_least(reconfigurer().templates, [0, 7], 0) is None


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
    pipelines = (Pipeline(tuple(range(4)), 12), Pipeline(tuple(range(4, 9)), 12))
    held = held_layers(one, pipelines)
    owners = [node for node in held if 0 in held[node]]
    found = one.reconfigure(pipelines, lost=owners)
    assert 0 in found.missing_layers
    check(one, pipelines, owners, (), found)


def test_copies_are_spread_over_those_that_have_a_layer():
    wanted = {0: [0, 1], 1: [0, 1], 2: [0, 1], 3: [0, 1]}
    copies, missing = deal_copies(wanted, {0: [0, 1], 1: [0, 1]}, [100, 100])
    assert not missing and len(copies) == 4
    assert sorted(copy.source for copy in copies) == [0, 0, 1, 1]
    assert copy_seconds(copies, bytes_per_second=100.0) == 2.0
    assert deal_copies({0: [0]}, {1: [1]}, [5, 5]) == ((), (0,))
