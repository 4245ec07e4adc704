"""Costs of learned queries that attend to an encoder's tokens."""

from collections.abc import Mapping

from multimodal.cost.layers.encoder_ends import ProjectorLayer
from multimodal.cost.layers.layer import (
    WIDE_BYTES,
    ActivationBytes,
    ActivationCase,
    Exchange,
    LayerFlops,
    LayerTraffic,
    LinearShape,
    Segment,
)
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Queries, Unit
from multimodal.values.units.transformer import Transformer


class QueryProjectorLayer(ProjectorLayer):
    """In every layer: keys and values of all tokens, attention of the queries to them, and the queries' own products."""

    fits = staticmethod(lambda unit: unit.queries is not None)

    segments = (Segment("all", forward=(Exchange.GATHER, *2 * (Exchange.SUM,)), backward=3 * (Exchange.SUM,)),)
    counts = "inside"
    is_deep = True

    @classmethod
    def segments_in(cls, unit: Unit | None) -> tuple[Segment, ...]:
        """In every layer, a sum behind each attention and behind the MLP; in a backward, behind each product of whole rows."""
        if unit is None or unit.queries is None:
            return cls.segments
        own, num_layers = int(unit.queries.has_self_attention), unit.queries.num_layers
        forward = (Exchange.GATHER, *num_layers * (2 + own) * (Exchange.SUM,))
        return (Segment("all", forward=forward, backward=num_layers * (3 + own) * (Exchange.SUM,)),)

    @property
    def num_queries(self) -> int:
        """Learned queries of each item."""
        return self._queries.num_queries

    @property
    def num_weights(self) -> int:
        """Weights of all layers, and of the product behind them."""
        shape = self._shape
        return shape.num_layers * (self._token_weights + self._query_weights) + shape.hidden_size * self._output_size

    @property
    def linear_layers(self) -> Mapping[str, LinearShape]:
        """None: this layer has no adapters."""
        return {}

    @property
    def num_vector_entries(self) -> int:
        """Queries, norms and biases."""
        shape, own = self._shape, self._queries.has_self_attention
        hidden = shape.hidden_size
        norm = hidden * self.norm_vector_entries() // self.unit.transformer.hidden_size
        biases = (5 + 4 * own) * hidden + shape.ffn_hidden_size
        in_layers = shape.num_layers * ((2 + own) * norm + biases)
        return self.num_queries * hidden + self._norm_entries + in_layers + norm + self._output_size

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Linear in tokens, each of which is attended to by all queries of its item, and in queries."""
        shape, num_tokens = self._shape, load.num_tokens / self.unit.merge_factor
        attended = 4.0 * shape.hidden_size * self.num_queries
        of_tokens = shape.num_layers * (2.0 * self._token_weights + attended)
        of_queries = shape.num_layers * (2.0 * self._query_weights + attended * self._queries.has_self_attention)
        of_queries += 2.0 * shape.hidden_size * self._output_size
        return LayerFlops(of_tokens * num_tokens + of_queries * load.num_outputs)

    @property
    def num_products(self) -> int:  # type: ignore[override]
        """Five matrices in a layer, or seven with attention among queries; and the last product."""
        return self._shape.num_layers * (5 + 2 * self._queries.has_self_attention) + 1

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Keys and values of tokens, and for queries the bytes of a transformer layer; rows are whole on every rank."""
        shape, size, trains = self._shape, case.bytes_per_element, case.need.trains_weights
        hidden, inner, own = shape.hidden_size, shape.ffn_hidden_size, int(self._queries.has_self_attention)
        num_merged = load.num_tokens / self.unit.merge_factor
        merged_values = num_merged * self.unit.merged_size
        tokens = self._norm_kept(load.num_tokens, merged_values / self.unit.transformer.hidden_size, case)
        tokens += size * merged_values if trains else 0
        statistics = WIDE_BYTES * shape.num_attention_heads / hidden
        cross = size * (2 + trains) + statistics  # queries, attention's result, and that result with heads side by side
        among = size * (4 + trains) + statistics
        of_query = hidden * (cross + own * among) + size * inner * (2 if trains else 1)
        norm = self.norm_bytes(trains=trains, size=size, width=hidden) if case.implementation == "local" else size * hidden
        inputs = size * hidden if trains else 0
        split = shape.num_layers * (num_merged * size * 2 * hidden + load.num_outputs * of_query)
        replicated = load.num_outputs * ((2 + own) * shape.num_layers + 1) * (norm + inputs)
        return ActivationBytes(0.0, 1.0 * split, tokens + replicated)

    def traffic(self, bytes_per_element: int) -> LayerTraffic:
        """Tokens are normalised; keys and values are written and read."""
        own, written = self.unit.transformer.hidden_size, 2 * self._shape.num_layers * self._shape.hidden_size
        moved = float(bytes_per_element * (own + written / self.unit.merge_factor))
        return LayerTraffic(2 * moved, 3 * moved)

    @property
    def _queries(self) -> Queries:
        assert self.unit.queries is not None, f"unit '{self.unit.name}' has no queries"
        return self.unit.queries

    @property
    def _shape(self) -> Transformer:
        return self._queries.shape(self.unit.transformer)

    @property
    def _token_weights(self) -> int:
        """Weights that a layer multiplies merged tokens with."""
        return self.unit.merged_size * 2 * self._shape.hidden_size

    @property
    def _query_weights(self) -> int:
        """Weights that a layer multiplies queries with."""
        hidden = self._shape.hidden_size
        return hidden * ((2 + 4 * self._queries.has_self_attention) * hidden + 2 * self._shape.ffn_hidden_size)
