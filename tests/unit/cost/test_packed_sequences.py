"""How many sequences a microbatch packs: counted with its tokens, and paid for where a profile has measured it."""

import pytest

from megatron.runtime.orchestrator.profile_layers import packed_sizes, sizes_between
from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.seconds.layer_costs import LayerCosts
from multimodal.cost.seconds.layer_curves import LayerCurves, PackedSize, Quadratic
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.cost.unit_load import UnitLoad, add_loads, item_load, sample_load
from multimodal.plan.colocated import plan_colocated
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.cost.cost_cases import EVEN_CLUSTER, graph_of

GRAPH = graph_of()
CURVES = LayerCurves(
    Quadratic(1.0, 0.1, 0.01, 4.0), Quadratic(2.0, 0.2, 0.02, 5.0), Quadratic(3.0, 0.3), Quadratic(0.5, 0.0, 0.01, 0.25)
)
COSTS = LayerCosts(GRAPH, EVEN_CLUSTER, 512, LayerProfile("CPU", "float32", {("llm", "transformer", 1, 1): CURVES}))


def test_sequences_add_up_over_items_and_samples() -> None:
    items = (ItemLengths("vision", 10, 5), ItemLengths("vision", 20, 10))
    samples = [SampleLengths(0, items, 7, 3), SampleLengths(1, (), 9, 9)]
    assert sample_load(GRAPH.unit("vision"), samples[0]) == UnitLoad(30, 500, 15, 2)
    assert sample_load(GRAPH.unit("vision"), samples[1]) == UnitLoad()
    assert sample_load(GRAPH.unit("llm"), samples[0]).num_sequences == 1
    atoms = {"vision": (((Atom(0, 0), Atom(0, 1)), ()),), "llm": (((Atom(0), Atom(1)),),)}
    assignment = Assignment(atoms)
    plan = plan_colocated(GRAPH, sizes={}, world_size=1)
    loads = AssignedLoads(assignment.shape(GRAPH, plan), assignment, samples)
    assert [load.all.num_sequences for load in loads.computed("llm")] == [2]
    assert [load.all.num_sequences for load in loads.computed("vision")] == [2, 0]


def test_every_packed_sequence_costs_what_was_measured() -> None:
    whole, packed = item_load(100, 0), add_loads([item_load(50, 0)] * 2)
    one, two = (COSTS.seconds("llm", "transformer", load) for load in (whole, packed))
    assert two.forward - one.forward == pytest.approx(4.0 - 0.01 * 5000)
    assert two.input_gradient - one.input_gradient == pytest.approx(5.0 - 0.02 * 5000)
    assert two.weight_gradient == one.weight_gradient
    repeated = [COSTS.seconds("llm", "transformer", packed, recompute=recompute) for recompute in ("selective", "full")]
    assert repeated[0].input_gradient - two.input_gradient == pytest.approx(0.5 + 0.01 * 5000 + 2 * 0.25)
    assert repeated[1].input_gradient - two.input_gradient == pytest.approx(two.forward)


def test_more_ranks_share_tokens_but_not_the_calls_for_each_sequence() -> None:
    found = COSTS.curves("llm", "transformer", tensor_parallel_size=2, context_parallel_size=1).forward
    assert found == Quadratic(1.0, 0.05, 0.005, 4.0)


def test_profiled_sizes_are_packed_evenly() -> None:
    assert packed_sizes([16, 100], (1, 8)) == (PackedSize(16), PackedSize(100), PackedSize(96, 8))
    assert packed_sizes([32], (8,)) == (PackedSize(32, 8),) and PackedSize(32, 8).num_squared == 8 * 4**2
    held_out = sizes_between([64, 256, 1024], (1, 4, 16))
    assert held_out == tuple(PackedSize(tokens, count) for tokens in (128, 512) for count in (1, 2, 8))
    assert not set(held_out) & set(packed_sizes([64, 256, 1024], (1, 4, 16)))
