"""Costs of a layer: the base class of all kinds of layers, and the values that it returns."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.collectives import LayerCollectives
from multimodal.cost.seconds.layer_curves import Counts, Quadratic, counted_tokens
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.errors import ModelError
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import ModelGraph, Role, Unit
from multimodal.values.units.unit import NEW_ROWS

Recompute = Literal["selective", "full"]
"""The work that a layer's backward repeats: core attention (`selective`) or the whole layer (`full`)."""
Implementation = Literal["local", "transformer_engine"]
"""Implementation of transformer layers (--transformer-impl): megatron-core's torch layers, or fused kernels."""
Position = Literal["first", "between", "last"]
WIDE_BYTES = 4
"""Norms, logits and statistics are fp32 even if layers compute in bf16."""
INDEX_BYTES = 8


class LayerFlops(NamedTuple):
    """Forward FLOPs of a layer. Each kind of gradient costs as much for weights; attention's backward costs twice its forward."""

    linear: float
    """Matrix products with weights."""
    attention: float = 0.0
    """Attention itself: products of activations with activations."""
    frozen: float = 0.0
    """A frozen module's before the layer, which has no backward and which every rank that shares the layer repeats."""


class LayerTraffic(NamedTuple):
    """Bytes that the elementwise work on one counted token moves through memory, all tensor parallel ranks together.

    Matrix products reuse what they load and are bound by arithmetic; norms, residuals, activation functions, rotations and
    softmax are bound by memory: seconds = bytes / bandwidth.
    """

    forward: float
    input_gradient: float
    """Bytes of the whole backward: weight gradients are matrix products, which read their inputs themselves."""


class ActivationBytes(NamedTuple):
    """Bytes that one layer keeps from its forward to the end of its backward, as if one rank had the whole layer."""

    whole: float = 0.0
    """Divided by sequence parallelism only."""
    split: float = 0.0
    """Divided by tensor parallelism: heads, inner widths, the vocabulary."""
    replicated: float = 0.0
    """Not divided: every tensor parallel rank keeps all of it."""

    def all_ranks(self, *, tensor_parallel_size: int = 1, sequence_parallel: bool = True) -> float:
        """Bytes of all tensor parallel ranks together."""
        copies = 1 if sequence_parallel else tensor_parallel_size
        return copies * self.whole + self.split + tensor_parallel_size * self.replicated


class LinearShape(NamedTuple):
    """A linear layer inside a layer."""

    num_inputs: int
    num_outputs: int
    is_split_by_inputs: bool = False
    """True if tensor parallel ranks share its inputs, False if they share its outputs."""
    num_alike: int = 1
    """Linear layers of this name and shape in the layer."""

    def num_adapter_weights(self, rank: int) -> int:
        """Return the weights of adapters of this rank."""
        return self.num_alike * rank * (self.num_inputs + self.num_outputs)


class ActivationCase(NamedTuple):
    """Everything except the load that determines the bytes kept by a layer."""

    need: BackwardNeed
    bytes_per_element: int = 2
    """Size of an activation."""
    implementation: Implementation = "transformer_engine"
    recompute: Recompute | None = None
    is_spread: bool = False
    """True if attention gathers keys and values of other context parallel ranks; gathered ones are not kept."""


class Exchange(Enum):
    """A collective of tensor parallel ranks."""

    GATHER = "gather"
    """Gathers rows before a product; only under sequence parallelism, as all ranks have all rows without it."""
    GATHER_AGAIN = "gather again"
    """Gathers the rows of a product again for its weight gradient, beside another product, so that ranks hardly wait for it. Only
    under sequence parallelism, if the weight or its adapter is trained. A range of segments keeps the rows instead."""
    SUM = "sum"
    """Sums the results of a product."""

    @property
    def mirrored(self) -> "Exchange":
        """The collective of a gradient whose value has this collective in the forward."""
        return Exchange.GATHER if self is Exchange.SUM else Exchange.SUM


GATHER, GATHER_AGAIN, SUM = Exchange.GATHER, Exchange.GATHER_AGAIN, Exchange.SUM


class Segment(NamedTuple):
    """A part of a layer that can run on its own, and its collectives in the order of a pass."""

    name: str
    forward: tuple[Exchange, ...] = ()
    """Collectives inside the segment."""
    backward: tuple[Exchange, ...] = ()
    behind: Exchange | None = None
    """The collective between this segment and the next one in a forward; a backward has the mirrored one there."""
    product: str = ""
    """The linear layer in the segment, if it may have adapters."""


class SegmentWork(NamedTuple):
    """The computing of one segment, all tensor parallel ranks together."""

    num_weights: int
    traffic: tuple[float, float]
    """Bytes per token that elementwise work moves in a forward and in a backward, as in `LayerTraffic`."""
    attends: bool
    """True if tokens attend to each other in it."""


@cache
def read_config(directory: str) -> dict[str, Any]:
    """Return the config.json of a folder; nothing where the folder is not on this machine. Raises ModelError."""
    path = Path(directory) / "config.json"
    return dict(read_mapping(path, error=ModelError)) if path.is_file() else {}


@dataclass(frozen=True)
class Layer:
    """One layer of a unit. A kind of layer is a subclass, registered in `registry.py`; all tensor parallel ranks count together.

    FLOPs are counted as in Megatron's formula: 2 per multiply-add, causal attention at half its square, no recomputation; norms,
    biases and other elementwise work are left out.
    """

    graph: ModelGraph
    unit: Unit
    vocab_size: int
    """Padded."""
    adapted: tuple[str, ...] = ()
    """Names of `linear_layers` that have adapters, or `NEW_ROWS`; the layer's own weights are then frozen."""

    position: ClassVar[Position] = "between"
    """Allowed position in a unit's list of layers."""
    roles: ClassVar[tuple[Role, ...]] = tuple(Role)
    """Roles of the units that may have it."""
    fits: ClassVar["staticmethod[[Unit], bool]"] = staticmethod(lambda unit: True)
    """True if such a unit may have the layer, provided that position and role are right."""
    is_built_in: ClassVar["staticmethod[[Unit], bool]"] = staticmethod(lambda unit: True)
    """True if such a unit is described as far as multimodal/model needs it to build the layer; others are only planned."""
    num_products: ClassVar[int] = 1
    """Matrix products with weights in a forward."""
    counts: ClassVar[Counts] = "inside"
    """Tokens that the cost depends on."""
    attends: ClassVar[bool] = False
    """True if tokens attend to each other, so that the cost depends on how they are packed into sequences."""
    scales_branches: ClassVar[bool] = False
    """True if the output of its last product is multiplied, so that full recomputation computes that, too."""
    recomputes: ClassVar[bool] = False
    """True if full recomputation keeps only the layer's input."""
    segments: ClassVar[tuple[Segment, ...]] = (Segment("all"),)
    """The parts that can run on their own, in the order of a forward, as multimodal/model cuts the layer."""
    exchanges_tokens: ClassVar[bool] = False
    """True if replicas that share experts compute the layer together: tokens go to the ranks of their experts and back."""
    is_deep: ClassVar[bool] = False
    """True if training the layer's weights takes nearly all of its input gradient. Other layers are about one matrix deep."""

    @classmethod
    def segments_in(cls, unit: Unit | None) -> tuple[Segment, ...]:
        """Return `segments` with the collectives of a layer of this unit, for kinds with more collectives in some units."""
        return cls.segments

    @property
    def num_queries(self) -> int:
        """Tokens that each sequence adds to its own in the layer's products: learned queries; 0 without them."""
        return 0

    @property
    def num_weights(self) -> int:
        """Weights of the layer's matrices, by default those of `linear_layers`."""
        return sum(shape.num_alike * shape.num_inputs * shape.num_outputs for shape in self.linear_layers.values())

    @property
    def num_expert_weights(self) -> int:
        """Weights of experts, which expert parallel ranks share; part of `num_weights`."""
        return 0

    @property
    def expert_share(self) -> float:
        """Share of the experts in a token's products with weights."""
        return 0.0

    @property
    def num_vector_entries(self) -> int:
        """Entries of norms and biases."""
        return 0

    @property
    def linear_layers(self) -> Mapping[str, LinearShape]:
        """The linear layers that may have adapters, in the order of a forward, under their names in multimodal/model."""
        return {}

    @property
    def num_adapter_weights(self) -> int:
        """Weights of adapters, and those added to new rows of the vocabulary."""
        new_rows = len(range(*self.unit.new_tokens)) if self.unit.new_tokens and NEW_ROWS in self.adapted else 0
        of_rows = new_rows * self.unit.transformer.hidden_size
        return sum(shape.num_adapter_weights(self._rank) for shape in self._adapted_shapes) + of_rows

    def segment_adapter_weights(self, segment: Segment) -> int:
        """Weights of the adapters in a segment; of all adapters if the layer is one segment."""
        if len(self.segments) == 1:
            return self.num_adapter_weights
        is_adapted = segment.product in self.adapted
        return self.linear_layers[segment.product].num_adapter_weights(self._rank) if is_adapted else 0

    @property
    def num_held_weights(self) -> int:
        """Weights of matrices, adapters included."""
        return self.num_weights + self.num_adapter_weights

    def num_trained_weights(self, need: BackwardNeed) -> int:
        """Weights with gradients: none, all, or those of adapters if it has some."""
        return (self.num_adapter_weights or self.num_weights) if need.trains_weights else 0

    @property
    def num_parameters(self) -> int:
        """Parameters, exactly as multimodal/model builds them."""
        return self.num_held_weights + self.num_vector_entries

    @property
    def _adapted_shapes(self) -> Sequence[LinearShape]:
        return [self.linear_layers[name] for name in self.adapted if name != NEW_ROWS]

    @property
    def _rank(self) -> int:
        return self.unit.lora.rank if self.unit.lora is not None else 0

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """FLOPs of a forward over a load."""
        return LayerFlops(2.0 * self._num_counted(load) * self.num_weights)

    def adapter_flops(self, load: UnitLoad) -> float:
        """FLOPs of the adapters in a forward; each kind of gradient takes as many."""
        return 2.0 * self._num_counted(load) * self.num_adapter_weights

    def weight_gradient_flops(self, load: UnitLoad) -> float:
        """FLOPs of weight gradients where weights are trained: those of adapters if there are some."""
        return self.adapter_flops(load) if self.adapted else self.forward_flops(load).linear

    def _num_counted(self, load: UnitLoad) -> int:
        return counted_tokens(load, counts=self.counts)[0]

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Bytes kept by a layer with a backward, with its products' inputs if its weights are trained; loads may be arrays."""
        return ActivationBytes()

    def kept_inputs(self, case: ActivationCase) -> Collection[str]:
        """Names of `linear_layers` whose input is kept by what made it, whether or not their weights are trained."""
        return ()

    def activation_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Bytes kept for one microbatch's load; 0 without a backward."""
        if not case.need.has_backward:
            return ActivationBytes()
        if not self.adapted:
            return self.saved_bytes(load, case)
        kept = self.saved_bytes(load, case._replace(need=BackwardNeed.INPUT_GRADIENT))
        if case.recompute == "full" and self.recomputes:
            return kept
        # Adapters keep their inputs and the output of the first product, on every tensor parallel rank.
        per_input, shapes = 1.0 * case.bytes_per_element * self._num_counted(load), self._adapted_shapes
        kept_anyway = self.kept_inputs(case)
        read = [shape for name, shape in self.linear_layers.items() if name in self.adapted and name not in kept_anyway]
        whole, split = (
            per_input * sum(each.num_alike * each.num_inputs for each in read if each.is_split_by_inputs == is_split)
            for is_split in (False, True)
        )
        replicated = kept.replicated + per_input * self._rank * sum(each.num_alike for each in shapes)
        if self.counts == "leaving":  # such layers gather their tokens before their products
            return ActivationBytes(kept.whole, kept.split + split, replicated + whole)
        return ActivationBytes(kept.whole + whole, kept.split + split, replicated)

    def traffic(self, bytes_per_element: int) -> LayerTraffic:
        """Bytes moved per counted token, with one kernel for each operation; by default input read and output written."""
        moved = float(2 * bytes_per_element * self.unit.transformer.hidden_size)
        return LayerTraffic(moved, moved)

    def segment_work(self, bytes_per_element: int) -> tuple[SegmentWork, ...]:
        """Return the work of each segment, in order. Kinds with several segments divide weights and bytes among them."""
        return (SegmentWork(self.num_weights, self.traffic(bytes_per_element), attends=True),)

    def collectives(self, *, tensor_parallel_size: int, ranks: Sequence[int], cluster: Cluster) -> LayerCollectives:
        """Collectives inside the layer; ranks: the stage's, with the tensor parallel rank as the faster index."""
        return LayerCollectives()

    def expert_exchange(self, *, context_parallel_size: int, ranks: Sequence[int], cluster: Cluster) -> Quadratic:
        """Seconds of both token exchanges in a pass, by the tokens of a microbatch; ranks: those that share experts."""
        return Quadratic()

    @classmethod
    def passes_gradient(cls, need: BackwardNeed) -> bool:
        """True if a gradient passes through the layer; in a deep one also if only its own weights are trained."""
        return need.sends_gradient or (need.trains_weights and cls.is_deep)

    @property
    def input_values(self) -> int:
        """Values from which a token of a unit's first layer is made, or that a generator makes of a token."""
        found = self.unit.item_input
        return found.num_patch_values if found is not None else self.unit.transformer.hidden_size

    def norm_vector_entries(self, normalization: str | None = None) -> int:
        """Parameters of one norm over hidden states; normalization: None: the unit's."""
        kind = normalization or self.unit.transformer.normalization
        return self.unit.transformer.hidden_size * (2 if kind == "LayerNorm" else 1)

    def norm_bytes(self, *, trains: bool, size: int, is_passed: bool = True, width: int | None = None) -> float:
        """Bytes per token that a torch norm keeps: its input, at least in fp32, and its statistics.

        RMSNorm with a trained weight also keeps the normalised input; if no gradient of the input is needed (is_passed is False),
        it keeps only the normalised input. width: None: hidden_size.
        """
        wide, hidden = max(size, WIDE_BYTES), width or self.unit.transformer.hidden_size
        if self.unit.transformer.normalization == "LayerNorm":
            return float(wide * (hidden + 2))
        return float(wide * (hidden * (is_passed + trains) + 1))

    def exit_norm_bytes(self, case: ActivationCase) -> float:
        """Bytes per token that the norm before a unit's last product keeps."""
        size = case.bytes_per_element
        if case.implementation != "local":
            return float(size * self.unit.transformer.hidden_size)
        return self.norm_bytes(trains=case.need.trains_weights, size=size, is_passed=case.need.sends_gradient)
