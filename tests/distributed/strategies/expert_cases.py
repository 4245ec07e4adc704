"""Random cases of an LLM whose replicas share experts."""

from hypothesis import assume
from hypothesis import strategies as st

from multimodal.balance.placement import even_out_replicas
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.expert_groups import check_expert_groups
from multimodal.schedule.passes import Pass
from multimodal.schedule.passes.fill import fill
from multimodal.schedule.passes.gather_parameters import gather_parameters
from multimodal.schedule.passes.reduce_by_layer import reduce_by_layer
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.errors import ScheduleError
from multimodal.values.plan import Replica, Stage, UnitPlan
from multimodal.values.shape import StepShape
from tests.distributed.gradient_case import GradientCase
from tests.distributed.random_source import RandomSource
from tests.distributed.schedule_rewrites import SplitStages
from tests.distributed.strategies.assignments import assignments
from tests.distributed.strategies.graphs import graphs
from tests.distributed.strategies.plans import MAX_RANKS, layer_ranges, plans, renumber
from tests.distributed.strategies.samples import VOCAB_SIZE, samples


@st.composite
def expert_cases(draw: st.DrawFn) -> GradientCase:
    """An LLM whose replicas share experts: two or four to a group, beside encoders and generators anywhere."""
    graph = draw(graphs(has_experts=True))
    plan = draw(plans(graph, has_unlike_replicas=False))
    dp, pp, tp, cp = draw(
        st.sampled_from([(2, 1, 1, 1), (2, 2, 1, 1), (2, 2, 2, 1), (4, 1, 1, 1), (4, 2, 1, 1), (2, 1, 1, 2), (2, 1, 2, 2)])
    )
    ranges, size = draw(layer_ranges(len(graph.backbone.layers), pp)), tp * cp
    ranks = draw(st.permutations(range(MAX_RANKS)))
    of_stages = [sorted(ranks[stage * dp * size : (stage + 1) * dp * size]) for stage in range(pp)]  # in the order of replicas
    stages = [
        tuple(Stage(tuple(of_stages[each][replica * size : (replica + 1) * size]), ranges[each]) for each in range(pp))
        for replica in range(dp)
    ]
    experts = draw(st.sampled_from([2, dp]))
    llm = UnitPlan(tuple(map(Replica, stages)), tp, cp, expert_parallel_size=experts)
    plan = renumber({name: llm if name == "llm" else unit for name, unit in plan.units.items()})
    source = RandomSource(graph, draw(samples((*graph.item_encoders, *graph.generators))), VOCAB_SIZE)
    assignment = draw(assignments(graph, plan, source))
    builder = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
    chosen = draw(st.sampled_from([(), (gather_parameters,), (reduce_by_layer,), (SplitStages(0),), (fill, split_backward)]))
    # Others are refused: where encoders and replicas of the LLM wait for each other in a circle, or orders differ (zb-h1).
    shape = even_out_replicas(assignment, plan=plan).shape(graph, plan)
    assume(_keeps_experts_together(builder, shape, chosen))
    return GradientCase(
        graph,
        plan,
        assignment,
        source,
        builder=builder,
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from([None, "selective", "full"])),
        passes=chosen,
    )


def _keeps_experts_together(builder: str, shape: StepShape, passes: tuple[Pass, ...]) -> bool:
    try:
        check_expert_groups(build_schedule(BUILDERS[builder], shape, passes=passes))
    except ScheduleError:
        return False
    return True
