"""Plans for what a run delivers where nodes fail: some stay idle as spares, so that the run seldom waits for a repair."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import PredictedRun, plan_sizes
from multimodal.values.errors import PlanError

NUM_SIZES = 4
"""Numbers of nodes that are planned for."""
LEAST_PROMISE = 0.95
"""Such a number must promise at least this share of the best one's goodput, if all nodes computed alike."""


@dataclass(frozen=True)
class Failures:
    """The failures of a cluster whose nodes fail and are repaired one by one; a run then restarts from its last checkpoint."""

    mtbf_hours: float
    """Mean hours between two failures of one node."""
    repair_hours: float = 24.0
    """Mean hours until a failed node is back."""
    restart_minutes: float = 10.0
    """Minutes from a failure until steps run again, on spare nodes."""
    checkpoint_minutes: float = 30.0
    """Minutes between two checkpoints, which are written beside the training: a failure takes back half of them."""

    def available_share(self, *, num_nodes: int, num_spares: int) -> float:
        """Return the share of time in which at most so many of all nodes are down at once: independent of each other."""
        from scipy.stats import binom  # loaded when first used

        return float(binom.cdf(num_spares, num_nodes, self.repair_hours / (self.mtbf_hours + self.repair_hours)))

    def running_share(self, num_nodes: int) -> float:
        """Return the share of the remaining time that is neither restarting nor repeating steps, for a run on so many nodes."""
        lost_hours = (self.restart_minutes + self.checkpoint_minutes / 2) / 60
        return 1 / (1 + num_nodes * lost_hours / self.mtbf_hours)


class Goodput(NamedTuple):
    """The expected throughput of a plan, failures included."""

    num_nodes: int
    num_spares: int
    available_share: float
    running_share: float
    tokens_per_second: float
    """The step's tokens per second times both shares."""

    def describe(self) -> str:
        """Return one line."""
        return (
            f"goodput {self.tokens_per_second:.5g} tokens/s, {self.tokens_per_second * 86400 * 30:.4g} in 30 days: "
            f"{self.num_nodes} nodes and {self.num_spares} spare ones, enough for {self.available_share:.2%} of the time; "
            f"{self.running_share:.2%} of that is neither restarting nor repeating"
        )


def goodput_of(planned: PredictedRun, request: PlanningRequest, failures: Failures) -> Goodput:
    """Return the goodput of a plan on the request's GPUs; those that it leaves are spares."""
    all_nodes, num_nodes = _whole_nodes(request), -(-planned.run.num_gpus // request.cluster.gpus_per_node)
    available = failures.available_share(num_nodes=all_nodes, num_spares=all_nodes - num_nodes)
    running = failures.running_share(num_nodes)
    tokens_per_second = planned.prediction.tokens_per_second_per_gpu * planned.run.num_gpus
    return Goodput(num_nodes, all_nodes - num_nodes, available, running, available * running * tokens_per_second)


def plan_for_goodput(
    plan: Callable[[PlanningRequest], PredictedRun], request: PlanningRequest, failures: Failures
) -> PredictedRun:
    """Return the plan with the highest goodput of those for a few numbers of spare nodes; raises PlanError.

    The numbers are those of the highest goodput if all nodes computed alike, among them round ones, which cut better.
    """
    all_nodes = _whole_nodes(request)

    def promise(num_nodes: int) -> float:
        available = failures.available_share(num_nodes=all_nodes, num_spares=all_nodes - num_nodes)
        return available * failures.running_share(num_nodes) * num_nodes

    most = max(range(1, all_nodes + 1), key=promise)
    rounded = (most - most % (1 << power) for power in range(all_nodes.bit_length()))
    promising = [each for each in dict.fromkeys(rounded) if each and promise(each) >= LEAST_PROMISE * promise(most)]
    tried = promising[:1] + promising[1:][::-1][: NUM_SIZES - 1]  # the best, and the largest below it with many divisors
    sizes = [nodes * request.cluster.gpus_per_node for nodes in tried]
    best = plan_sizes(plan, request, sizes, worth=lambda each: goodput_of(each, request, failures).tokens_per_second)
    notes = (goodput_of(best, request, failures).describe(), *best.run.notes)
    return best._replace(run=replace(best.run, notes=notes))


def _whole_nodes(request: PlanningRequest) -> int:
    num_nodes, rest = divmod(request.num_gpus, request.cluster.gpus_per_node)
    if rest:
        raise PlanError(
            f"{request.num_gpus} GPUs are no whole number of nodes of {request.cluster.gpus_per_node}, which fail as such; use "
            f"{max(1, num_nodes) * request.cluster.gpus_per_node} or leave the failures out"
        )
    return num_nodes
