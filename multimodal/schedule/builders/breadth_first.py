"""Breadth-first: all microbatches through every stage's first layer range, then through its second (Lamy-Poirier, 2022)."""

from multimodal.schedule.builders.pipeline_rounds import PipelineRounds, pipeline_rounds
from multimodal.schedule.builders.served_microbatches import served_microbatches
from multimodal.schedule.list_schedule import Policy, list_schedule
from multimodal.values.assignment import Assignment, MicrobatchPlace
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Action, ActionKind, Schedule


def build_breadth_first(graph: ModelGraph, plan: Plan, assignment: Assignment, *, forward_only: bool = False) -> Schedule:
    """Build the breadth-first schedule over the unit graph, in the compute dialect (Lamy-Poirier, arXiv 2211.05953).

    Every lane runs all its forwards, then all its backwards, and both round by round: all microbatches through a stage's first
    layer range before any goes through its second, and through what a lane holds of encoders before the LLM's share
    (`pipeline_rounds`); backwards the other way round. So the gradients of late ranges are complete long before the step ends,
    and their reduction hides behind backwards of early ones, as gathering late parameters does behind early forwards
    (`gather-parameters`). The price is the memory of `gpipe`: activations of all microbatches.

    Inside a round, microbatches go in the order in which the LLM takes them, and of one microbatch what is farthest along. No
    lane waits for the order's sake: where nothing of a round is ready, the next one begins. With P stages of v ranges and m >= P
    microbatches the bubble is (P - 1) / (v m) of the work, as of interleaved 1F1B. One unit without such ranges runs GPipe.
    """
    order = _BreadthFirst(graph, plan, assignment)
    return list_schedule(graph, plan, assignment, policy=Policy(phase=_phase, rank=order.rank), forward_only=forward_only)


def _phase(action: Action) -> int:
    return 0 if action.kind is ActionKind.FORWARD else 1


class _BreadthFirst:
    """Ranks actions of one phase."""

    def __init__(self, graph: ModelGraph, plan: Plan, assignment: Assignment) -> None:
        self.rounds: PipelineRounds = pipeline_rounds(graph, plan, assignment)
        self.served = served_microbatches(graph, assignment)
        self.position = {unit: index for index, unit in enumerate(graph.unit_names)}
        self.backbone = self.position[graph.backbone.name]

    def rank(self, action: Action) -> tuple[int, ...]:
        """Most rounds still to come first, then the LLM's microbatch that it serves, then what is farthest along."""
        first, last = self.served[MicrobatchPlace(action.unit, action.replica, action.microbatch)]
        is_upstream = self.position[action.unit] < self.backbone
        if action.kind is ActionKind.FORWARD:
            rounds_to_come, served = self.rounds.after[action[1:4]], first if is_upstream else last
            return (-rounds_to_come, served, -self.position[action.unit], -action.stage)
        rounds_to_come, served = self.rounds.before[action[1:4]], last if is_upstream else first
        return (-rounds_to_come, served, self.position[action.unit], action.stage)
