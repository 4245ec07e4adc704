"""The input of a planner: a model, a machine, a batch, real lengths, and the sizes that the user has fixed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from multimodal.cost.cluster import Cluster
from multimodal.cost.engine_limits import Instead, LayerUse, limits_met
from multimodal.cost.layers.layer import Implementation, Recompute
from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.memoize import memoized
from multimodal.cost.run_options import OVERLAPPED_PARTS, RunOptions
from multimodal.cost.seconds.layer_costs import LayerCosts
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.cost.step_memory import default_zero_stage
from multimodal.cost.token_shares import DEFAULT_BLOCK_SIZE
from multimodal.cost.unit_load import UnitLoad, sample_load
from multimodal.plan.planners.planned_run import PlannedRun, Sharding
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES
from multimodal.values.backward_need import BackwardNeed, layers_backward_need, unit_is_trainable
from multimodal.values.errors import PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import MOST_RANKS, Plan
from multimodal.values.sample_lengths import LengthBatch, SampleLengths, draw_length_batches

CONTEXT_PARALLEL_SIZES = (1, 2, 4, 8)
"""Context parallel sizes that a planner may choose from if sequences are long."""
LARGEST_CONTEXT_PARALLEL = CONTEXT_PARALLEL_SIZES[-1]
LEAST_SHARE_TOKENS = 32 * DEFAULT_BLOCK_SIZE
"""Fewest tokens of each context parallel rank: about as many as a layer's matrix products need to be efficient."""
SEED = 0
"""Seed of the order in which samples are drawn: files are often sorted, and training shuffles."""


def plain_schedule(*, has_virtual_stages: bool = False) -> str:
    """Return the schedule that planners assume if they name none."""
    return "interleaved-1f1b" if has_virtual_stages else "1f1b"


class StageSize(NamedTuple):
    """The parallel sizes by which ranks share one stage of one replica."""

    tensor: int
    context: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the stage."""
        return self.tensor * self.context


@dataclass(frozen=True, slots=True)
class FixedSizes:
    """Sizes of one unit that the user has fixed; None leaves a size to the planner."""

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    virtual_pipeline_size: int | None = None
    """Layer ranges per pipeline stage."""
    context_parallel_size: int | None = None
    expert_parallel_size: int | None = None
    """For the LLM only."""


@dataclass(frozen=True)
class DataLoads:
    """The loads of all samples on all units, each figure computed once."""

    graph: ModelGraph
    lengths: tuple[SampleLengths, ...]

    @cached_property
    def of_samples(self) -> Mapping[str, NDArray[np.float64]]:
        """Unit -> [num_samples, 4]: the load of each sample, with the columns of `UnitLoad`."""
        rows = {unit.name: [sample_load(unit, sample) for sample in self.lengths] for unit in self.graph.units}
        return {unit: np.array(loads, np.float64).reshape(-1, len(UnitLoad._fields)) for unit, loads in rows.items()}

    @cached_property
    def vary(self) -> bool:
        """True if samples differ, so that balancing matters."""
        return any(bool((loads != loads[0]).any()) for loads in self.of_samples.values())

    @cached_property
    def mean(self) -> Mapping[str, tuple[float, ...]]:
        """Unit -> the mean load of a sample."""
        return {name: tuple(loads.mean(axis=0).tolist()) for name, loads in self.of_samples.items()}

    @cached_property
    def idle_units(self) -> frozenset[str]:
        """Units for which none of the samples has work."""
        return frozenset(name for name, load in self.mean.items() if not load[0] and name != self.graph.backbone.name)

    @cached_property
    def spreads(self) -> Mapping[str, tuple[float, float]]:
        """Unit -> standard deviation and maximum of a sample's tokens, relative to the mean."""
        tokens = {unit: loads[:, 0] for unit, loads in self.of_samples.items()}
        means = {unit: float(each.mean()) for unit, each in tokens.items()}
        return {
            unit: (float(each.std()) / means[unit], float(each.max()) / means[unit]) if means[unit] else (0.0, 1.0)
            for unit, each in tokens.items()
        }

    @memoized
    def drawn_batches(self, batch_size: int, num_batches: int, share: int) -> Sequence[LengthBatch]:
        """Draw global batches in random order, and keep one of every `share` samples of each."""
        batches = draw_length_batches(self.lengths, batch_size=batch_size, num_batches=num_batches, seed=SEED)
        return [LengthBatch(batch[::share]) for batch in batches]

    def of_average(self, unit: str, num_samples: float) -> UnitLoad:
        """Return the load of this many average samples on a unit."""
        return UnitLoad(*(round(num_samples * each) for each in self.mean[unit]))

    @cached_property
    def longest_items(self) -> Mapping[str, int]:
        """Unit -> the tokens of the longest of its items."""
        longest: dict[str, int] = {}
        passes = (each for sample in self.lengths for item in sample.items for each in (item.passes or (item,)))
        for item in passes:
            longest[item.unit] = max(longest.get(item.unit, 0), item.num_tokens)
        return longest


_OF_MODEL_AND_DATA = ("layer_costs", "loads", "trained_weights")
"""Attributes of a request, computed on first access, that do not depend on its options."""


@dataclass(frozen=True)
class PlanningRequest:
    """The input of every planner; raises PlanError if it contradicts itself."""

    graph: ModelGraph
    """The model, with its freezing applied."""
    cluster: Cluster
    num_gpus: int
    """Most GPUs that a plan may use."""
    global_batch_size: int
    lengths: tuple[SampleLengths, ...]
    """Lengths of a sample of the real data, of any size."""
    expert_parallel_size: int | None = None
    """Replicas of the LLM that share its experts; None: as fixed, or as the planner finds best."""
    micro_batch_size: int | None = None
    """Samples per LLM microbatch; None: 1, or the best size that a search or tuning finds."""
    vocab_size: int = 50304
    """The padded size of the LLM's vocabulary."""
    fixed_sizes: Mapping[str, FixedSizes] = field(default_factory=dict)
    """Unit -> sizes that the plan must have."""
    recompute: Recompute | None = None
    profile: LayerProfile | None = None
    """Measured costs of layers, used instead of those computed from the cluster's description."""
    transformer_impl: Implementation | None = None
    """The implementation of transformer layers; None: Transformer Engine's if it can run (see `implementation`)."""
    tp_comm_overlap: bool = False
    """True: plans assume tensor parallel collectives in parts beside products, as local layers run them."""
    sharding: Sharding | None = None
    """The state that replicas share; None: `optim`, or the planner's choice."""
    num_state_copies: int | None = None
    """Copies of that state, each shared by equally many replicas (`RunOptions`); None: one."""
    most_context_parallel: int = 1
    least_share_tokens: int = LEAST_SHARE_TOKENS
    """Fewest tokens of the largest microbatch, or sample, per context parallel rank for a size to be considered."""
    memory_headroom: float = 0.1
    """Share of a GPU's memory that stays free for fragmentation, workspaces and communication buffers."""
    memory_scale: float = 1.0
    """Share of the remaining memory that planners may use: below 1 after a plan's simulated peak exceeded their estimate."""
    time_budget_seconds: float = 30.0
    """Nominal seconds that a planner that searches by simulation may use: counted work, the same on every machine."""
    on_progress: Callable[[str], None] | None = field(default=None, compare=False)
    """Called by such a planner with a note on every better plan that it finds."""
    num_batches: int = 2
    """Randomly drawn global batches on which a plan is judged; one if samples are alike."""
    max_actions: int = 8_000
    """Most computations of a step that is simulated as a whole (see `predict_run`)."""
    simulates_whole_steps: bool = False
    """True: plans are judged by whole steps, however many computations these have."""
    uses_all_gpus: bool = False
    """True: plans that leave GPUs idle do not count as fitting."""
    is_frozen_aware: bool = True
    """False: formulas take every backward for twice its forward (Cornstarch's baseline, 4.2)."""

    def __post_init__(self) -> None:
        for name in ("num_gpus", "global_batch_size", "num_batches"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.num_gpus > MOST_RANKS:
            raise PlanError(f"num_gpus must be at most {MOST_RANKS:,}, found {self.num_gpus}")
        if not 0 <= self.memory_headroom < 1:
            raise PlanError(f"memory headroom must be a share from 0 to below 1, found {self.memory_headroom}")
        if not self.lengths:
            raise PlanError("no lengths are given; a plan depends on the data, so give at least one sample")
        if unknown := [name for name in self.fixed_sizes if name not in self.graph.unit_names]:
            raise PlanError(
                f"sizes are fixed for a unit '{unknown[0]}'; the model's units are {', '.join(self.graph.unit_names)}"
            )
        for name, fixed in self.fixed_sizes.items():
            size, experts = fixed.data_parallel_size or 1, fixed.expert_parallel_size or 1
            if self.num_state_copies is not None and ((size > 1 and size % self.num_state_copies) or experts > 1):
                raise PlanError(
                    f"unit '{name}': data parallel size {size} and expert parallel size {experts} are fixed, but "
                    f"{self.num_state_copies} copies of sharded state must divide the one, and need the other to be 1; unfix "
                    "them, or ask for one copy"
                )
        if self.micro_batch_size is not None and not 1 <= self.micro_batch_size <= self.global_batch_size:
            raise PlanError(
                f"micro batch size {self.micro_batch_size} is not between 1 and the global batch size {self.global_batch_size}"
            )

    @property
    def expert_parallel_sizes(self) -> tuple[int, ...]:
        """The fixed size; else the powers of two that divide the LLM's experts, GPUs and fixed replicas."""
        experts, fixed = self.graph.backbone.transformer.experts, self.fixed(self.graph.backbone.name)
        decided = self.expert_parallel_size or fixed.expert_parallel_size
        if decided is not None or experts is None or self.sharding == "optim_grads_params" or self.num_state_copies is not None:
            return (decided or 1,)
        sizes = [1 << power for power in range(min(experts.num_experts, self.num_gpus).bit_length())]
        return tuple(size for size in sizes if experts.num_experts % size == 0 == (fixed.data_parallel_size or 0) % size)

    def allows_num_gpus(self, num_gpus: int) -> bool:
        """Return True if a plan may use this many GPUs."""
        return num_gpus == self.num_gpus or not self.uses_all_gpus

    def changed(self, **changes: Any) -> "PlanningRequest":
        """Return the request with other options for the same model, machine and data; values cached for these are kept."""
        other = replace(self, **changes)
        other.__dict__.update({name: self.__dict__[name] for name in _OF_MODEL_AND_DATA if name in self.__dict__})
        if other.tp_comm_overlap != self.tp_comm_overlap:
            other.__dict__.pop("layer_costs", None)
        return other

    @property
    def memory_bytes(self) -> float:
        """Bytes that a rank may use."""
        return self.cluster.memory_gb * 1e9 * (1 - self.memory_headroom)

    @property
    def memory_text(self) -> str:
        """The accelerator's memory and the part of it that may be used, for messages."""
        return (
            f"the {self.cluster.memory_gb:g} GB of each, of which {self.memory_bytes / 1e9:.3g} GB may be used "
            f"(memory headroom {self.memory_headroom:g})"
        )

    @property
    def planned_memory_bytes(self) -> float:
        """Most bytes of a planner's estimate."""
        return self.memory_bytes * self.memory_scale

    @property
    def default_micro_batch_size(self) -> int:
        """The given size, or 1."""
        return self.micro_batch_size or 1

    @property
    def num_microbatches(self) -> int:
        """LLM microbatches of one global batch, over all replicas."""
        return -(-self.global_batch_size // self.default_micro_batch_size)

    @cached_property
    def loads(self) -> DataLoads:
        """The work of the given samples."""
        return DataLoads(self.graph, self.lengths)

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """Seconds of single layers."""
        num_parts = OVERLAPPED_PARTS if self.tp_comm_overlap else 1
        return LayerCosts(self.graph, self.cluster, self.vocab_size, self.profile, num_parts)

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage: replicas share optimizer state (in float64 nothing), or all state."""
        return 3 if self.sharding == "optim_grads_params" else default_zero_stage(self.cluster.bytes_per_element)

    def implementation(self, schedule: str) -> Implementation:
        """Return the layers for a schedule: those that the user has fixed, else Transformer Engine's where they can run."""
        return self.transformer_impl or ("local" if self._needs_local_layers(schedule) else "transformer_engine")

    def _needs_local_layers(self, schedule: str) -> bool:
        row = BUILDERS[schedule]
        use = LayerUse(
            dtype=self.cluster.dtype,
            runs_segments=row.runs_segments,
            splits_backwards=row.splits_backwards,
            tp_comm_overlap=self.tp_comm_overlap,
            shards_weights=self.zero_stage == 3,
        )
        return bool(limits_met(use, Instead.LOCAL))

    def allows(self, schedule: str) -> bool:
        """Return True if the implementation that the user has fixed can run a schedule."""
        return self.transformer_impl != "transformer_engine" or not self._needs_local_layers(schedule)

    def passes(self, plan: Plan) -> tuple[str, ...]:
        """Passes of every planned run: they hide collectives over replicas, unless these share weights, which hides them."""
        trained = (unit for name, unit in plan.units.items() if unit_is_trainable(self.graph, name))
        has_copies = any(unit.data_parallel_size * unit.context_parallel_size > 1 for unit in trained)
        if not has_copies or self.zero_stage == 3:
            return ()
        zero_stage = self.zero_stage if plan.has_alike_copies else 0
        planned = {name: row for name, row in PASSES.items() if row.is_planned and zero_stage >= row.least_zero_stage}
        on_cores = self.cluster.cores_per_node is not None  # where a reduction beside a backward takes the time of its products
        return tuple(name for name, row in planned.items() if not (row.reduces_by_layer and on_cores))

    def run_options(self, run: PlannedRun) -> RunOptions:
        """Return those options of a run that affect costs."""
        return RunOptions(
            run.recompute,
            replace(self, sharding=run.sharding).zero_stage,
            transformer_impl=run.transformer_impl,
            num_overlapped_parts=OVERLAPPED_PARTS if run.tp_comm_overlap else 1,
            num_state_copies=run.num_state_copies,
        )

    def backward_need(self, unit: str, kind: str) -> BackwardNeed:
        """Return the gradients that a unit's layers of one kind compute."""
        index = self.graph.unit(unit).layers.index(kind)
        return layers_backward_need(self.graph, unit, range(index, index + 1))

    @cached_property
    def trained_weights(self) -> Mapping[str, tuple[int, ...]]:
        """Unit -> the number of trained weights in all layers before each one, and in all layers."""
        sums = {}
        for unit in self.graph.units:
            weights = dict[str, int]()
            for kind in dict.fromkeys(unit.layers):
                layer = describe_layer(self.graph, unit, kind, vocab_size=self.vocab_size)
                weights[kind] = layer.num_trained_weights(self.backward_need(unit.name, kind))
            sums[unit.name] = tuple(accumulate(map(weights.__getitem__, unit.layers), initial=0))
        return sums

    def fixed(self, unit: str) -> FixedSizes:
        """Return the fixed sizes of a unit."""
        return self.fixed_sizes.get(unit, FixedSizes())

    def experts_of(self, unit: str) -> int:
        """Return the number of replicas of a unit that share experts."""
        return (self.expert_parallel_size or 1) if unit == self.graph.backbone.name else 1
