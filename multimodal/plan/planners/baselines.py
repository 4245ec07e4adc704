"""Planners of the systems and simple baselines that papers compare with."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice, product

import numpy as np

from multimodal.cost.flops import unit_flops
from multimodal.plan.planners.allowed_sizes import (
    data_parallel_sizes,
    pipeline_parallel_sizes,
    shared_data_parallel_sizes,
    shared_stage_sizes,
)
from multimodal.plan.planners.estimate.candidate import Candidate, with_replicas
from multimodal.plan.planners.estimate.grid import cut_grid, list_shapes
from multimodal.plan.planners.estimate.step_estimate import choose_candidates, choose_near, choose_run, estimate_seconds
from multimodal.plan.planners.estimate.unit_layout import UnitLayout, even_layout
from multimodal.plan.planners.estimate.unit_options import UnitOptions, infeasible, list_options
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.plan.planners.search.trials import shortest_run
from multimodal.values.arrays.rows import Floats, Integers
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import Role, Unit

MOST_EXTRA_STAGES = 8
"""Most stages that an encoder or a generator is cut into if it does not fit into fewer."""


def plan_megatron(request: PlanningRequest, *, replicates: bool = False) -> PlannedRun:
    """Plan one grid: the same tp, cp and dp for all units, transformer layers cut evenly, one stage for every other unit.

    An encoder or a generator gets as few stages as memory allows (usually 1), and the LLM the number that makes the step
    shortest, so the baseline is as good as tuning makes it. A fixed tp, pp or dp of an encoder or a generator replaces the
    grid's. replicates: True gives every rank of an encoder's or a generator's tensor parallel group the whole unit, for other
    images (DistTrain's baseline): dp is tp times the grid's, tp is 1. Raises PlanError if nothing fits.
    """
    return choose_run(request, _megatron_grids(request, replicates=replicates))


def _megatron_grids(request: PlanningRequest, *, replicates: bool) -> Iterator[Candidate]:
    graph, backbone = request.graph, request.graph.backbone.name
    tensor_sharing = [name for name in graph.unit_names if name == backbone or not request.fixed(name).tensor_parallel_size]
    data_sharing = [name for name in graph.unit_names if name == backbone or not request.fixed(name).data_parallel_size]
    sizes = shared_stage_sizes(request, [backbone] if replicates else tensor_sharing, context_of=graph.unit_names)

    def is_even(layouts: Mapping[str, UnitLayout]) -> bool:  # every replica gets equally many microbatches
        return all(each.data_parallel_size in data_parallel_sizes(request, unit) for unit, each in layouts.items())

    data_sizes = shared_data_parallel_sizes(request, [backbone] if replicates else data_sharing)
    for extra, size in product(range(1, MOST_EXTRA_STAGES + 1), sizes):
        for pipeline in pipeline_parallel_sizes(request, backbone):
            lay_out = partial(_on_grid, request, size=size, extra=extra, pipeline=pipeline, replicates=replicates)
            llm_gpus = size.tensor * size.context * pipeline
            largest_first = [data for data in reversed(data_sizes) if data * llm_gpus <= request.num_gpus]
            grids = ({unit.name: lay_out(unit, data=data) for unit in graph.units} for data in largest_first)
            fitting = (each for each in map(Candidate, filter(is_even, grids)) if each.num_gpus <= request.num_gpus)
            yield from reversed([*islice(fitting, 2)])  # as in `largest_fitting`


def _on_grid(
    request: PlanningRequest, unit: Unit, *, size: StageSize, extra: int, pipeline: int, data: int, replicates: bool
) -> UnitLayout:
    """Lay a unit out on the grid, or as its fixed sizes say."""
    if unit.role is Role.BACKBONE:
        return even_layout(unit, size.tensor, data, pipeline, context=size.context)
    fixed = request.fixed(unit.name)
    stages = fixed.pipeline_parallel_size or min(extra, unit.num_inner_layers)
    tensor = fixed.tensor_parallel_size or (1 if replicates else size.tensor)
    copies = data * (size.tensor if replicates else 1)
    return even_layout(unit, tensor, fixed.data_parallel_size or copies, stages, context=size.context)


_VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8, 12)
"""Layer ranges per pipeline stage that are tried; Optimus' tables have 6 and 12."""


def plan_megatron_balanced(request: PlanningRequest) -> PlannedRun:
    """Plan one grid whose slowest virtual stage is as fast as the order of layers allows.

    The layers of all units, in the graph's order, form one chain, which F(l, m) = min_j max(F(j, m - 1), t_{j+1} + ... + t_l)
    cuts into pp x V virtual stages; stage s runs virtual stages s, s + pp, ... The paper does not cover several encoders; here
    they follow each other in the chain. tp, cp, pp, V and dp are those with the shortest expected step. Raises PlanError if
    nothing fits.
    """
    fixed = request.fixed(request.graph.backbone.name).virtual_stages
    grids = (
        cut_grid(request, shape, virtual_stages=virtual_stages)
        for shape, virtual_stages in product(list_shapes(request), (fixed,) if fixed else _VIRTUAL_STAGES)
        if shape.can_hold(virtual_stages)
    )
    grid, seconds = choose_near(request, grids, seconds=lambda request, grid: grid.seconds(request))[0]
    return grid.to_run(request, seconds=seconds)


_NUM_LIMITS = 64
"""Limits of the slowest stage that are tried: Alpa skips those that are too close to the one before."""


def plan_alpa(request: PlanningRequest) -> PlannedRun:
    """Minimise T = sum_i t_i + (B - 1) max_j t_j, with t the stages' latencies per microbatch, and B microbatches.

    For every limit of max_j t_j, the stages within it with the least sum are found by dynamic programming over units and GPUs
    (Alpa, Eq. 3 and Alg. 1); the first T whose plan fits into the memory is taken. O(limits x units x GPUs x meshes). As in Alpa,
    reductions over replicas and uneven lengths are ignored. Raises PlanError if nothing fits.
    """
    units = request.graph.units
    options = {unit.name: list_options(request, unit.name, max_gpus=request.num_gpus - len(units) + 1) for unit in units}
    if all(map(len, options.values())):
        for seconds, rows in sorted(_pipelines(options, request), key=lambda each: each[0]):
            candidate = Candidate(
                {unit.name: options[unit.name].layout(row, unit) for unit, row in zip(units, rows, strict=True)}
            )
            if candidate.fits(request):
                return candidate.to_run(request, seconds=seconds)
    raise infeasible(request)


def _pipelines(options: Mapping[str, UnitOptions], request: PlanningRequest) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield the best pipeline for every limit that allows one, in the order of the limits: T, and a row for each unit."""
    latencies = np.unique(np.concatenate([each.stage_seconds / each.data for each in options.values()]))
    limits = latencies[np.unique(np.linspace(0, len(latencies) - 1, _NUM_LIMITS).round().astype(np.int64))]
    for limit in limits.tolist():
        rows = _least_sum(list(options.values()), limit=limit, num_gpus=request.num_gpus)
        if rows is not None:
            chosen = [(each, row) for each, row in zip(options.values(), rows, strict=True)]
            total = sum(float(each.chain_seconds[row] / each.data[row]) for each, row in chosen)
            slowest = max(float(each.stage_seconds[row] / each.data[row]) for each, row in chosen)
            yield total + (request.num_microbatches - 1) * slowest, rows


def _least_sum(units: list[UnitOptions], *, limit: float, num_gpus: int) -> tuple[int, ...] | None:
    """Return each unit's row with the least sum of latencies whose stages keep the limit; None if there are too few GPUs."""
    least = np.zeros(num_gpus + 1)
    chosen: list[Integers] = []
    for options in units:
        least, rows = _add_unit(least, options, limit)
        chosen.append(rows)
    used = int(np.argmin(least))
    if not np.isfinite(least[used]):
        return None
    found: list[int] = []
    for options, rows in zip(reversed(units), reversed(chosen), strict=True):
        found.insert(0, int(rows[used]))
        used -= int(options.gpus[found[0]])
    return tuple(found)


def _add_unit(before: Floats, options: UnitOptions, limit: float) -> tuple[Floats, Integers]:
    """Return, by the number of GPUs used, the least sum with one more unit, and its row; before: the least sums without it."""
    least, rows = np.full(len(before), np.inf), np.full(len(before), -1)
    latency = options.chain_seconds / options.data
    allowed = np.flatnonzero(options.stage_seconds / options.data <= limit)
    order = allowed[np.lexsort((latency[allowed], options.gpus[allowed]))]
    first_of_gpus = order[np.unique(options.gpus[order], return_index=True)[1]] if len(order) else order
    for row in first_of_gpus.tolist():
        count = int(options.gpus[row])
        with_row = before[: len(before) - count] + latency[row]
        is_less = with_row < least[count:]
        least[count:][is_less] = with_row[is_less]
        rows[count:][is_less] = row
    return least, rows


def plan_fsdp(request: PlanningRequest) -> PlannedRun:
    """Plan all units on all ranks, with tp 1, pp 1 and shared weights; raises PlanError if that does not fit, or must not be."""
    if request.sharding not in (None, "optim_grads_params"):
        raise PlanError(f"shares weights, but --data-parallel-sharding-strategy {request.sharding} is asked for; leave it out")
    asked = request.changed(sharding="optim_grads_params")
    return choose_run(asked, _fsdp_candidates(asked))


def _fsdp_candidates(request: PlanningRequest) -> Iterator[Candidate]:
    graph, names = request.graph, request.graph.unit_names
    for name in names:
        fixed = request.fixed(name)
        sizes = fixed.tensor_parallel_size, fixed.pipeline_parallel_size, fixed.virtual_stages
        if any(size not in (None, 1) for size in sizes):
            raise PlanError(f"has tp 1 and pp 1, but unit '{name}' has other fixed sizes; unfix them or choose another planner")
    for size in shared_stage_sizes(request, names):
        if size.tensor == 1:
            layouts = {unit.name: even_layout(unit, 1, 1, 1, context=size.context) for unit in graph.units}
            yield from with_replicas(request, layouts, shared_data_parallel_sizes(request, names), groups=(names,))


def plan_flops_ratio(request: PlanningRequest) -> PlannedRun:
    """Give every unit GPUs in proportion to its FLOPs (frozen parts considered), and the fastest parallelism of its own in them.

    This ignores what DistTrain's allocation is about: tensor parallelism costs communication, so equal FLOPs per GPU are not
    equal times. A unit gets at least the fewest GPUs that it fits in. Raises PlanError if nothing fits.
    """
    names = request.graph.unit_names
    options = {name: list_options(request, name, max_gpus=request.num_gpus) for name in names}
    layouts = _divide_gpus(request, options)
    if layouts is None:
        raise infeasible(request)
    candidate = Candidate({name: layouts[name] for name in names})
    return candidate.to_run(request, seconds=estimate_seconds(request, candidate))


def _divide_gpus(request: PlanningRequest, options: Mapping[str, UnitOptions]) -> dict[str, UnitLayout] | None:
    """Divide GPUs and choose each unit's parallelism, from the last unit back; None if they do not fit together.

    An encoder that must keep activations for the microbatches in flight behind it may need more GPUs than its share: then it gets
    them, and the division starts again.
    """
    loads, vocab_size = request.loads, request.vocab_size
    work = {name: unit_flops(request.graph, name, vocab_size=vocab_size).of(loads.of_average(name, 1)) for name in options}
    fewest = {name: int(each.gpus.min()) if len(each) else request.num_gpus + 1 for name, each in options.items()}
    while sum(fewest.values()) <= request.num_gpus:
        budgets = proportional_gpus(work, fewest=fewest, num_gpus=request.num_gpus)
        layouts: dict[str, UnitLayout] = {}
        in_flight = 0.0
        for unit in reversed(request.graph.units):
            chosen = options[unit.name]
            row = _fastest(chosen, budgets[unit.name], in_flight, request.num_microbatches)
            if row is None:
                enough = chosen.gpus[chosen.in_flight_downstream >= in_flight]
                if not len(enough):
                    return None
                fewest = {**fewest, unit.name: int(enough.min())}
                break
            layout = layouts[unit.name] = chosen.layout(row, unit)
            if unit.role is not Role.ENCODER:
                in_flight += layout.pipeline_parallel_size * layout.data_parallel_size
        else:
            return layouts
    return None


def proportional_gpus(work: dict[str, float], *, fewest: dict[str, int], num_gpus: int) -> dict[str, int]:
    """Divide GPUs in proportion to work, but at least `fewest` to each unit; the largest remainders are rounded up."""
    lifted: set[str] = set()
    while True:
        left = num_gpus - sum(fewest[unit] for unit in lifted)
        total = sum(amount for unit, amount in work.items() if unit not in lifted)
        shares = {
            unit: float(fewest[unit]) if unit in lifted else (left * amount / total if total else left / len(work))
            for unit, amount in work.items()
        }
        below = {unit for unit, share in shares.items() if share < fewest[unit]}
        if not below:
            break
        lifted |= below
    gpus = {unit: math.floor(share + 1e-9) for unit, share in shares.items()}
    remainders = sorted((unit for unit in gpus if unit not in lifted), key=lambda unit: gpus[unit] - shares[unit])
    for unit in remainders[: num_gpus - sum(gpus.values())]:
        gpus[unit] += 1
    return gpus


def _fastest(options: UnitOptions, max_gpus: int, in_flight: float, num_microbatches: int) -> int | None:
    """Return the row with the shortest time by itself: warm-up and its own microbatches."""
    is_possible = (options.gpus <= max_gpus) & (options.in_flight_downstream >= in_flight)
    if not is_possible.any():
        return None
    counts = np.ceil(num_microbatches / options.data)
    seconds = options.chain_seconds + (counts - 1) * options.stage_seconds
    return int(np.lexsort((options.gpus, np.where(is_possible, seconds, np.inf)))[0])


NEAR = 1.02
"""Factor of the shortest estimate within which the formula is unreliable: the best of each number of replicas is simulated."""


def plan_encoders_colocated(request: PlanningRequest) -> PlannedRun:
    """Plan one pipeline whose first stages hold a part of every encoder, and whose others hold the LLM, then generators.

    All units have the same dp, the encoders the same tp, cp and pp, the others the same tp and cp. If the formula cannot decide
    between numbers of replicas, simulation does. Raises PlanError if nothing fits.
    """
    best: dict[int, tuple[Candidate, float]] = {}
    for candidate, seconds in choose_candidates(request, _with_encoder_stages(request), within=NEAR):
        best.setdefault(candidate.layouts[request.graph.backbone.name].data_parallel_size, (candidate, seconds))
    schedule = "encoders-colocated" if len(request.graph.encoders) > 1 else "1f1b"
    runs = (candidate.to_run(request, seconds=seconds, schedule=schedule) for candidate, seconds in best.values())
    return shortest_run(runs, request)


def _with_encoder_stages(request: PlanningRequest) -> Iterator[Candidate]:
    graph = request.graph
    encoders = tuple(unit.name for unit in graph.encoders)
    rest = [unit for unit in graph.units if unit.name not in encoders]
    data_sizes = shared_data_parallel_sizes(request, graph.unit_names)
    encoder_sizes = shared_stage_sizes(request, encoders) if encoders else [StageSize(1)]
    rest_sizes = shared_stage_sizes(request, [unit.name for unit in rest])
    encoder_stages = {1}
    if encoders:
        allowed = set.intersection(*(set(pipeline_parallel_sizes(request, unit)) for unit in encoders))
        encoder_stages = {stages for stages in allowed if stages <= MOST_EXTRA_STAGES} or {min(allowed)}
    for stages, (encoder_tensor, encoder_context), (tensor, context) in product(
        sorted(encoder_stages), encoder_sizes, rest_sizes
    ):
        for pipeline in pipeline_parallel_sizes(request, graph.backbone.name):
            layouts = {
                unit.name: even_layout(unit, encoder_tensor, 1, stages, context=encoder_context)
                if unit.name in encoders
                else even_layout(unit, tensor, 1, pipeline if unit.name == graph.backbone.name else 1, context=context)
                for unit in graph.units
            }
            yield from with_replicas(request, layouts, data_sizes, groups=(encoders,) if encoders else ())
