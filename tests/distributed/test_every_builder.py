"""Every builder on every kind of model, units with unequal numbers of replicas: loss and gradients of one process."""

import itertools
from dataclasses import replace

import pytest

from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_grid import fold_stages
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.schedule.builders import BUILDERS, VirtualStages
from multimodal.schedule.passes import PASSES, passes_named
from multimodal.values.assignment import Assignment
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.dealt_case import dealt_case, described, source_of, unit_plan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.rank_pool import RankPool

MODELS = {
    "one unit": ("llm",),
    "encoder and LLM": ("vision", "llm"),
    "two encoders and LLM": ("vision", "audio", "llm"),
    "encoder, LLM and generator": ("vision", "llm", "painter"),
}
V_SHAPE = (((0, 1), (3, 4)), ((1, 2), (2, 3)))


def build_case(builder: str, names: tuple[str, ...]) -> GradientCase:
    """The LLM has 2 replicas of 2 V-shaped stages; a generator has 3 replicas; encoders have 1, two of them on one rank."""
    llm = UnitPlan(tuple(Replica((Stage((r,), V_SHAPE[0]), Stage((r + 1,), V_SHAPE[1]))) for r in (0, 2)))
    encoder = unit_plan(7 if "painter" in names else 4)
    units = {"llm": llm, "painter": unit_plan(4, dp=3), "vision": encoder, "audio": encoder}
    return dealt_case(described(*names), Plan({name: units[name] for name in names}), builder=builder)


@pytest.mark.parametrize("name", sorted(PASSES))
def test_every_pass_leaves_a_generator_what_it_is(ranks: RankPool, name: str) -> None:
    case = build_case("1f1b", MODELS["encoder, LLM and generator"])
    assert_matches(replace(case, passes=passes_named(name)), ranks)


PAIRS = [",".join(pair) for pair in itertools.permutations(PASSES, 2) if pair[1] not in PASSES[pair[0]].undone_by]


@pytest.mark.deep(when=lambda names: not names.startswith("split-backward,"))  # the master test draws others
@pytest.mark.parametrize("names", PAIRS)
def test_every_pair_of_passes_keeps_the_gradients(ranks: RankPool, names: str) -> None:
    """An encoder of two stages, whose first microbatch goes to two of the LLM's, and two replicas of an LLM of two stages."""
    plan = Plan({"vision": unit_plan(0, pp=2), "llm": unit_plan(2, dp=2, pp=2)})
    case = dealt_case(described("vision", "llm"), plan, builder="1f1b", passes=passes_named(names))
    placed = {"vision": [[[(0, 0), (1, 0)], [(2, 0)]]], "llm": [[[(0, -1)], [(2, -1)], [(4, -1)]], [[(3, -1)], [(1, -1)]]]}
    assert_matches(replace(case, assignment=Assignment.from_dict(placed)), ranks)


@pytest.mark.deep(when=lambda builder, model: builder not in ("1f1b", "zb-v") and model != "encoder, LLM and generator")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("builder", sorted(BUILDERS))
def test_every_builder_trains_every_model(ranks: RankPool, builder: str, model: str) -> None:
    assert_matches(build_case(builder, MODELS[model]), ranks)


@pytest.mark.deep(when=lambda builder: builder not in ("interleaved-1f1b", "breadth-first", "zb-v"))
@pytest.mark.parametrize("builder", [name for name, row in BUILDERS.items() if row.virtual_stages is not VirtualStages.NO_USE])
def test_virtual_stages_of_every_unit_made_from_sizes(ranks: RankPool, builder: str) -> None:
    """Five layers in four ranges; three and two microbatches on two stages, so that groups are uneven, too."""
    units = described(*MODELS["encoder, LLM and generator"], num_layers=5)
    sizes = {name: UnitSizes(1, 2, 1, 2 if name == "llm" else 1, 2) for name in units}
    plan = plan_disaggregated(source_of(units).graph, sizes=sizes, world_size=8)
    assert_matches(dealt_case(units, fold_stages(plan) if BUILDERS[builder].is_folded else plan, builder=builder), ranks)
