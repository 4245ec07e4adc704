"""What steps take beside their layers: measured by a profile, or the optimizer's bytes over the memory bandwidth."""

from dataclasses import replace

import pytest

from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.pieces.stage_costs import update_traffic_bytes
from multimodal.cost.run_options import RunOptions
from multimodal.cost.seconds.layer_curves import LayerCurves, Quadratic
from multimodal.cost.seconds.layer_profile import LayerProfile, StepProfile
from multimodal.plan.colocated import plan_colocated
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.action import Action, ActionKind
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.cost.cost_cases import EVEN_CLUSTER, graph_of

GRAPH = graph_of()
CURVES = LayerCurves(Quadratic(), Quadratic(), Quadratic())
STEP = StepProfile(seconds=1.0, computation_seconds=0.25, unit_update_seconds=0.5, weight_update_seconds=1e-4)
SAMPLES = (SampleLengths(0, (ItemLengths("vision", 8, 8),), 8, 8), SampleLengths(1, (), 8, 8))
ALONE = plan_colocated(GRAPH, sizes={}, world_size=1)


def weights(unit: str, layers: range) -> int:
    described = GRAPH.unit(unit)
    return sum(describe_layer(GRAPH, described, described.layers[layer], vocab_size=512).num_weights for layer in layers)


def costs(
    plan: Plan, *, profile: LayerProfile | None = None, cluster: Cluster = EVEN_CLUSTER, options: RunOptions | None = None
) -> ModelCosts:
    assignment = Assignment({"vision": (((Atom(0, 0),), ()),), "llm": (((Atom(0),), (Atom(1),)),)})
    return ModelCosts(assignment.shape(GRAPH, plan), assignment, SAMPLES, cluster, 512, options or RunOptions(), profile)


def profile_of(graph_unit: str = "llm") -> LayerProfile:
    return LayerProfile("CPU", "float32", {(graph_unit, "transformer", 1, 1): CURVES}, STEP)


def test_every_forward_and_backward_pays_for_the_runtime_but_no_weight_gradient() -> None:
    plain, with_step = costs(ALONE, profile=replace(profile_of(), step=StepProfile())), costs(ALONE, profile=profile_of())

    def more(kind: ActionKind, unit: str, microbatch: int) -> float:
        action = Action(kind, unit, 0, 0, microbatch)
        return with_step.compute(action).seconds - plain.compute(action).seconds

    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
        assert more(kind, "llm", 1) == pytest.approx(0.25)
    assert more(ActionKind.WEIGHT_GRADIENT, "llm", 1) == 0.0
    assert more(ActionKind.FORWARD, "vision", 0) == pytest.approx(0.25)
    assert more(ActionKind.FORWARD, "vision", 1) == 0.0, "nothing runs for an empty microbatch"


def test_the_slowest_rank_decides_how_long_an_update_takes() -> None:
    own = plan_disaggregated(
        GRAPH, sizes={"llm": UnitSizes(pipeline_parallel_size=2), "vision": UnitSizes(data_parallel_size=1)}, world_size=3
    )
    stages = [weights("llm", stage.layers) for stage in own.units["llm"].replicas[0].virtual_stages]
    heaviest = max(*stages, weights("vision", range(len(GRAPH.unit("vision").layers))))
    assert costs(own, profile=profile_of()).update_seconds == pytest.approx(1.0 + 0.5 + 1e-4 * heaviest)
    everything = sum(weights(unit.name, range(len(unit.layers))) for unit in GRAPH.units)
    assert costs(ALONE, profile=profile_of()).update_seconds == pytest.approx(1.0 + 2 * 0.5 + 1e-4 * everything)


@pytest.mark.parametrize(("zero_stage", "share"), [(0, 1), (1, 2), (3, 2)])
def test_replicas_that_share_an_optimizer_update_a_share(zero_stage: int, share: int) -> None:
    plan = plan_colocated(GRAPH, sizes={"llm": UnitSizes(tensor_parallel_size=2)}, world_size=4)
    found = costs(plan, profile=profile_of(), options=RunOptions(zero_stage=zero_stage)).update_seconds
    vision, llm = (weights(unit.name, range(len(unit.layers))) for unit in GRAPH.units)
    replicas = {"vision": 4 if share > 1 else 1, "llm": share}
    assert found == pytest.approx(1.0 + 2 * 0.5 + 1e-4 * (vision / replicas["vision"] + llm / 2 / replicas["llm"]))


def test_several_copies_of_the_state_are_shared_by_fewer() -> None:
    plan = plan_colocated(GRAPH, sizes={"llm": UnitSizes(tensor_parallel_size=2)}, world_size=4)
    vision, llm = (weights(unit.name, range(len(unit.layers))) for unit in GRAPH.units)
    for copies, of_vision, of_llm in ((1, 4, 2), (2, 2, 1), (3, 1, 1)):
        found = costs(plan, profile=profile_of(), options=RunOptions(num_state_copies=copies))
        assert found.update_seconds == pytest.approx(1.0 + 2 * 0.5 + 1e-4 * (vision / of_vision + llm / 2 / of_llm))
        state = 12 * (vision / of_vision + llm / 2 / of_llm) + 6 * (vision + llm / 2)  # bf16 weights and fp32 gradients are whole
        assert sum(found.memory.weight_bytes((unit, 0, 0)) for unit in ("vision", "llm")) == pytest.approx(state)


def test_what_is_frozen_is_not_updated() -> None:
    frozen = replace(GRAPH, units=tuple(replace(unit, freeze_module=True, freeze_projector=True) for unit in GRAPH.units))
    trained = costs(ALONE, profile=profile_of())
    assert replace(trained, shape=replace(trained.shape, graph=frozen)).update_seconds == 1.0


def test_without_a_profile_an_update_moves_bytes() -> None:
    assert costs(ALONE).update_seconds == 0.0, "the cluster says no bandwidth"
    fast = replace(EVEN_CLUSTER, memory_bandwidth_gbytes_per_second=1000.0)
    everything = sum(weights(unit.name, range(len(unit.layers))) for unit in GRAPH.units)
    # bf16: the fp32 gradient four times, master weight and two moments there and back, the weight once
    moved = pytest.approx(everything * (16 + 24 + 2) / 1e12)
    assert costs(ALONE, cluster=fast).update_seconds == moved
    assert costs(ALONE, cluster=fast, profile=replace(profile_of(), step=None)).update_seconds == moved
    assert update_traffic_bytes(4) == 16 + 16 + 8 and update_traffic_bytes(8) == 2 * update_traffic_bytes(4)
