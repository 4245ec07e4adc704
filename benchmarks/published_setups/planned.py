"""Plans and simulates one step of a published set-up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from benchmarks.baselines import COMPARED
from benchmarks.published_setups.calibrate_compute import calibrate_compute
from benchmarks.published_setups.layer_execution import DEFAULT_EXECUTION, LayerExecution, SystemLayerCosts
from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.layer import Implementation, Recompute
from multimodal.cost.run_options import RunOptions
from multimodal.cost.seconds.layer_costs import LayerCosts
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import FixedSizes, PlanningRequest
from multimodal.plan.planners.search.prediction import Prediction, judge_run
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths

EXAMPLES = Path(__file__).parents[2] / "examples"
REDUCTION_BY_LAYER = "reduce-by-layer"
"""A pass of every plan of ours, but of no paper's system here: DistTrain reduces when all is done (section 3), Optimus'
Megatron-LM chunk by chunk, of which a stage without virtual ones has one."""


@dataclass(frozen=True)
class PaperRequest(PlanningRequest):
    """A request whose layers run as in a paper's system."""

    execution: LayerExecution = DEFAULT_EXECUTION
    num_overlapped_parts: int = 1

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """Seconds of single layers."""
        return self._system_costs(self.graph, self.cluster, self.vocab_size, self.profile, self.num_overlapped_parts)

    def run_options(self, run: PlannedRun) -> RunOptions:
        """Return the options by which such a run is computed and its memory counted."""
        return replace(super().run_options(run), layer_costs=self._system_costs, num_overlapped_parts=self.num_overlapped_parts)

    @property
    def _system_costs(self) -> Callable[..., LayerCosts]:
        return partial(SystemLayerCosts, execution=self.execution)


@dataclass(frozen=True)
class Setup:
    """An experiment of a paper: model, data, sizes, and the planner that stands for its system."""

    planner: str
    graph: ModelGraph
    lengths: Sequence[SampleLengths]
    num_gpus: int
    global_batch_size: int
    fixed_sizes: Mapping[str, FixedSizes]
    micro_batch_size: int = 1
    passes: tuple[str, ...] = ("gather-parameters",)
    """Beside the planner's: parameters are gathered at the start of every step, as Megatron's distributed optimizer does."""
    balance: str | None = None
    """In place of the planner's."""
    recompute: Recompute | None = None
    execution: LayerExecution = DEFAULT_EXECUTION
    """The way in which the system runs its layers."""
    num_overlapped_parts: int = 1
    """Into which it cuts tensor parallel collectives."""
    num_batches: int = 1
    transformer_impl: Implementation | None = None
    """Of all layers; None: as the planner likes."""

    def request(self, cluster: Cluster) -> "PaperRequest":
        """Ask for a plan on a cluster."""
        return PaperRequest(
            self.graph,
            cluster,
            self.num_gpus,
            self.global_batch_size,
            tuple(self.lengths),
            micro_batch_size=self.micro_batch_size,
            vocab_size=self.graph.backbone.vocab_size or 50304,
            fixed_sizes=self.fixed_sizes,
            recompute=self.recompute,
            transformer_impl=self.transformer_impl,
            execution=self.execution,
            num_overlapped_parts=self.num_overlapped_parts,
        )

    def plan(self, cluster: Cluster) -> PlannedRun:
        """Plan; raises PlanError."""
        run = COMPARED[self.planner](self.request(cluster))
        passes = tuple(dict.fromkeys((*self.passes, *(name for name in run.passes if name != REDUCTION_BY_LAYER))))
        return replace(run, passes=passes, balance=self.balance or run.balance)

    def predict(self, run: PlannedRun, cluster: Cluster) -> Prediction:
        """Simulate a plan."""
        return judge_run(run, self.request(cluster).changed(num_batches=self.num_batches))

    def simulate(self, cluster: Cluster) -> Prediction:
        """Plan and simulate on the same cluster."""
        return self.predict(self.plan(cluster), cluster)

    def calibrate(self, cluster: Cluster, *, measured_seconds: float) -> Cluster:
        """Return the cluster on which the plan, made on the cluster as it is, takes what was measured."""
        run = self.plan(cluster)
        return calibrate_compute(
            cluster,
            predict_seconds=lambda each: self.predict(run, each).iteration_seconds,
            measured_seconds=measured_seconds,
        )


def read_model(name: str) -> ModelGraph:
    """Read a model file."""
    return ModelGraph.from_file(EXAMPLES / "models" / f"{name}.yaml")


def read_cluster(name: str) -> Cluster:
    """Read a cluster file."""
    return Cluster.from_file(EXAMPLES / "clusters" / f"{name}.yaml")
