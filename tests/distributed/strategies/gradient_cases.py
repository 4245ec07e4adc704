"""Random cases for the master test: anything that the runtime must get right."""

from typing import Any

from hypothesis import strategies as st

from multimodal.attention.bitfield import MaskMode
from multimodal.attention.share_tokens import TokenDistribution
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import Pass
from multimodal.schedule.passes.move_actions import defer_receives, delay_forward, fill
from multimodal.schedule.passes.reduce_by_layer import gather_parameters, reduce_by_layer
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.errors import ScheduleError
from multimodal.values.shape import StepShape
from tests.distributed.gradient_case import GradientCase
from tests.distributed.random_source import RandomSource
from tests.distributed.schedule_rewrites import CutMicrobatches, FillWithWeightGradients, SplitStages
from tests.distributed.strategies.assignments import VOCAB_SIZE, assignments, samples
from tests.distributed.strategies.graphs import graphs
from tests.distributed.strategies.plans import plans


@st.composite
def gradient_cases(
    draw: st.DrawFn,
    *,
    has_unlike_replicas: bool | None = None,
    has_encoder_edges: bool | None = None,
    has_conditions: bool | None = None,
) -> GradientCase:
    """Anything that the runtime must get right.

    has_unlike_replicas: True: in the LLM or another unit; False: in none. has_encoder_edges: whether encoders feed encoders,
    has_conditions: generators, of which there are some then.
    """
    of_graph: dict[str, Any] = {"has_encoder_edges": has_encoder_edges, "has_conditions": has_conditions}
    if has_conditions:
        of_graph |= {"encoders": [("vision",), ("vision", "audio")], "generators": [("painter",), ("painter", "engraver")]}
    graph = draw(graphs(divisor=draw(st.sampled_from([2, 2, 3])), **of_graph))
    plan = draw(plans(graph, has_unlike_replicas=has_unlike_replicas))
    source = RandomSource(graph, draw(samples((*graph.item_encoders, *graph.generators))), VOCAB_SIZE)
    assignment = draw(assignments(graph, plan, source))
    shape = assignment.shape(graph, plan)
    return GradientCase(
        graph,
        plan,
        assignment,
        source,
        builder=draw(st.sampled_from([name for name in sorted(BUILDERS) if can_build(name, shape)])),
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from([None, "selective", "full"])),
        passes=draw(passes()),
        attention_mask=draw(st.sampled_from(MaskMode)),
        attention_backend=draw(st.sampled_from(["auto", "blocks"])),
        distribution=draw(st.sampled_from(list(TokenDistribution))),
        block_size=draw(st.sampled_from([4, 8, 128])),
        num_overlapped_parts=draw(st.sampled_from([1, 3])),
    )


@st.composite
def passes(draw: st.DrawFn) -> tuple[Pass, ...]:
    """Nothing; split backwards, cut microbatches, both, weight gradients as fillers; reductions by layer; what a run may use, and
    passes that move what earlier ones made."""
    seed = draw(st.integers(0, 1000))
    split, cut, filled = SplitStages(seed), CutMicrobatches(seed), FillWithWeightGradients(seed)
    chosen: tuple[Pass, ...] = (split_backward, fill, gather_parameters)
    layered = (reduce_by_layer,), (gather_parameters, cut, reduce_by_layer)
    moving = (fill, split_backward, defer_receives), (reduce_by_layer, fill, delay_forward, split_backward)
    single: tuple[tuple[Pass, ...], ...] = ((), (split,), (cut,))
    return draw(st.sampled_from([*single, (split, filled), (split, cut, filled), (cut, split), chosen, *layered, *moving]))


def can_build(builder: str, shape: StepShape) -> bool:
    """Return True if a run may have the schedule and its builder allows the plan; most allow every plan."""
    row = BUILDERS[builder]
    if not (row.is_folded or row.fewest_encoders > 1 or not row.takes_fed_encoders):
        return True
    try:
        BUILDERS[builder](shape)
    except ScheduleError:
        return False
    return True
