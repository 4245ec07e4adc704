"""The answer of a planner: a plan and the flags to run it with."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Literal

from multimodal.cost.layers.layer import Implementation, Recompute
from multimodal.schedule.builders import BUILDERS, Builder
from multimodal.values.assignment import Assignment
from multimodal.values.plan import Plan
from multimodal.values.shape import StepShape

Sharding = Literal["optim", "optim_grads_params"]
"""The state that replicas share, under Megatron's names: the optimizer's (ZeRO-1), or also gradients and weights (ZeRO-3)."""


@dataclass(frozen=True)
class PlannedRun:
    """A plan with the flags that belong to it."""

    plan: Plan
    planner: str = field(default="", kw_only=True, compare=False)
    schedule: str = "1f1b"
    """A name of `BUILDERS`."""
    passes: tuple[str, ...] = ()
    """Names of `PASSES`, in the order of their application."""
    balance: str = "none"
    """A name of `BALANCERS`."""
    micro_batch_size: int = 1
    encoder_micro_batch_sizes: tuple[tuple[str, int], ...] = ()
    """Encoders with the most items in one of their microbatches; others follow the LLM's microbatches."""
    recompute: Recompute | None = None
    """None, `selective` or `full`: `--recompute-granularity`."""
    transformer_impl: Implementation = "transformer_engine"
    tp_comm_overlap: bool = False
    """True if tensor parallel collectives are cut into parts that run beside products; local layers only."""
    sharding: Sharding = "optim"
    """The state that replicas share: `--data-parallel-sharding-strategy`."""
    num_state_copies: int | None = None
    """Copies of that state: `--num-distributed-optimizer-instances`; None: one."""
    objective_seconds: float = field(default=0.0, compare=False)
    """Seconds of a step by the planner's own formula."""
    planning_seconds: float = field(default=0.0, compare=False)
    nominal_seconds: float = field(default=0.0, compare=False)
    """Nominal seconds of the simulations by which the planner chose it, which searches add to their own."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Notes about the search, for the user."""
    second: "PlannedRun | None" = field(default=None, compare=False, repr=False)
    """The run of another plan with as many ranks that the search expects to be the next best."""
    predicted_as: Callable[[StepShape, Assignment], tuple[Assignment, Builder]] | None = None
    """What is simulated in place of a step, as its assignment and builder: of a baseline that is predicted and never run."""

    @cached_property
    def key(self) -> str:
        """A text that identifies the run for a search: its plan and flags, without facts about its planning."""
        return repr([getattr(self, each.name) for each in fields(self) if each.compare])

    @property
    def can_run(self) -> bool:
        """True if the plan can train; False for a baseline that is only predicted."""
        return self.predicted_as is None

    @property
    def num_gpus(self) -> int:
        """Ranks that the plan uses."""
        return self.plan.num_ranks

    @property
    def has_virtual_stages(self) -> bool:
        """True if some stage holds several layer ranges."""
        return any(unit.has_virtual_stages for unit in self.plan.units.values())

    @property
    def has_tensor_parallelism(self) -> bool:
        """True if some unit has a tensor parallel size above 1."""
        return any(max(unit.tensor_sizes) > 1 for unit in self.plan.units.values())

    @property
    def flags(self) -> str:
        """The flags of the plan that have the same names in all programs."""
        flags = [f"--schedule {self.schedule}"]
        if self.passes:
            flags.append(f"--schedule-passes {','.join(self.passes)}")
        flags += [f"--balance {self.balance}", f"--micro-batch-size {self.micro_batch_size}"]
        flags.append(f"--transformer-impl {self.transformer_impl}")
        if self.tp_comm_overlap:
            flags.append("--tp-comm-overlap")
        if self.recompute:
            flags.append(f"--recompute-granularity {self.recompute}")
        if self.num_state_copies:
            flags.append(f"--num-distributed-optimizer-instances {self.num_state_copies}")
        return " ".join(flags)

    @property
    def encoder_flags(self) -> list[str]:
        """The flags of pretrain_mllm.py for `encoder_micro_batch_sizes`."""
        return [f"--{unit.replace('_', '-')}-micro-batch-size {size}" for unit, size in self.encoder_micro_batch_sizes]

    def training_flags(self, cluster: str | Path) -> str:
        """Return the flags of pretrain_mllm.py; cluster: the machine's file, which schedules that use durations take."""
        flags = [self.flags, *self.encoder_flags]
        if self.sharding != "optim":
            flags.append(f"--data-parallel-sharding-strategy {self.sharding}")
        if self.has_tensor_parallelism:
            flags.append("--sequence-parallel")
        if BUILDERS[self.schedule].needs_costs:
            flags.append(f"--cluster {cluster}")
        return " ".join(flags)

    @property
    def simulation_flags(self) -> str:
        """The flags of tools/simulate.py."""
        flags = [self.flags]
        if self.encoder_micro_batch_sizes:
            items = ",".join(f"{unit}={size}" for unit, size in self.encoder_micro_batch_sizes)
            flags.append(f"--encoder-micro-batch-sizes {items}")
        if self.sharding != "optim":
            flags.append("--zero-stage 3")
        return " ".join(flags)
