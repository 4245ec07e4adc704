"""Costs of a step from first principles: FLOPs over speed, bytes over bandwidth."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from multimodal.cost.cluster import Cluster
from multimodal.cost.communication import collective_seconds, message_cost
from multimodal.cost.flops import step_flops
from multimodal.cost.layer_costs import LayerCosts, Recompute
from multimodal.cost.layer_flops import UnitLoad, add_loads, item_load, layer_weights, sample_load
from multimodal.cost.layer_seconds import LayerSeconds, passes_gradient
from multimodal.cost.memory import GRADIENT_BYTES, layer_activation_bytes, layer_static_bytes
from multimodal.cost.step_costs import ComputeCost, TransferCost
from multimodal.values.assignment import Assignment, Atom, MicrobatchPlace
from multimodal.values.backward_need import BackwardNeed, layers_backward_need
from multimodal.values.model_graph import LayerKind, ModelGraph, Role
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import SampleLengths, index_by_sample
from multimodal.values.schedule import REPEATED_KINDS, Action, ActionKind, Place
from multimodal.values.schedule_form import parts_of

_StageKey = tuple[str, int, int]
"""(unit, replica, virtual stage)."""
_LayerCounts = Mapping[tuple[LayerKind, BackwardNeed], int]


@dataclass(frozen=True)
class ModelCosts:
    """`StepCosts` of one global batch on a cluster.

    A computation takes its layers' seconds (`LayerCosts`), with the collectives inside them, which nothing hides. A message is
    `num_tokens x hidden_size` elements. Replicas reduce fp32 gradients and gather the parameters of trained layers (ZeRO-1).
    """

    graph: ModelGraph
    plan: Plan
    assignment: Assignment
    lengths: Sequence[SampleLengths]
    """The global batch that the assignment places."""
    cluster: Cluster
    vocab_size: int
    """Padded."""
    recompute: Recompute | None = None

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """Seconds of single layers."""
        return LayerCosts(self.graph, self.cluster, self.vocab_size)

    @cached_property
    def model_flops(self) -> float:
        """Of the whole step."""
        return step_flops(self.graph, self.lengths, vocab_size=self.vocab_size)

    @property
    def peak_flops_per_second(self) -> float:
        """Of all ranks together."""
        return self.plan.num_ranks * self.cluster.peak_tflops * 1e12

    def compute(self, action: Action) -> ComputeCost:
        """Cost of one computation; a part's backward costs its own atoms' share."""
        load = self._load_of(action)
        kind = REPEATED_KINDS.get(action.kind, action.kind)
        return self._compute_cost(kind, action.unit, action.replica, action.stage, load)

    def transfer(self, send: Action) -> TransferCost:
        """Cost of the message that a send starts: inside a unit its hidden states, between units the routed atoms' outputs."""
        assert send.peer is not None, f"{send} has no peer"
        source, target = (send.place, send.peer) if send.kind is ActionKind.SEND_FORWARD else (send.peer, send.place)
        num_bytes = self.cluster.bytes_per_element * self._num_elements(source, target, part=send.part)
        latency_seconds, seconds_per_byte, link = self._link(send[1:4], send.peer[:3])
        return TransferCost(latency_seconds, num_bytes * seconds_per_byte, link)

    def collective_seconds(self, action: Action) -> float:
        """Seconds of gathering a stage's parameters or reducing its gradients (fp32) over the unit's replicas."""
        bytes_per_weight = GRADIENT_BYTES if action.kind is ActionKind.REDUCE_GRADIENTS else self.cluster.bytes_per_element
        unit = self.plan.units[action.unit]
        num_weights = self._num_weights(action.unit, action.replica, action.stage, trained_only=True) / unit.tensor_parallel_size
        peers = [replica.virtual_stages[action.stage].ranks[0] for replica in unit.replicas]
        return collective_seconds(bytes_per_weight * num_weights, ranks=peers, cluster=self.cluster)

    def activation_bytes(self, place: Place) -> int:
        """Bytes per rank that one microbatch keeps in one stage."""
        return self._activation_bytes(place.unit, place.replica, place.stage, self._load_at(place))

    def static_bytes(self, lane: int) -> int:
        """Bytes per rank of weights, gradients and optimizer state of all stages that a lane holds."""
        held = self._stages_of_rank[self.plan.lanes[lane][0]]
        return round(sum(self._static_bytes(*stage) / self.plan.units[stage[0]].tensor_parallel_size for stage in held))

    @cached_property
    def _lengths_by_sample(self) -> Mapping[int, SampleLengths]:
        return index_by_sample(self.lengths)

    @cached_property
    def _loads(self) -> dict[tuple[str, int, int], UnitLoad]:
        return {}

    def _load_at(self, place: Place) -> UnitLoad:
        key = place.unit, place.replica, place.microbatch
        if key not in self._loads:
            self._loads[key] = self._atoms_load(place.unit, self.assignment.atoms(MicrobatchPlace(*key)))
        return self._loads[key]

    def _load_of(self, action: Action) -> UnitLoad:
        if action.part < 0:
            return self._load_at(action.work)
        place = MicrobatchPlace(action.unit, action.replica, action.microbatch)
        return self._atoms_load(action.unit, parts_of(place, self.graph, self.assignment)[action.part])

    def _atoms_load(self, unit: str, atoms: Sequence[Atom]) -> UnitLoad:
        return add_loads(self._atom_load(unit, atom) for atom in atoms)

    def _atom_load(self, unit: str, atom: Atom) -> UnitLoad:
        sample = self._lengths_by_sample[atom.sample_id]
        if atom.item_index < 0:
            return sample_load(self.graph.unit(unit), sample)
        return item_load(sample.items[atom.item_index].num_tokens, sample.items[atom.item_index].num_output_tokens)

    def _num_elements(self, source: Place, target: Place, *, part: int) -> int:
        """Elements of the activations that travel from `source` to `target`; gradients have as many."""
        hidden = self.graph.unit(source.unit).transformer.hidden_size
        if source.unit == target.unit:
            load = self._load_at(source) if part < 0 else self._load_of(Action(ActionKind.BACKWARD, *source, part=part))
            return load.num_tokens * hidden
        here = MicrobatchPlace(source.unit, source.replica, source.microbatch)
        there = MicrobatchPlace(target.unit, target.replica, target.microbatch)
        routes = self.assignment.routes(self.graph).from_source[here]
        load = self._atoms_load(source.unit, next(route.atoms for route in routes if route.target == there))
        if self.graph.unit(source.unit).role is Role.ENCODER:
            return load.num_outputs * self.graph.unit(target.unit).transformer.hidden_size
        return load.num_tokens * hidden

    @cached_property
    def _links(self) -> dict[tuple[_StageKey, _StageKey], TransferCost]:
        return {}

    def _link(self, source: _StageKey, target: _StageKey) -> TransferCost:
        """What one byte between two stages costs."""
        if (source, target) not in self._links:
            self._links[source, target] = message_cost(
                1.0,
                source_ranks=self.plan.virtual_stage(*source).ranks,
                target_ranks=self.plan.virtual_stage(*target).ranks,
                cluster=self.cluster,
            )
        return self._links[source, target]

    @cached_property
    def _stages_of_rank(self) -> Mapping[int, Sequence[_StageKey]]:
        found: dict[int, list[_StageKey]] = defaultdict(list)
        for name, unit in self.plan.units.items():
            for replica_index, replica in enumerate(unit.replicas):
                for stage in replica.virtual_stages:
                    for rank in stage.ranks:
                        found[rank].append((name, replica_index, stage.index))
        return found

    @cached_property
    def _needs(self) -> Mapping[str, Sequence[BackwardNeed]]:
        return {
            unit.name: [layers_backward_need(self.graph, unit.name, range(layer, layer + 1)) for layer in range(len(unit.layers))]
            for unit in self.graph.units
        }

    @cached_property
    def _stages(self) -> dict[_StageKey, _LayerCounts]:
        return {}

    def _layers(self, unit: str, replica: int, stage: int) -> _LayerCounts:
        """Count the layers of a stage by what their cost depends on."""
        key = unit, replica, stage
        if key not in self._stages:
            layers = self.plan.virtual_stage(unit, replica, stage).layers
            self._stages[key] = Counter((self.graph.unit(unit).layers[layer], self._needs[unit][layer]) for layer in layers)
        return self._stages[key]

    @cached_property
    def _compute_costs(self) -> dict[tuple[ActionKind, str, int, int, UnitLoad], ComputeCost]:
        return {}

    def _compute_cost(self, kind: ActionKind, unit: str, replica: int, stage: int, load: UnitLoad) -> ComputeCost:
        key = kind, unit, replica, stage, load
        if key not in self._compute_costs:
            self._compute_costs[key] = self._sum_layers(*key)
        return self._compute_costs[key]

    def _sum_layers(self, kind: ActionKind, unit: str, replica: int, stage: int, load: UnitLoad) -> ComputeCost:
        ranks = self.plan.virtual_stage(unit, replica, stage).ranks
        seconds, waiting = 0.0, 0.0
        for (layer, need), count in self._layers(unit, replica, stage).items():
            one = self.layer_costs.seconds(
                unit,
                layer,
                load,
                tensor_parallel_size=self.plan.units[unit].tensor_parallel_size,
                context_parallel_size=self.plan.units[unit].context_parallel_size,
                recompute=self.recompute,
                ranks=ranks,
            )
            cost = _cost_of(kind, one, layer, need)
            seconds, waiting = seconds + count * cost.seconds, waiting + count * cost.tensor_parallel_seconds
        return ComputeCost(seconds, waiting)

    def _activation_bytes(self, unit: str, replica: int, stage: int, load: UnitLoad) -> int:
        total = sum(
            count * layer_activation_bytes(self.graph.unit(unit), layer, load, need=need, vocab_size=self.vocab_size)
            for (layer, need), count in self._layers(unit, replica, stage).items()
        )
        return round(total / self.plan.units[unit].tensor_parallel_size)

    def _num_weights(self, unit: str, replica: int, stage: int, *, trained_only: bool) -> int:
        return sum(
            count * layer_weights(self.graph, self.graph.unit(unit), layer, vocab_size=self.vocab_size)
            for (layer, need), count in self._layers(unit, replica, stage).items()
            if need.trains_weights or not trained_only
        )

    def _static_bytes(self, unit: str, replica: int, stage: int) -> float:
        num_trained = self._num_weights(unit, replica, stage, trained_only=True)
        num_frozen = self._num_weights(unit, replica, stage, trained_only=False) - num_trained
        num_replicas = self.plan.units[unit].data_parallel_size
        return layer_static_bytes(num_trained, is_trained=True, data_parallel_size=num_replicas) + layer_static_bytes(
            num_frozen, is_trained=False, data_parallel_size=num_replicas
        )


def _cost_of(kind: ActionKind, one: LayerSeconds, layer: LayerKind, need: BackwardNeed) -> ComputeCost:
    """Return what one computation asks of one layer."""
    if kind is ActionKind.FORWARD:
        return ComputeCost(one.forward, one.forward_waiting)
    if kind is ActionKind.WEIGHT_GRADIENT:
        return ComputeCost(one.weight_gradient if need.trains_weights else 0.0)
    passes = passes_gradient(layer, need)
    waiting = one.input_gradient_waiting if passes else 0.0
    if kind is ActionKind.INPUT_GRADIENT:
        return ComputeCost(one.input_gradient if passes else 0.0, waiting)
    return ComputeCost(one.backward(layer, need), waiting)
