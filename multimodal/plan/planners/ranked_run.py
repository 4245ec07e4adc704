"""A run with what it will reach, as a search compares and describes it."""

from collections.abc import Sequence
from dataclasses import dataclass

from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.simulate_run import Prediction
from multimodal.values.plan import UnitPlan


@dataclass(frozen=True)
class Ranked:
    """A run with the prediction that it is ranked by."""

    run: PlannedRun
    prediction: Prediction

    @property
    def key(self) -> tuple[float, int]:
        """Shorter steps first; of equals, fewer GPUs."""
        return self.prediction.iteration_seconds, self.run.num_gpus


def run_key(run: PlannedRun) -> str:
    """Return what tells runs apart that a search has seen."""
    how = (
        run.schedule,
        run.passes,
        run.balance,
        run.micro_batch_size,
        run.recompute,
        run.transformer_impl,
        run.sharding,
        run.tp_comm_overlap,
    )
    return repr((run.plan.units, *how))


def shares_ranks(units: Sequence[UnitPlan]) -> bool:
    """Whether several units lie on the same ranks."""
    held = [frozenset(unit.ranks) for unit in units]
    return len(held) > 1 and all(ranks == held[0] for ranks in held)


def has_tensor_parallelism(run: PlannedRun) -> bool:
    """Whether some unit has a tensor parallel size above 1."""
    return any(unit.tensor_parallel_size > 1 for unit in run.plan.units.values())


def has_virtual_stages(run: PlannedRun) -> bool:
    """Whether some stage holds several layer ranges."""
    return any(len(stage.layer_ranges) > 1 for unit in run.plan.units.values() for stage in unit.replicas[0].stages)


def describe(ranked: Ranked) -> str:
    """One line: time, MFU, memory, bubbles by kind, distance to the ideal, and the units' sizes."""
    run, found = ranked.run, ranked.prediction
    bubbles = ", ".join(f"{kind} {share:.1%}" for kind, share in found.bubble.items() if share >= 0.0005)
    units = ", ".join(f"{unit} {describe_sizes(plan)}" for unit, plan in run.plan.units.items())
    above = found.iteration_seconds / found.ideal_seconds - 1 if found.ideal_seconds else 0.0
    return (
        f"{found.iteration_seconds:.4g} s, MFU {found.mfu:.1%}, {found.peak_memory_bytes / 1e9:.3g} GB, {above:.1%} above ideal "
        f"({bubbles}): {units}; {run.schedule}, --balance {run.balance}, microbatch {run.micro_batch_size}"
        + (f", recomputing {run.recompute}" if run.recompute else "")
        + (", overlapped tensor parallelism" if run.tp_comm_overlap else "")
        + (", weights sharded" if run.sharding != "optim" else "")
        + (f" (found by {run.planner})" if run.planner != "braid" else "")
    )


def describe_sizes(unit: UnitPlan) -> str:
    """Sizes as error messages show them: `tp 2 x pp 4 x dp 3`; cp where it is not 1."""
    stages = len(unit.replicas[0].stages)
    virtual = f" (v {unit.num_virtual_stages / stages:g})" if unit.num_virtual_stages > stages else ""
    context = f"cp {unit.context_parallel_size} x " if unit.context_parallel_size > 1 else ""
    return f"tp {unit.tensor_parallel_size} x {context}pp {stages}{virtual} x dp {unit.data_parallel_size}"
