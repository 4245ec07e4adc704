"""Checks before anything is built that a rank has the memory which its part of the plan certainly needs."""

from typing import NamedTuple

import numpy as np
import torch

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.unit_flags import LLM
from megatron.runtime.orchestrator.machine import free_memory_bytes
from megatron.runtime.orchestrator.orchestrate import Inputs, first_lengths
from megatron.runtime.training.prediction import run_options
from multimodal.balance import BALANCERS, UNBALANCED
from multimodal.balance.balance_options import BalanceOptions
from multimodal.cost.assigned_loads import AssignedLoads
from multimodal.cost.stage_layers import StageLayers
from multimodal.cost.step_memory import StepMemory
from multimodal.schedule.builders import BUILDERS, ScheduleRow
from multimodal.values.errors import ConfigError
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths


class LeastMemory(NamedTuple):
    """Bytes of one rank."""

    state_bytes: float
    """Weights, gradients and optimizer state, with the work on one layer and messages."""
    activation_bytes: float
    """Activations of the microbatches that are in flight together under every schedule."""

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return self.state_bytes + self.activation_bytes


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

    Activations are those of the first global batch; where lengths are unknown before decoding, they are not counted. num_copies:
    of an elastic run's optimizer state.
    """
    needed, free = estimate(config, inputs, plan, rank=rank, num_copies=num_copies), free_memory_bytes()
    if needed.total_bytes <= free:
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
        lengths = tuple(first_lengths(config, inputs.data, most=batch))
    options = BalanceOptions(
        micro_batch_size=min(training.micro_batch_size, batch),
        tokens_per_microbatch=training.tokens_per_microbatch,
        encoder_micro_batch_sizes=training.encoder_micro_batch_sizes,
        vocab_size=inputs.vocab_size,
    )
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
