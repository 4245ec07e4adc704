"""Costs of messages from stage to stage, for all stages of a plan at once."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from multimodal.cost.cluster import Cluster
from multimodal.cost.communication import TransferCost, cost_between_nodes, cost_inside_node, exchange_cost
from multimodal.cost.unit_load import Floats
from multimodal.values.arrays.rows import Integers
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan

_INSIDE, _BETWEEN, _EXCHANGED = range(3)
_SEVERAL_NODES = -1


@dataclass(frozen=True)
class StageLinks:
    """Seconds per byte of a message between stages; stages are numbered as in `StepWork`."""

    graph: ModelGraph
    plan: Plan
    cluster: Cluster

    def of_messages(self, sources: Integers, targets: Integers, num_bytes: Integers) -> tuple[Floats, Floats, Integers]:
        """Return latencies, occupied seconds and links; inside one group of ranks, a message is an exchange of rows."""
        groups, nodes, costs = self._stages
        is_inside = (nodes[sources] == nodes[targets]) & (nodes[sources] != _SEVERAL_NODES)
        ways = np.where(groups[sources] == groups[targets], _EXCHANGED, np.where(is_inside, _INSIDE, _BETWEEN))
        latencies, seconds_per_byte, links = costs[ways, sources].T
        return latencies, num_bytes * seconds_per_byte, links.astype(np.int64)

    @cached_property
    def _stages(self) -> tuple[Integers, Integers, Floats]:
        """Return for each stage the number of its rank group, its node, and the cost of one byte by kind of link."""
        groups: dict[frozenset[int], int] = {}
        of_stages: list[int] = []
        nodes: list[int] = []
        costs: list[list[TransferCost]] = []
        for unit in self.graph.unit_names:
            plan = self.plan.units[unit]
            for stage in range(plan.num_virtual_stages):
                for replica in plan.replicas:
                    if stage >= len(replica.virtual_stages):
                        of_stages.append(0)
                        continue
                    ranks = replica.virtual_stages[stage].ranks
                    group = groups.setdefault(frozenset(ranks), len(groups))
                    if group == len(costs):
                        nodes.append(self.cluster.node(ranks[0]) if self.cluster.is_one_node(ranks) else _SEVERAL_NODES)
                        costs.append(self._ways(ranks))
                    of_stages.append(group)
        numbers = np.array(of_stages, np.int64)
        return numbers, np.array(nodes, np.int64)[numbers], np.array(costs, np.float64)[numbers].swapaxes(0, 1)

    def _ways(self, ranks: tuple[int, ...]) -> list[TransferCost]:
        """Return the cost of one byte from these ranks, by kind of link."""
        return [
            cost_inside_node(1.0, source_ranks=ranks, cluster=self.cluster),
            cost_between_nodes(1.0, source_ranks=ranks, cluster=self.cluster),
            exchange_cost(1.0, ranks=ranks, cluster=self.cluster),
        ]
