"""One point of a planner's search: unit layouts, and the units that share ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from multimodal.plan.planners.estimate.memory_estimate import stage_bytes, working_bytes
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, build_unit
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, plain_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.validate import validate_plan

Groups = tuple[tuple[str, ...], ...]
"""Groups of units that share ranks."""


@dataclass(frozen=True)
class Candidate:
    """A plan before ranks are assigned."""

    layouts: Mapping[str, UnitLayout]
    groups: Groups = ()
    """Units that share ranks; a unit in no group has ranks of its own."""

    @property
    def all_groups(self) -> Groups:
        """Return groups such that every unit is in exactly one."""
        grouped = {unit for group in self.groups for unit in group}
        return (*self.groups, *((unit,) for unit in self.layouts if unit not in grouped))

    @property
    def first_ranks(self) -> Mapping[str, int]:
        """Unit -> the first of its ranks; the group with the largest stages (tp x cp) comes first.

        With sizes that divide a node, no tensor parallel group then spans two nodes. Other sizes are sorted by tp.
        """
        groups, layouts = self.all_groups, self.layouts
        whole = {group: max(layouts[unit].size.num_ranks for unit in group) for group in groups}
        tensor = {group: max(layouts[unit].size.tensor for unit in group) for group in groups}
        keys = tensor if any(larger % smaller for smaller, larger in pairwise(sorted(whole.values()))) else whole
        first_rank, firsts = 0, {}
        for group in sorted(groups, key=lambda group: -keys[group]):
            firsts.update(dict.fromkeys(group, first_rank))
            first_rank += max(layouts[unit].num_ranks for unit in group)
        return firsts

    @property
    def num_gpus(self) -> int:
        """Total number of ranks."""
        return sum(max(self.layouts[unit].num_ranks for unit in group) for group in self.all_groups)

    @property
    def virtual_stages(self) -> int:
        """Most layer ranges that a stage holds."""
        return max(layout.virtual_stages for layout in self.layouts.values())

    @property
    def schedule(self) -> str:
        """The simplest builder that fits the layouts."""
        return plain_schedule(has_virtual_stages=self.virtual_stages > 1)

    def build_plan(self, graph: ModelGraph) -> Plan:
        """Give each group ranks of its own, in Megatron's order; raises PlanError if its units differ in number of ranks."""
        for group in self.groups:
            counts = {unit: self.layouts[unit].num_ranks for unit in group}
            if len(set(counts.values())) != 1:
                raise PlanError(f"units that share ranks must use all of them, found {counts}; change a size")
        firsts = self.first_ranks
        return Plan({name: build_unit(self.layouts[name], first_rank=firsts[name]) for name in graph.unit_names})

    def to_run(
        self, request: PlanningRequest, *, seconds: float, balance: str = "none", schedule: str | None = None
    ) -> PlannedRun:
        """Return the planner's answer; seconds: its estimate of a step."""
        plan = self.build_plan(request.graph)
        return build_run(request, plan, schedule=schedule or self.schedule, seconds=seconds, balance=balance)

    def unit_microbatches(self, request: PlanningRequest, unit: str) -> int:
        """Return the microbatches of the unit's busiest replica; each unit has one per LLM microbatch, dealt to its replicas."""
        return -(-request.num_microbatches // self.layouts[unit].data_parallel_size)

    def samples_in_flight(self, request: PlanningRequest, unit: str, stage_index: int, *, schedule: str | None = None) -> float:
        """Return the samples whose activations a stage keeps under a schedule, by default the candidate's.

        Under 1F1B (interleaved if it has several layer ranges), stage s of P keeps P - s microbatches, plus those that keep the
        downstream units full: an encoder keeps as many of its microbatches as the LLM has in flight, the units upstream of a
        generator as many as the generator. See `forward_limits` in schedule/builders.
        """
        layout, row = self.layouts[unit], BUILDERS[schedule or self.schedule]
        depth, chunks = layout.pipeline_parallel_size, layout.virtual_stages
        fills = row.only_encoders_keep_more and request.graph.unit(unit).role is Role.ENCODER
        is_plain = fills or chunks == 1
        own = depth - stage_index if is_plain else (2 * (depth - stage_index - 1) + (chunks - 1) * depth + 1) / chunks
        behind = self._in_flight_downstream(request.graph, unit) / layout.data_parallel_size
        factor = row.in_flight if fills or not row.only_encoders_keep_more else 1.0
        return request.default_micro_batch_size * min(factor * (own + behind), self.unit_microbatches(request, unit))

    def _in_flight_downstream(self, graph: ModelGraph, unit: str) -> float:
        """Return the microbatches that units downstream keep in flight, over all their replicas."""
        targets = [(self.layouts[target], target) for target in graph.downstream(unit)]
        counts = (
            each.pipeline_parallel_size * each.data_parallel_size + self._in_flight_downstream(graph, target)
            for each, target in targets
        )
        return max(counts, default=0.0)

    def fits(self, request: PlanningRequest, *, schedule: str | None = None) -> bool:
        """Return True if the estimated peak under a schedule, by default the candidate's, is within the planned memory."""
        if not request.allows_num_gpus(self.num_gpus):
            return False
        peaks, working = {}, {}
        for unit, layout in self.layouts.items():
            stages = range(layout.pipeline_parallel_size)
            samples = [self.samples_in_flight(request, unit, stage, schedule=schedule) for stage in stages]
            peaks[unit] = max(stage_bytes(request, unit, layout, stage, num_samples=each) for stage, each in enumerate(samples))
            working[unit] = working_bytes(request, unit, layout.size)
        return all(
            sum(peaks[unit] for unit in group) + max(working[unit] for unit in group) <= request.planned_memory_bytes
            for group in self.all_groups
        )


def build_run(request: PlanningRequest, plan: Plan, *, schedule: str, seconds: float, balance: str = "none") -> PlannedRun:
    """Return a run of a plan with the request's options, as far as these change anything in it, and those of its schedule."""
    overlaps = request.tp_comm_overlap and any(max(unit.tensor_sizes) > 1 for unit in plan.units.values())
    has_copies = any(unit.data_parallel_size * unit.context_parallel_size > 1 for unit in plan.units.values())
    if overlaps != request.tp_comm_overlap or (request.zero_stage == 3 and not has_copies):
        request = request.changed(tp_comm_overlap=overlaps, sharding=request.sharding if has_copies else "optim")
    passes, llm = request.passes(plan), request.graph.backbone.name
    if request.expert_parallel_size is not None:
        plan = Plan({**plan.units, llm: replace(plan.units[llm], expert_parallel_size=request.expert_parallel_size)})
    validate_plan(plan, graph=request.graph, world_size=plan.num_ranks)
    return PlannedRun(
        plan,
        schedule=schedule,
        passes=passes,
        balance=balance,
        micro_batch_size=request.default_micro_batch_size,
        recompute=request.recompute,
        transformer_impl=request.implementation(schedule),
        tp_comm_overlap=request.tp_comm_overlap,
        sharding=request.sharding or "optim",
        num_state_copies=request.num_state_copies if has_copies else None,
        objective_seconds=seconds,
    )
