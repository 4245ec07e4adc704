"""The plan file of a planner: its purpose and prediction as comments, and a plan that can be edited by hand."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.search.plan_to_fit import describe_kinds
from multimodal.plan.planners.search.prediction import Prediction
from multimodal.values.plan import Plan


def plan_text(
    name: str,
    run: PlannedRun,
    prediction: Prediction,
    *,
    made_for: Mapping[str, str],
    cluster: str | Path,
    simulate_flags: str = "",
) -> str:
    """Return the content of a plan file of this name; made_for: name -> value; simulate_flags: that predict it again."""
    lines = [f"# A plan by the planner '{run.planner}'"]
    if run.can_run:
        lines += ["# Run it with", f"#   pretrain_mllm.py --plan {name} {run.training_flags(cluster)}"]
    if simulate_flags and run.can_run:
        lines.append(f"# Predict it again with\n#   tools/simulate.py --plan {name} {simulate_flags}")
    lines += ["#", "# Made for:", *(f"#   {name}: {value}" for name, value in made_for.items())]
    lines += ["#", "# Predicted:", *(f"#   {name}: {value}" for name, value in predicted(run, prediction).items())]
    if run.notes:
        lines += ["#", "# The search:", *(f"#   {note}" for note in run.notes)]
    lines += [
        "#",
        "# To edit: every replica of a unit lists its pipeline stages; `ranks` (ascending, tensor x context parallel size)",
        "# share a stage: neighbours its layers by tensor parallelism, groups of neighbours its tokens by context parallelism.",
        "# `layers` are half-open ranges of the unit's layer list, which also counts what stands before the first and after the",
        "# last transformer layer (patch or token embedding; projector or head). All ranks from 0 on must be used. Replicas of a",
        "# unit may have other stages than each other; a stage may say its own `tensor_parallel_size`. Of an LLM with experts,",
        "# `expert_parallel_size` neighbouring replicas share them.",
        *plan_lines(run.plan),
    ]
    return "\n".join(lines) + "\n"


def predicted(run: PlannedRun, prediction: Prediction) -> Mapping[str, str]:
    """Name the predicted figures with their units."""
    return {
        "step": f"{prediction.iteration_seconds:.6g} s",
        "ideal": f"{prediction.ideal_seconds:.6g} s (the same computations without any idle time)",
        "floor": f"{prediction.floor_seconds:.6g} s (the ideal without waits for tensor parallel collectives, and recomputation)",
        "busiest ranks": f"{prediction.busiest_seconds:.6g} s (their computations: what is above the ideal is imbalance)",
        "MFU": f"{prediction.mfu:.2%}",
        "tokens per second and GPU": f"{prediction.tokens_per_second_per_gpu:.6g}",
        "most memory of a GPU": f"{prediction.peak_memory_bytes / 1e9:.2f} GB",
        "GPUs": str(run.num_gpus),
        "above the floor, of the step": describe_kinds(prediction),
    }


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the plan as YAML, one stage a line."""
    yield "units:"
    for name, unit in plan.units.items():
        yield f"  {name}:"
        yield f"    tensor_parallel_size: {unit.tensor_parallel_size}"
        yield f"    context_parallel_size: {unit.context_parallel_size}"
        if unit.expert_parallel_size > 1:
            yield f"    expert_parallel_size: {unit.expert_parallel_size}"
        if unit.microbatch_shares:
            yield f"    microbatch_shares: {list(unit.microbatch_shares)}"
        yield "    replicas:"
        for replica in unit.replicas:
            yield "      - stages:"
            for stage in replica.stages:
                size = "" if stage.tensor_parallel_size is None else f", tensor_parallel_size: {stage.tensor_parallel_size}"
                yield f"          - {{ranks: {list(stage.ranks)}, layers: {list(map(list, stage.layer_ranges))}{size}}}"
