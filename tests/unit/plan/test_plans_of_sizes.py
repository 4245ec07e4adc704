"""Plans from sizes: units on ranks of their own or on all ranks, virtual stages, and groups inside nodes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from multimodal.plan.plans_of_sizes import UnitSizes, describe_placement, fold_stages, plan_colocated, plan_disaggregated
from multimodal.values.model_graph import Experts, ImageInput, ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan
from multimodal.values.validate import validate_plan
from tests.unit.golden_answers import Kinds, golden_test

SHAPE = Transformer(num_layers=4, hidden_size=48, num_attention_heads=12, ffn_hidden_size=96)
VISION, AUDIO = (Unit(name, Role.ENCODER, SHAPE, ImageInput(2, 2)) for name in ("vision", "audio"))
LLM = Unit("llm", Role.BACKBONE, SHAPE)
TEXT_ONLY = ModelGraph((LLM,))
TWO = ModelGraph((VISION, LLM), (("vision", "llm"),))
THREE = ModelGraph((VISION, AUDIO, LLM), (("vision", "llm"), ("audio", "llm")))
DEEP = replace(SHAPE, num_layers=8)
"""Eight layers in each of two units, one with an underscore in its name."""
LOW_RES = ModelGraph((Unit("low_res", Role.ENCODER, DEEP), Unit("llm", Role.BACKBONE, DEEP)), (("low_res", "llm"),))


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(1, 3), st.integers(1, 3)), min_size=3, max_size=3), st.integers(0, 3)
)
def test_every_grid_is_valid_and_the_same_with_one_size_left_open(grids: list[tuple[int, int, int]], opened: int) -> None:
    sizes = {name: UnitSizes(tp, pp, 1, dp) for name, (tp, pp, dp) in zip(THREE.unit_names, grids, strict=True)}
    world_size = sum(tp * pp * dp for tp, pp, dp in grids)
    plan = plan_disaggregated(THREE, sizes=sizes, world_size=world_size)
    validate_plan(plan, graph=THREE, world_size=world_size)
    assert sorted(rank for unit in plan.units.values() for rank in unit.ranks) == list(range(world_size))
    if opened < 3:
        name = THREE.unit_names[opened]
        tp, pp, _ = grids[opened]
        assert plan_disaggregated(THREE, sizes={**sizes, name: UnitSizes(tp, pp)}, world_size=world_size) == plan


NARROW = replace(TWO, units=(replace(VISION, projector_hidden_size=7), LLM))


def with_experts(**experts: int) -> ModelGraph:
    return ModelGraph((replace(LLM, transformer=replace(SHAPE, experts=Experts(**experts))),))


def placement(plan: Plan) -> str:
    """Return the ranks of every replica's stages, and the layers of the first one's: 0,1|2,3 / 4,5|6,7 (0-3|3-6)."""
    told = []
    for name, unit in plan.units.items():
        replicas = ("|".join(",".join(map(str, stage.ranks)) for stage in replica.stages) for replica in unit.replicas)
        stages = unit.replicas[0].stages
        layers = "|".join(",".join(f"{first}-{end}" for first, end in stage.layer_ranges) for stage in stages)
        told.append(f"{name} {' / '.join(replicas)} ({layers})")
    return "; ".join(told)


def kind(graph: ModelGraph, **document: Any) -> tuple[Any, Callable[[Any], object]]:
    """Plan units of these sizes on so many ranks, of their own or shared, and say where they lie.

    seconds: of each unit's layers; per_node: ranks of a node; is_given: the plan is as a file says; folded: stages are folded.
    """

    def read(given: dict[str, Any]) -> str:
        sizes = dict(given)
        options = {name: sizes.pop(name, None) for name in ("ranks", "shared", "seconds", "per_node", "is_given", "folded")}
        units = {name: UnitSizes(**each) for name, each in sizes.items()}
        how = {"world_size": options["ranks"], "layer_seconds": options["seconds"] or {}}
        if options["shared"]:
            plan = plan_colocated(graph, sizes=units, **how)
        else:
            plan = plan_disaggregated(graph, sizes=units, ranks_per_node=options["per_node"], **how)
        plan = fold_stages(plan) if options["folded"] else plan
        told = describe_placement(graph, plan, ranks_per_node=options["per_node"] or 4, is_given=bool(options["is_given"]))
        return " -- ".join([placement(plan), *(told if "per_node" in given else ())])

    return {"shared": False, **document}, read


SIZES_KINDS: Kinds = {
    "llm": kind(TEXT_ONLY, ranks=4),
    "vision, llm": kind(TWO, ranks=4, shared=True),
    "vision, audio, llm": kind(THREE, ranks=3, vision={"data_parallel_size": 1}, audio={"data_parallel_size": 1}),
    "low_res, llm of 8 layers": kind(LOW_RES, ranks=4, low_res={"data_parallel_size": 1}),
    "vision with a projector of 7, llm": kind(NARROW, ranks=4, shared=True),
    "llm with experts": kind(with_experts(num_experts=8), ranks=6, shared=True),
    "llm with narrow experts": kind(with_experts(num_experts=8, ffn_hidden_size=9), ranks=4, shared=True),
    "llm with a narrow shared expert": kind(with_experts(num_experts=8, shared_expert_intermediate_size=5), ranks=4, shared=True),
}
test_every_size_is_answered_as_written = golden_test("sizes.txt", SIZES_KINDS)


def test_context_parallel_ranks_stand_between_tensor_parallel_groups() -> None:
    assert str(UnitSizes(2, 1, 2, 1)) == "tp 2 x cp 2 x pp 1 x dp 1"
    llm = plan_disaggregated(TEXT_ONLY, sizes={"llm": UnitSizes(2, 1, 2)}, world_size=8).units["llm"]
    assert [llm.tensor_parallel_groups(replica.stages[0]) for replica in llm.replicas] == [((0, 1), (2, 3)), ((4, 5), (6, 7))]
    assert [llm.context_parallel_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
