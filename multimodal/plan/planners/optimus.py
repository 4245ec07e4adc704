"""Optimus: encoders on the LLM's ranks, with their own parallelism, compute in the bubbles of its pipeline (Optimus 4.1)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from multimodal.balance.encoder_pipelines import keep_beside_llm
from multimodal.plan.planners import allowed_sizes
from multimodal.plan.planners.estimate.candidate import Candidate, build_run
from multimodal.plan.planners.estimate.step_estimate import exposed_reduction_seconds
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, balanced_layout, even_layout, layer_times, stage_times
from multimodal.plan.planners.estimate.unit_options import infeasible
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.plan.planners.search.plan_to_fit import PredictedRun
from multimodal.plan.planners.search.run_variants import climb, other_partitions, with_first_balance
from multimodal.plan.planners.search.trials import simulate_run
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Role, Unit

SCHEDULES = ("optimus", "optimus-lean", "nested")
"""Each keeps fewer activations than the one before it, and is used if that one does not fit."""
LLM_LAYERS_PER_RANGE = (1, 2, 3, 4, 6)
"""Layers per range of the LLM's virtual stages that are tried, in addition to one range per stage; equal ranges wait least."""
LAYERS_PER_RANGE = 4
"""Layers that an encoder computes at a time in all its first plans."""
OTHER_LAYERS_PER_RANGE = (1, 2, 12)
"""The same for the best plan: fewer layers fit into more bubbles, more send fewer messages."""
NUM_LLM_PLANS = 4
"""Plans of the LLM with room for encoders whose best encoder plans are simulated."""
MOST_LLM_PLANS = 64
"""Plans of the LLM that are examined, with or without room for encoders."""
NUM_ENCODER_PLANS = 2
"""Encoder plans that are simulated for each plan of the LLM."""
ALIKE = 2
"""Most examined plans of the LLM that differ only in dp and in layer ranges."""
MOST_TRIED = 24
"""Partitions of a plan that are simulated."""


@dataclass(frozen=True)
class _Scored:
    """Layouts of the LLM and of generators, or of all units, and the estimated seconds of a step."""

    candidate: Candidate
    seconds: float
    schedule: str = SCHEDULES[0]


def plan_optimus(request: PlanningRequest) -> PlannedRun:
    """Plan the LLM alone, then separate encoder plans over all of its ranks (Optimus 4.1), and let simulation decide.

    An encoder's tp and pp divide the LLM's. The plans of the LLM with the shortest steps by a closed form are examined in turn;
    for each, all encoder plans that fit into the memory are estimated (4.5), and the best ones are simulated with the schedule
    that fills the bubbles. In the best plan, microbatches move between the encoder pipelines while that shortens the step
    (`other_partitions`). Generators have the LLM's sizes and ranks. Raises PlanError if nothing fits, or if fixed sizes do not
    divide the LLM's.
    """
    search = _Search(request)
    found = search.simulate(search.promising())
    if not found:
        raise infeasible(request)
    best = min(found, key=lambda each: each[0].key)
    found += search.simulate(search.other_ranges(best[1]))
    best_even, _ = min(found, key=lambda each: each[0].key)
    num_even = search.num_simulated
    near = partial(other_partitions, request=request)
    (run, prediction), _ = climb(best_even, near=near, judge=lambda run, _: search.predict(run), most=MOST_TRIED)
    notes = (
        f"{search.num_looked_at} plans of the LLM looked at, {len(found)} with plans of the encoders simulated; "
        f"{search.num_simulated - num_even} other partitions of the best one's microbatches",
    )
    return replace(run, objective_seconds=prediction.iteration_seconds, nominal_seconds=search.nominal_seconds, notes=notes)


class _Search:
    """The search for one request."""

    def __init__(self, request: PlanningRequest) -> None:
        self.request, self.graph = request, request.graph
        self.num_looked_at = self.num_simulated = 0
        self.nominal_seconds = 0.0
        _check_sizes(request)

    def promising(self) -> Iterator[_Scored]:
        """Yield the best encoder plans for the most promising plans of the LLM with room for any."""
        kinds = Counter[tuple[object, ...]]()
        for plan in sorted(self._llm_plans(), key=lambda each: (each.seconds, each.candidate.num_gpus)):
            layout = plan.candidate.layouts[self.graph.backbone.name]
            kind = layout.size, layout.pipeline_parallel_size
            if kinds[kind] == ALIKE:
                continue
            self.num_looked_at += 1
            best = self._encoder_plans(plan.candidate)[:NUM_ENCODER_PLANS]
            kinds[kind] += bool(best)
            yield from best
            if kinds.total() == NUM_LLM_PLANS or self.num_looked_at == MOST_LLM_PLANS:
                return

    def _llm_plans(self) -> Iterator[_Scored]:
        """Yield the layouts of the LLM and of generators, with a step that no encoder plan can shorten much."""
        request, backbone = self.request, self.graph.backbone
        following = [unit for unit in self.graph.units if unit.role is not Role.ENCODER]
        # Of each rank if all encoders are spread over all ranks, at the sizes that wait least.
        encoding_seconds = 0.0
        for unit in (unit.name for unit in self.graph.encoders):
            sizes = allowed_sizes.tensor_parallel_sizes(request, unit)
            encoding_seconds += min(size * sum(layer_times(request, unit, StageSize(size)).total) for size in sizes)
        encoding_seconds *= request.num_microbatches
        data_sizes = allowed_sizes.data_parallel_sizes(request, backbone.name)
        sizes_of_stages = allowed_sizes.stage_sizes(request, backbone.name)
        for size, pipeline in product(sizes_of_stages, allowed_sizes.pipeline_parallel_sizes(request, backbone.name)):
            ranks = size.num_ranks * pipeline
            for data in allowed_sizes.largest_fitting(data_sizes, gpus_per_replica=ranks, num_gpus=request.num_gpus):
                for virtual in self._virtual_stages(pipeline):
                    layouts = {unit.name: self._cut(unit, size, data, pipeline, virtual) for unit in following}
                    whole = {name: layout for name, layout in layouts.items() if layout is not None}
                    if len(whole) == len(layouts):
                        candidate = self._candidate(whole)
                        yield _Scored(candidate, self._seconds(candidate, encoding_seconds / candidate.num_gpus))

    def _virtual_stages(self, pipeline: int) -> list[int]:
        """Return the numbers of layer ranges per stage of the LLM to try; only 1 without a pipeline."""
        backbone = self.graph.backbone
        if fixed := self.request.fixed(backbone.name).virtual_pipeline_size:
            return [fixed] if pipeline > 1 or fixed == 1 else []
        counts = {backbone.num_inner_layers // (pipeline * layers) for layers in LLM_LAYERS_PER_RANGE}
        return sorted({1, *(count for count in counts if count and pipeline > 1)})

    def _cut(self, unit: Unit, size: StageSize, data: int, pipeline: int, virtual: int) -> UnitLayout | None:
        """Cut the LLM's or a generator's layers by their times; None if there are too few, or other sizes are fixed.

        A module of transformers or diffusers, which is one piece, has a replica on every rank.
        """
        fixed = self.request.fixed(unit.name)
        if unit.module is not None:
            size, data, pipeline = StageSize(1), data * size.num_ranks * pipeline, 1
        count = pipeline * (virtual if unit.role is Role.BACKBONE else 1)
        given = (fixed.tensor_parallel_size, fixed.context_parallel_size, fixed.pipeline_parallel_size, fixed.data_parallel_size)
        agrees = all(each in (None, own) for each, own in zip(given, (*size, pipeline, data), strict=True))
        if not agrees or count > unit.num_inner_layers:
            return None
        return balanced_layout(self.request, unit, size, data=data, num_stages=pipeline, virtual_stages=count // pipeline)

    def _candidate(self, layouts: Mapping[str, UnitLayout]) -> Candidate:
        ordered = {name: layouts[name] for name in self.graph.unit_names if name in layouts}
        return Candidate(ordered, (tuple(ordered),))

    def _seconds(self, candidate: Candidate, encoding_seconds: float) -> float:
        """Return the seconds of a step: the LLM's work, plus its bubbles or the work that fills them, whichever is longer.

        The first encoder forward and last backward are in no bubble: the first stage waits for one, nothing follows the other.
        """
        encoders = {unit.name for unit in self.graph.encoders}
        ends = slowest = bubbles = reducing = 0.0
        for name, layout in candidate.layouts.items():
            times_of = partial(stage_times, self.request, name, layout.size)
            stages = times_of(layout.stages)
            reducing = max(reducing, exposed_reduction_seconds(self.request, name, layout, stage_seconds=max(stages)))
            if name in encoders:
                ends = max(ends, sum(stages))
                continue
            rounds = [times_of([(each,) for each in ranges]) for ranges in zip(*layout.stages, strict=True)]
            slowest += sum(map(max, rounds))  # in a full pipeline all stages change ranges together
            bubbles += (sum(stages) - max(stages)) / layout.virtual_stages
        llm = self.graph.backbone.name
        count = candidate.unit_microbatches(self.request, llm)
        if count < candidate.layouts[llm].pipeline_parallel_size:  # nothing to interleave
            bubbles *= candidate.layouts[llm].virtual_stages
        return count * slowest + max(bubbles + ends, encoding_seconds) + reducing

    def _encoder_plans(self, llm: Candidate) -> list[_Scored]:
        """Return all encoder plans that fit beside a plan of the LLM, the shortest step first."""
        layouts = [list(self._encoder_layouts(llm.layouts[self.graph.backbone.name], unit)) for unit in self.graph.encoders]
        names = [unit.name for unit in self.graph.encoders]
        found = []
        for combination in product(*layouts):
            candidate = self._candidate({**llm.layouts, **dict(zip(names, combination, strict=True))})
            schedule = next((name for name in SCHEDULES if candidate.fits(self.request, schedule=name)), None)
            if schedule:
                encoding = 0.0  # seconds on the busiest ranks
                for name in names:
                    layout = candidate.layouts[name]
                    busiest = max(stage_times(self.request, name, layout.size, layout.stages))
                    encoding += busiest * candidate.unit_microbatches(self.request, name)
                found.append(_Scored(candidate, self._seconds(candidate, encoding), schedule))
        return sorted(found, key=lambda each: each.seconds)

    def _encoder_layouts(self, llm: UnitLayout, unit: Unit) -> Iterator[UnitLayout]:
        """Yield the layouts over all of the LLM's ranks whose tp and pp divide the LLM's, those with few stages first (4.5)."""
        request, fixed = self.request, self.request.fixed(unit.name)
        pipelines = allowed_sizes.pipeline_parallel_sizes(request, unit.name)
        for pipeline, tensor in product(pipelines, allowed_sizes.tensor_parallel_sizes(request, unit.name)):
            size = StageSize(tensor, fixed.context_parallel_size or 1)
            divides = llm.pipeline_parallel_size % pipeline == 0 and llm.size.num_ranks % size.num_ranks == 0
            data = llm.num_ranks // (size.num_ranks * pipeline)
            if divides and fixed.data_parallel_size in (None, data):
                virtual = fixed.virtual_pipeline_size or self._num_ranges(unit, llm, pipeline, LAYERS_PER_RANGE)
                if virtual * pipeline <= unit.num_inner_layers:
                    yield even_layout(unit, size, data, pipeline, virtual)

    @staticmethod
    def _num_ranges(unit: Unit, llm: UnitLayout, pipeline: int, layers_per_range: int) -> int:
        """Return the layer ranges of an encoder's stage: one if there is no pipeline with bubbles to fill."""
        return max(1, unit.num_inner_layers // (pipeline * layers_per_range)) if llm.pipeline_parallel_size > 1 else 1

    def other_ranges(self, best: _Scored) -> Iterator[_Scored]:
        """Yield the plan with finer and coarser layer ranges of the encoders."""
        llm = best.candidate.layouts[self.graph.backbone.name]
        tried = [best.candidate]
        for layers in OTHER_LAYERS_PER_RANGE:
            layouts = dict(best.candidate.layouts)
            for unit in self.graph.encoders:
                old = layouts[unit.name]
                stages = old.pipeline_parallel_size
                if self.request.fixed(unit.name).virtual_pipeline_size is None:
                    virtual = self._num_ranges(unit, llm, stages, layers)
                    layouts[unit.name] = even_layout(unit, old.size, old.data_parallel_size, stages, virtual)
            candidate = self._candidate(layouts)
            if candidate not in tried:
                tried.append(candidate)
                yield replace(best, candidate=candidate)

    def simulate(self, plans: Iterable[_Scored]) -> list[tuple[PredictedRun, _Scored]]:
        """Return the runs of plans whose simulated memory fits, with a schedule that keeps less if one does not fit."""
        found = []
        for each in plans:
            schedules = SCHEDULES[SCHEDULES.index(each.schedule) :]
            runs = {run.key: run for run in (self._run(replace(each, schedule=name)) for name in schedules)}
            predicted = next(filter(None, map(self.predict, runs.values())), None)
            if predicted is not None:
                found.append((predicted, each))
        return found

    def predict(self, run: PlannedRun) -> PredictedRun | None:
        """Simulate a run; None if it is impossible, or does not fit the memory."""
        predicted, nominal = simulate_run(run, self.request)
        self.nominal_seconds += nominal
        self.num_simulated += 1
        return predicted

    def _run(self, scored: _Scored) -> PlannedRun:
        request, candidate = self.request, scored.candidate
        plan = keep_beside_llm(candidate.build_plan(self.graph), self.graph)
        fills = self.graph.encoders and not plan.is_whole_on_every_rank
        schedule = scored.schedule if fills else candidate.schedule
        return with_first_balance(build_run(request, plan, schedule=schedule, seconds=scored.seconds), request)


def _check_sizes(request: PlanningRequest) -> None:
    """Raise PlanError if the fixed sizes of an encoder cannot divide the LLM's."""
    llm = request.fixed(request.graph.backbone.name)
    for unit in request.graph.encoders:
        own = request.fixed(unit.name)
        for name, mine, whole in (
            ("tensor", own.tensor_parallel_size, llm.tensor_parallel_size),
            ("pipeline", own.pipeline_parallel_size, llm.pipeline_parallel_size),
        ):
            if mine and whole and whole % mine:
                fitting = ", ".join(str(each) for each in range(1, whole + 1) if whole % each == 0)
                raise PlanError(
                    f"unit '{unit.name}': {name} parallel size {mine} is fixed, but its pipelines lie inside the LLM's, so it "
                    f"must divide the LLM's {whole}; fix one of {fitting}, or take another planner"
                )
