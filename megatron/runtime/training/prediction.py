"""Predicts steps and memory, on a described machine or by measured layers, alike on all ranks, and warns by that."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.runtime.flags.configuration import RunConfig, TrainingConfig
from megatron.runtime.flags.unit_flags import LLM
from megatron.runtime.orchestrator.machine import assumed_cluster, free_memory_bytes, ranks_on_node
from megatron.runtime.orchestrator.orchestrate import Inputs, first_lengths
from megatron.runtime.step.step import Step
from multimodal.balance import BALANCERS, UNBALANCED
from multimodal.balance.balance_options import BalanceOptions, Granularity, MicrobatchCount
from multimodal.balance.batch_work import BatchWork, sum_floats_by
from multimodal.balance.step_predictor import StepPredictor, find_better_pair
from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.cluster import Cluster
from multimodal.cost.cost_table import CostTable, TableCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_memory import StepMemory
from multimodal.data.sample_source import SampleSource
from multimodal.plan.planners.estimate.unit_layout import layer_times
from multimodal.plan.planners.planning_request import PlanningRequest, StageSize
from multimodal.plan.plans_of_sizes import EVEN, LayerSeconds
from multimodal.plan.stable_batch import LARGEST_BATCH, POOL_SIZE, stable_batch_size
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS, ScheduleRow
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths
from multimodal.values.timeline import Timeline

_UNMEASURED_MARGIN = 0.03
"""Share of a step that balancing must gain over the data's order before it has been measured what predictions are worth."""
_SAMPLES_OF_LAYERS = 1024
"""Number of samples, the first of the training, whose lengths determine the layers of pipeline stages."""


class MeasuredCosts(NamedTuple):
    """The findings of a run about itself: its layers' seconds, and whether balancing makes steps shorter."""

    step: int
    """The last step that was measured."""
    layers: LayerProfile
    margin: float = 0.0
    """As in `StepPredictor`."""
    keeps_order: bool = False
    """True if --balance auto leaves steps in the data's order, as those that it balanced were not shorter."""

    def to_dict(self) -> dict[str, Any]:
        """Plain form, read back by `from_dict`."""
        return {**self._asdict(), "layers": self.layers.to_dict()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "MeasuredCosts":
        """Build from the plain form."""
        layers, keeps_order = LayerProfile.from_dict(value["layers"]), bool(value.get("keeps_order", False))
        return cls(int(value["step"]), layers, float(value["margin"]), keeps_order)


def build_predictor(
    config: RunConfig, schedules: ScheduleCache, *, vocab_size: int, num_state_copies: int | None = None
) -> StepPredictor:
    """Return a predictor of steps as `schedules` runs them, by --cluster and --layer-costs; raises ConfigError."""
    options = run_options(config, num_state_copies=num_state_copies)
    margin = 0.0 if config.training.emulate is not None else _UNMEASURED_MARGIN
    return StepPredictor(schedules, cluster_of(config), vocab_size, options, profile_of(config), margin)


def balance_options(training: TrainingConfig, *, vocab_size: int, predictor: StepPredictor | None = None) -> BalanceOptions:
    """Return the balancer's options, which are also used for evaluations, so that these need no other schedules."""
    return BalanceOptions(
        micro_batch_size=training.micro_batch_size,
        tokens_per_microbatch=training.most_microbatch_tokens,
        encoder_micro_batch_sizes=training.encoder_micro_batch_sizes,
        granularity=Granularity(training.balance_granularity),
        microbatch_count=MicrobatchCount(training.balance_num_microbatches),
        merges_encoders=training.merge_encoders,
        refines_encoders=training.refine_encoders,
        unit_costs=training.declared_costs,
        ranks_per_node=ranks_on_node(),
        vocab_size=vocab_size,
        predictor=predictor,
    )


def run_options(config: RunConfig, *, num_state_copies: int | None) -> RunOptions:
    """Return the flags that affect costs; num_state_copies: of an elastic run's optimizer state."""
    training = config.training
    default_stage = 0 if training.dtype == "float64" and num_state_copies is None else 1
    return RunOptions(
        recompute=training.recompute_granularity,
        zero_stage=3 if config.parallelism.shards_weights else default_stage,
        reduces_once=config.parallelism.reduce_gradients_once,
        num_state_copies=num_state_copies,
        sequence_parallel=config.parallelism.sequence_parallel,
        transformer_impl=config.model.transformer_impl,
        num_overlapped_parts=config.parallelism.num_overlapped_parts,
        item_block_size=config.parallelism.item_block_size,
    )


def predict_layer_seconds(config: RunConfig, inputs: Inputs) -> LayerSeconds:
    """Return the seconds of every layer, by which size flags cut units into stages; empty if nothing is cut, or evenly.

    Seconds are those of forward and backward, after freezing and recomputation, for a microbatch of average samples (Cornstarch
    4.2) on --cluster; raises ConfigError if that cannot be read.
    """
    if not config.parallelism.cuts_by_seconds:
        return EVEN
    training, found = config.training, {}
    lengths = tuple(first_lengths(config, inputs.data, most=_SAMPLES_OF_LAYERS))
    for name, sizes in config.parallelism.units.items():
        if sizes.pipeline_parallel_size > 1:
            request = PlanningRequest(
                inputs.graph,
                cluster_of(config),
                num_gpus=1,
                global_batch_size=training.global_batch_size,
                lengths=lengths,
                expert_parallel_size=sizes.expert_parallel_size,
                micro_batch_size=min(training.micro_batch_size, training.global_batch_size),
                vocab_size=inputs.vocab_size,
                recompute=training.recompute_granularity,
                profile=profile_of(config),
                tp_comm_overlap=config.parallelism.tp_comm_overlap,
            )
            size = StageSize(sizes.tensor_parallel_size, sizes.context_parallel_size)
            found[name] = layer_times(request, name, size).total
    return found


def cluster_of(config: RunConfig) -> Cluster:
    """Return the machine of --cluster, else one like this; raises ConfigError."""
    return Cluster.from_file(config.training.cluster) if config.training.cluster else assumed_cluster()


def profile_of(config: RunConfig) -> LayerProfile | None:
    """Return the layers of --layer-costs, if given; raises ConfigError."""
    return LayerProfile.from_file(config.training.layer_costs) if config.training.layer_costs else None


def describe_better_pair(config: RunConfig, lengths: Sequence[SampleLengths], *, predictor: StepPredictor) -> str | None:
    """Return a warning if another --balance or --schedule is predicted to be clearly faster for these samples."""
    training = config.training
    if training.emulate is not None:
        return None
    options = balance_options(training, vocab_size=predictor.vocab_size, predictor=predictor)
    found = find_better_pair(lengths, balance=training.balance, schedule=training.schedule, predictor=predictor, options=options)
    if found is None:
        return None
    chosen, better = found
    is_balance = better.balance != chosen.balance
    flag = f"--balance {better.balance}" if is_balance else f"--schedule {better.schedule}"
    more = ", or leave it to --balance auto" if is_balance else ", which keeps more activations" * better.keeps_more
    return (
        f"warning: with --balance {chosen.balance} and --schedule {chosen.schedule} the first global batch is predicted to take "
        f"{chosen.seconds:.3g} s, with {flag} {better.seconds:.3g} s; change that flag{more}"
    )


def predict_timeline(
    config: RunConfig, step: Step, measured: Timeline, predictor: StepPredictor, emulation: TableCosts | None
) -> Mapping[str, Timeline]:
    """Return the simulated timeline of a step by its title; empty if simulating it takes long.

    Of an assumed machine only proportions are compared: computations last as long in all as measured.
    """
    if emulation is not None:
        return {"Predicted from --emulate": simulate_schedule(step.schedule, emulation).timeline}
    prediction = predictor.predict(step.assignment, tuple(step.lengths.values()))
    if not prediction.is_simulated:
        return {}
    found = simulate_schedule(step.schedule, prediction.costs).timeline
    files = {"--cluster": config.training.cluster, "--layer-costs": config.training.layer_costs}
    if given := [f"{flag} {path}" for flag, path in files.items() if path]:
        return {f"Predicted for {' and '.join(given)}": found}
    if predictor.profile is not None:
        return {"Predicted by the layers that this run has measured": found}
    factor = measured.computing_seconds / (found.computing_seconds or 1.0)
    return {f"Predicted for the assumed machine, times {factor:.3g}": found.scaled(factor)}


def describe_small_batch(config: RunConfig, source: SampleSource, *, graph: ModelGraph, plan: Plan) -> str | None:
    """Return a warning if the global batch is smaller than b_min, so that proportions of work change between batches.

    b_min: the least number of samples whose work always gives units the same ranks. None where it has no meaning.
    """
    units, batch_size = plan.units, config.training.global_batch_size
    num_replicas = math.gcd(*(unit.data_parallel_size for unit in units.values()))
    has_own_ranks = len(units) > 1 and sum(len(set(unit.ranks)) for unit in units.values()) == plan.num_ranks
    is_unknown = config.training.emulate or config.data.lengths_from == "decode" or config.training.packing_seq_length
    if not has_own_ranks or is_unknown or plan.num_ranks // num_replicas <= len(units):
        return None
    chosen = np.linspace(0, len(source), min(len(source), POOL_SIZE), endpoint=False).astype(int).tolist()
    work = BatchWork(graph, [replace(source.lengths(index), sample_id=index) for index in chosen], BalanceOptions())
    flops = {name: sum_floats_by(work.of_unit(name).samples, np.add(*work.flops(name)), len(chosen)) for name in graph.unit_names}
    stable = stable_batch_size(flops, num_gpus=plan.num_ranks // num_replicas)
    if stable <= batch_size:
        return None
    shown = f"{LARGEST_BATCH} samples or more" if stable >= LARGEST_BATCH else f"{stable} samples"
    return (
        f"warning: the units' shares of the work differ from one global batch of {batch_size} samples to the next by more than a "
        f"rank; it takes {shown} for them to be stable (Entrain's b_min); raise --global-batch-size, or expect units to wait"
    )


def read_emulation(path: Path, *, plan: Plan) -> TableCosts:
    """Read the table of --emulate; raises ConfigError if it does not list every virtual stage of every unit of the plan."""
    table = CostTable.from_file(path)
    expected = {name: unit.num_virtual_stages for name, unit in plan.units.items()}
    found = {name: len(unit.stages) for name, unit in table.units.items()}
    if found != expected:
        there, wanted = (", ".join(f"{name} {count}" for name, count in each.items()) for each in (found, expected))
        raise ConfigError(
            f"--emulate {path}: the table has stages {there} but the run has {wanted}; list every "
            "(virtual) stage of every unit, or change the units' pipeline sizes"
        )
    return TableCosts(table)


class LeastMemory(NamedTuple):
    """Bytes of one rank."""

    state_bytes: float
    """Weights, gradients and optimizer state, with the work on one layer and messages."""
    activation_bytes: float
    """Activations of the microbatches that are in flight together under every schedule."""


def least_memory(memory: StepMemory, *, rank: int, schedule: ScheduleRow) -> LeastMemory:
    """Return a lower bound of the simulated peak of a rank for the step whose loads `memory` has.

    Stage s of P keeps at least P - s microbatches before its first backward, as in 1F1B; where units take turns in rounds
    (DIP), no more than a round has. Here they are the smallest ones. O(n log n) in the microbatches of the rank's stages.
    """
    kept = 0.0
    for unit, replica, index in memory.layers.of_rank[rank]:
        starts, held = memory.loads.assignment.placed[unit].microbatch_starts, memory.layers.plan.units[unit].replicas[replica]
        of_microbatches = memory.kept_bytes(unit)[index, starts[replica] : starts[replica + 1]]
        most = -(-len(of_microbatches) // max(1, schedule.num_rounds))
        in_flight = min(most, len(held.stages) - held.virtual_stages[index].stage_index)
        kept += float(np.sort(of_microbatches)[:in_flight].sum())
    return LeastMemory(memory.static_bytes(rank), kept)


def check_memory(config: RunConfig, inputs: Inputs, plan: Plan, *, rank: int, num_copies: int | None) -> None:
    """Raise ConfigError if a rank's weights, gradients, optimizer state and activations exceed its free memory.

    Activations are of the first global batch, if lengths are known before decoding. num_copies: of optimizer state.
    """
    needed, free = estimate(config, inputs, plan, rank=rank, num_copies=num_copies), free_memory_bytes()
    if sum(needed) <= free:
        return
    state, activations = needed.state_bytes / 1e9, needed.activation_bytes / 1e9
    raise ConfigError(
        f"rank {rank} needs at least {state + activations:.3g} GB ({state:.3g} for weights, gradients and optimizer state, "
        f"{activations:.3g} for activations), and {free / 1e9:.3g} GB are free; {', or '.join(_fixes(config, plan, needed))}; or "
        "build it all the same with --allow-low-memory"
    )


def estimate(config: RunConfig, inputs: Inputs, plan: Plan, *, rank: int, num_copies: int | None) -> LeastMemory:
    """Return the least bytes of a rank."""
    training, graph, batch = config.training, inputs.graph, config.training.global_batch_size
    lengths = tuple(SampleLengths(index, (), 1, 1) for index in range(batch))
    if config.data.lengths_from != "decode":
        lengths = tuple(first_lengths(config, inputs.data, most=None))
    options = balance_options(training, vocab_size=inputs.vocab_size)
    layers = StageLayers(graph, plan, inputs.vocab_size)
    assignment = BALANCERS[UNBALANCED](lengths, graph=graph, plan=plan, options=options)
    costs = run_options(config, num_state_copies=num_copies)
    loads = AssignedLoads(assignment.shape(graph, plan), assignment, lengths, costs.item_block_size)
    memory = StepMemory(layers, loads, costs, getattr(torch, training.dtype).itemsize)
    return least_memory(memory, rank=rank, schedule=BUILDERS[training.schedule])


def _fixes(config: RunConfig, plan: Plan, needed: LeastMemory) -> list[str]:
    """List flags that make a rank need less, those first that help most."""
    sizes = f"--{LLM}-tensor-model-parallel-size or --{LLM}-pipeline-model-parallel-size"
    state, activations = [f"raise the parallel sizes (such as {sizes})"], list[str]()
    if config.parallelism.plan is not None:
        state = ["give another --plan (tools/plan.py finds plans that fit)"]
    has_copies = any(unit.data_parallel_size * unit.context_parallel_size > 1 for unit in plan.units.values())
    if has_copies and not config.parallelism.shards_weights and config.model.transformer_impl == "local":
        state.append("add --data-parallel-sharding-strategy optim_grads_params")
    if config.training.recompute_granularity != "full":
        activations.append("add --recompute-granularity full")
    if config.training.micro_batch_size > 1:
        activations.append("lower --micro-batch-size")
    return [*activations, *state] if needed.activation_bytes > needed.state_bytes else [*state, *activations]
