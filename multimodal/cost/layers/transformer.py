"""A transformer layer: norm and QKV, attention, projection, norm, MLP up, MLP down; and DiT's, which a flow's time modulates."""

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from multimodal.cost.cluster import Cluster
from multimodal.cost.layers.collectives import LayerCollectives, collective_per_token
from multimodal.cost.layers.layer import (
    GATHER,
    GATHER_AGAIN,
    SUM,
    WIDE_BYTES,
    ActivationBytes,
    ActivationCase,
    Layer,
    LayerFlops,
    LayerTraffic,
    LinearShape,
    Segment,
    SegmentWork,
    read_config,
)
from multimodal.cost.unit_load import UnitLoad
from multimodal.values.model_graph import Role

_PER_PASS = 4
"""All-gathers and reduce-scatters of activations: twice each per pass (sequence parallelism)."""


class TransformerLayer(Layer):
    """Attention and MLP in the shape of the unit's `transformer`."""

    num_products = 4
    segments: ClassVar[tuple[Segment, ...]] = (
        Segment("input_norm", behind=GATHER),
        Segment("qkv", backward=(GATHER_AGAIN,), product="linear_qkv"),
        Segment("attention"),
        Segment("projection", behind=SUM, product="linear_proj"),
        Segment("mlp_norm", behind=GATHER),
        Segment("mlp_up", backward=(GATHER_AGAIN,), product="linear_fc1"),
        Segment("mlp_down", behind=SUM, product="linear_fc2"),
    )
    attends = True
    recomputes = True
    is_deep = True

    @property
    def linear_layers(self) -> Mapping[str, LinearShape]:
        """One linear layer in each segment except attention."""
        shape, (query, key_value) = self.unit.transformer, self._widths
        inner = shape.ffn_hidden_size
        return {
            "linear_qkv": LinearShape(shape.hidden_size, query + key_value),
            "linear_proj": LinearShape(query, shape.hidden_size, is_split_by_inputs=True),
            "linear_fc1": LinearShape(shape.hidden_size, inner * (2 if shape.is_gated else 1)),
            "linear_fc2": LinearShape(inner, shape.hidden_size, is_split_by_inputs=True),
        }

    @property
    def num_vector_entries(self) -> int:
        """Two norms, and biases as the shape has them."""
        shape = self.unit.transformer
        head_norms = 2 * shape.head_channels * self.norm_vector_entries() // shape.hidden_size if shape.qk_layernorm else 0
        head_norms *= shape.num_attention_heads if shape.qk_norm_spans_heads else 1
        scales = 2 * shape.hidden_size if shape.has_layer_scale else 0
        return (4 if shape.has_post_norms else 2) * self.norm_vector_entries() + head_norms + self._num_biases + scales

    @property
    def _num_biases(self) -> int:
        shape = self.unit.transformer
        inner = shape.ffn_hidden_size * (2 if shape.is_gated else 1)
        outputs = sum(self._widths), shape.hidden_size, inner, shape.hidden_size
        return sum(size for size, has_bias in zip(outputs, shape.biases.values(), strict=True) if has_bias)

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Products with weights are linear in tokens, attention in the squares of sequences."""
        masked = 0.5 if self.unit.is_causal else 1.0
        return LayerFlops(2.0 * load.num_tokens * self.num_weights, 4.0 * self._widths[0] * load.num_squared * masked)

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """Bytes by implementation; with full recomputation only the input."""
        if case.recompute == "full":
            return ActivationBytes(1.0 * case.bytes_per_element * load.num_tokens * self.unit.transformer.hidden_size)
        is_selective, is_local = case.recompute == "selective", case.implementation == "local"
        trains, size = case.need.trains_weights, case.bytes_per_element
        if is_local:
            whole, split = self._local_bytes(trains=trains, size=size, is_selective=is_selective or case.is_spread)
        else:
            whole, split = self._fused_bytes(trains=trains, size=size, is_selective=is_selective, is_spread=case.is_spread)
        mlp = self._mlp_bytes(trains=trains, size=size, is_fused=not is_local)
        tokens = load.num_tokens
        return ActivationBytes(tokens * (whole + mlp.whole), tokens * (split + mlp.split), tokens * mlp.replicated)

    def kept_inputs(self, case: ActivationCase) -> Collection[str]:
        """Attention keeps its output, which is the projection's input; over several ranks, one beside it."""
        keeps_output = case.recompute != "selective" and not case.is_spread
        return ("linear_proj",) if keeps_output else ()

    def _mlp_bytes(self, *, trains: bool, size: int, is_fused: bool) -> ActivationBytes:
        """Bytes per token of the MLP: first product, torch's intermediate values, inputs of products with trained weights.

        A fused kernel keeps only the first product. Otherwise SwiGLU keeps the activated gate, too, and other gated functions
        both factors of their product.
        """
        shape = self.unit.transformer
        if is_fused:
            inner = shape.ffn_hidden_size * (2 if shape.is_gated else 1)
        else:
            num_gated = 3 if shape.activation == "swiglu" else 4
            inner = shape.ffn_hidden_size * ((num_gated if shape.is_gated else 1) + shape.activation.startswith("quick"))
        inputs = shape.ffn_hidden_size if trains else 0
        return ActivationBytes(float(size * shape.hidden_size if trains else 0), float(size * (inner + inputs)))

    def _fused_bytes(self, *, trains: bool, size: int, is_selective: bool, is_spread: bool) -> tuple[float, float]:
        """Bytes per token that fused kernels keep beside the MLP, whole and split.

        Source: Korthikanti et al., 2022, section 4, with flash attention. Inputs of both norms (2h), queries, keys, values and
        the attention's output; if weights are trained, also the input of qkv's product (h). With the MLP, GPT's shape has 32h
        bytes in bf16: Korthikanti's 34h less its two dropout masks. Attention over several ranks computes its output group by
        group of heads, so it keeps its own output beside the projection's input.
        """
        shape = self.unit.transformer
        query, key_value = self._widths
        output = query if trains or not is_selective else 0
        if is_spread and trains and not is_selective:
            output += query
        whole = shape.hidden_size * (3 if trains else 2)
        return float(size * whole), float(size * (query + key_value + output))

    def _local_bytes(self, *, trains: bool, size: int, is_selective: bool) -> tuple[float, float]:
        """Bytes per token that torch's autograd saves beside the MLP, whole and split; checked against real stages.

        Rotated queries and keys and the cosines and sines of both; keys and values repeated to as many heads as queries have
        (without repetition the values are a view that keeps the whole qkv product); the attention's output, which is the input of
        the projection, too; norms as `norm_bytes`.
        """
        shape = self.unit.transformer
        query, key_value = self._widths
        qkv = query + key_value
        num_norms = 4 if shape.has_post_norms else 2
        whole = num_norms * self.norm_bytes(trains=trains, size=size) + (size * shape.hidden_size if trains else 0.0)
        whole += 2 * size * shape.hidden_size if shape.has_layer_scale and trains else 0
        whole += 4 * size * shape.head_channels if shape.has_rotary_positions else 0
        is_repeated = shape.query_groups < shape.num_attention_heads
        if is_selective:
            attention = float(size * (query + key_value / 2 + qkv + (query if trains else 0)))
        else:
            attention = size * (3 * query + (query if is_repeated else qkv)) + WIDE_BYTES * shape.num_attention_heads
        if not shape.has_rotary_positions and (is_selective or not is_repeated):
            attention -= size * (query + key_value / 2)  # views of the qkv product, not rotated copies
        if shape.qk_layernorm:
            attention += self._head_norm_bytes(trains=trains, size=size, is_selective=is_selective)
        return whole, attention

    def _head_norm_bytes(self, *, trains: bool, size: int, is_selective: bool) -> float:
        """Bytes per token that torch's norms of queries and keys keep: inputs, normalised values and statistics.

        Narrow inputs are kept as wide copies. Wide inputs are views of the qkv product, which would not be kept where keys and
        values are repeated; the queries of several heads to a group are copied out of it instead.
        """
        shape, wide = self.unit.transformer, max(size, WIDE_BYTES)
        query, key_value = self._widths
        is_repeated = shape.query_groups < shape.num_attention_heads
        if wide > size:
            inputs = wide * (query + key_value // 2)
        else:
            inputs = size * is_repeated * (query + (0 if is_selective else query + key_value))
        normal = wide * (query + key_value // 2) if trains else 0
        return float(inputs + normal + wide * (shape.num_attention_heads + shape.query_groups))

    def traffic(self, bytes_per_element: int) -> LayerTraffic:
        """Sum over the segments."""
        return LayerTraffic(*map(sum, zip(*(each.traffic for each in self.segment_work(bytes_per_element)), strict=True)))

    def segment_work(self, bytes_per_element: int) -> tuple[SegmentWork, ...]:
        """Weights, and elements per token, h the hidden size, f the inner one, r queries and keys together.

        | segment | operation | forward | backward |
        |---|---|---|---|
        | norms | norm | read and write: 2h | read the gradient and the input, write: 3h |
        | norms | residual sum (the first of the layer before) | read two, write one: 3h | gradients are added: 3h |
        | qkv | norms of heads, if any | read and write: 2r | read the gradient and the input, write: 3r |
        | attention | rotary positions, if any | read and write: 2r | the same |
        | mlp down | GELU | read and write: 2f | read the gradient and the input, write: 3f |
        | | or SwiGLU | read two, write one: 3f | read the gradient and two inputs, write two: 5f |
        """
        shape, hidden, size = self.unit.transformer, self.unit.transformer.hidden_size, float(bytes_per_element)
        heads = 2 * (shape.num_attention_heads + shape.query_groups) * shape.head_channels
        rotated, normed = heads * shape.has_rotary_positions, heads * shape.qk_layernorm
        activated, activated_back = (factor * shape.ffn_hidden_size for factor in ((3, 5) if shape.is_gated else (2, 3)))
        post = hidden * shape.has_post_norms  # norms before the residual sums
        forward = 5 * hidden, normed, rotated, 0, 5 * hidden + 2 * post, 0, activated + 2 * post
        backward = 6 * hidden, 1.5 * normed, rotated, 0, 6 * hidden + 3 * post, 0, activated_back + 3 * post
        columns = zip(TransformerLayer.segments, self._segment_weights, forward, backward, strict=True)
        return tuple(
            SegmentWork(num_weights, (size * moved, size * moved_back), attends=segment.name == "attention")
            for segment, num_weights, moved, moved_back in columns
        )

    def collectives(self, *, tensor_parallel_size: int, ranks: Sequence[int], cluster: Cluster) -> LayerCollectives:
        """Hidden states between tensor parallel ranks; keys and values, by groups of heads, between context parallel ones."""
        shape, size = self.unit.transformer, cluster.bytes_per_element
        tensor_group, context_group = ranks[:tensor_parallel_size], ranks[::tensor_parallel_size]
        hidden_bytes = size * shape.hidden_size / len(context_group)
        num_groups = shape.query_groups // tensor_parallel_size
        bytes_per_key = size * 2 * shape.head_channels
        of_hidden = collective_per_token(hidden_bytes, ranks=tensor_group, cluster=cluster).times(_PER_PASS)
        of_keys = collective_per_token(num_groups * bytes_per_key, ranks=context_group, cluster=cluster)
        return LayerCollectives(of_hidden, of_keys, num_groups, bytes_per_key)

    @property
    def _segment_weights(self) -> tuple[int, ...]:
        shape, hidden, (query, key_value) = self.unit.transformer, self.unit.transformer.hidden_size, self._widths
        down = hidden * shape.ffn_hidden_size
        return 0, hidden * (query + key_value), 0, query * hidden, 0, self._mlp_weights(shape.ffn_hidden_size) - down, down

    def _mlp_weights(self, inner_size: int) -> int:
        """Weights of two matrices, or three with a gate."""
        shape = self.unit.transformer
        return (3 if shape.is_gated else 2) * shape.hidden_size * inner_size

    @property
    def _widths(self) -> tuple[int, int]:
        """Widths of queries, and of keys and values together."""
        shape = self.unit.transformer
        return shape.num_attention_heads * shape.head_channels, 2 * shape.query_groups * shape.head_channels


NUM_MODULATIONS = 6
"""Shift, scale and gate of two branches."""
NUM_TIME_FEATURES = 256
"""Sines and cosines of a time from which diffusers embeds it."""


class ModulatedTransformerLayer(TransformerLayer):
    """Attention and MLP that the time of a flow shifts, scales and gates.

    Runs as a whole; the maps of the time are products of one row an item, every tensor parallel rank's own.
    """

    roles = (Role.GENERATOR,)
    fits = staticmethod(lambda unit: unit.flow is not None)
    scales_branches = True
    _BACKWARD = (GATHER_AGAIN, SUM, GATHER, GATHER_AGAIN, SUM)
    segments = (Segment("all", forward=(GATHER, SUM, GATHER), backward=_BACKWARD, behind=SUM),)

    @property
    def linear_layers(self) -> Mapping[str, LinearShape]:
        """Those of a transformer layer; where conditions have weights of their own, two of each."""
        return {name: shape._replace(num_alike=self._num_streams) for name, shape in super().linear_layers.items()}

    @property
    def num_weights(self) -> int:
        """Those of a transformer layer, and of the maps of the time."""
        return super().num_weights + self._num_time_weights

    @property
    def num_vector_entries(self) -> int:
        """Those of a transformer layer, whose norms in a `form` have none, and the biases of the maps."""
        num_maps = {None: 1, "sd3": 0, "dit": 2}[self._form] + self._num_streams * NUM_MODULATIONS
        of_maps = num_maps * self.unit.transformer.hidden_size
        of_norms = 2 * self.norm_vector_entries() * (self._form is not None)
        return super().num_vector_entries + of_maps - of_norms + (self._num_streams - 1) * self._num_biases

    def forward_flops(self, load: UnitLoad) -> LayerFlops:
        """Count the maps of the time once an item. A token is multiplied by one of two sets of weights."""
        linear = load.num_tokens * super().num_weights / self._num_streams + load.num_sequences * self._num_time_weights
        return super().forward_flops(load)._replace(linear=2.0 * linear)

    def adapter_flops(self, load: UnitLoad) -> float:
        """Count one of two sets of adapters."""
        return super().adapter_flops(load) / self._num_streams

    def segment_work(self, bytes_per_element: int) -> tuple[SegmentWork, ...]:
        """Return the work of the one segment: the maps of the time, once an item, are left out."""
        parts = super().segment_work(bytes_per_element)
        traffic = sum(each.traffic[0] for each in parts), sum(each.traffic[1] for each in parts)
        return (SegmentWork(sum(each.num_weights for each in parts), traffic, attends=True),)

    def saved_bytes(self, load: UnitLoad, case: ActivationCase) -> ActivationBytes:
        """With shift, scale and gate of every token, and, for these, the normalised inputs and outputs of both branches."""
        kept = super().saved_bytes(load, case)
        if case.recompute == "full":
            return kept
        hidden_bytes = case.bytes_per_element * self.unit.transformer.hidden_size
        return kept._replace(whole=kept.whole + 10.0 * hidden_bytes * load.num_tokens)

    @property
    def _num_time_weights(self) -> int:
        hidden = self.unit.transformer.hidden_size
        num_rows = {None: hidden, "sd3": 0}.get(self._form)
        if num_rows is None:  # a DiT's maps of the time, and classes, the last of which is none
            num_rows = NUM_TIME_FEATURES + hidden + read_config(self.unit.weights or "").get("num_embeds_ada_norm", 1000) + 1
        return (num_rows + self._num_streams * NUM_MODULATIONS * hidden) * hidden

    @property
    def _form(self) -> str | None:
        return self.unit.flow.form if self.unit.flow is not None else None

    @property
    def _num_streams(self) -> int:
        return self.unit.flow.num_streams if self.unit.flow is not None else 1
