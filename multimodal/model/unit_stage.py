"""One virtual stage of a unit: the layers of one range, built for this rank only."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import Module, ModuleDict
from torch.utils.checkpoint import checkpoint

from multimodal.attention.core_attention import CoreAttention
from multimodal.cost.engine_limits import ADAPTED_SEGMENTS, NARROW_PRODUCT, LayerUse
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.model.adapter import adapter_of, attach_adapters, attach_new_rows, is_engine_linear, share_adapter
from multimodal.model.collectives import RankLink, TensorParallelWaits, share_rows
from multimodal.model.deferrable_linear import adapt_engine_linears
from multimodal.model.latents import encode_images
from multimodal.model.layers.layer_kind import CarriedStates, HeadOutput, LayerContext, LayerPart, Segments, StagePass, State
from multimodal.model.layers.registry import kind_of, sharding_of
from multimodal.model.parameter_sharding import ParameterSharding
from multimodal.model.rotary import frequency_divisors, rotary_frequencies
from multimodal.model.stage_input import PackedInput, pack_lengths, pad_rows
from multimodal.model.transformer_config import BuildOptions, build_transformer_config
from multimodal.model.weight_gradient_queue import (
    WeightGradientQueue,
    accumulate_into_buffers,
    active_queue,
    defer_in_modules,
    defer_weight_gradients,
    find_accumulation,
)
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph


@dataclass(frozen=True)
class StageSegments:
    """The parts of a stage's layers.

    A forward that ends with a segment stops right behind its collective, which is then under way; parts behind the collective (a
    residual sum) run with the next segment. A backward stops at the same places, so its collectives are under way there, too.
    """

    parts: tuple[LayerPart, ...]
    layers: tuple[int, ...]
    """[num_parts] the layer of each part, by its index in the unit."""
    starts: tuple[int, ...]
    """[num_segments + 1] the first part of each segment, then the number of parts."""

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return len(self.starts) - 1


def join_segments(layers: Iterable[tuple[int, Segments]]) -> StageSegments:
    """Return the segments of a stage; layers: indices of its layers, and the parts of each of their segments."""
    parts: list[LayerPart] = []
    layer_of_part: list[int] = []
    starts, num_behind = [], 0
    for index, segments in layers:
        for segment in segments:
            starts.append(len(parts) - num_behind)
            # A forward stops behind the segment's last collective; parts behind that run with the next segment.
            ends = [place for place, part in enumerate(segment, start=1) if part.behind is not None]
            num_behind = len(segment) - ends[-1] if ends else 0
            parts += segment
            layer_of_part += [index] * len(segment)
    return StageSegments(tuple(parts), tuple(layer_of_part), (*starts, len(parts)))


class LayerGuard(Protocol):
    """Is called around each layer's computation, for weights that are not always in memory."""

    def before(self, layer: int, hidden: Tensor | None) -> Tensor | None:
        """Called before the layer with its input; returns the input to compute with."""

    def after(self, layer: int, output: Tensor | HeadOutput) -> Tensor | HeadOutput:
        """Called with the layer's result; returns the result to hand on."""


class UnitStage(MegatronModule):
    """Layers `layers` of a unit; parameter names carry the layer's index in the unit, whatever the plan.

    graph: the model; unit_name: which of its units; layers: range of the unit's layer list; groups: tensor, context and pipeline
    parallel groups of this rank in the unit; vocab_size: padded vocabulary (LLM).
    """

    def __init__(
        self,
        *,
        graph: ModelGraph,
        unit_name: str,
        layers: range,
        groups: ProcessGroupCollection,
        options: BuildOptions,
        vocab_size: int = 0,
    ) -> None:
        unit = graph.unit(unit_name)
        super().__init__(build_transformer_config(unit, tensor_parallel_size=groups.tp.size(), options=options))
        self.unit, self.layer_range, self.groups, self.options = unit, layers, groups, options
        self.context = LayerContext(graph, unit, self.config, groups, options, vocab_size)
        self.carried = CarriedStates(graph, unit_name)
        self.guard: LayerGuard | None = None
        self.num_step_tokens = 1
        """The LLM's tokens in the current global batch."""
        self.waits = TensorParallelWaits()
        """Records waits for the collectives of a forward or backward of the whole stage."""
        self._segments: StageSegments | None = None
        self.layers = ModuleDict({str(index): self._build_layer(index) for index in layers})
        if unit.ties_embeddings and self.is_last and not self.is_first:
            # The last stage keeps a copy of the first stage's word embeddings; gradients.py keeps both equal.
            self.layers["0"] = self._build_layer(0)
        for index in map(int, self.layers):
            layer = self.layers[str(index)]
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(unit.is_trainable(index) and name not in getattr(layer, "fixed", ()))
            self._adapt_layer(index)
            for parameter in layer.parameters():
                parameter.is_of_projector = index == unit.projector_layer  # type: ignore[attr-defined]  # for its learning rate
        for module in self.layers.modules() if options.fp8_format is not None else ():
            widths = (module.in_features, module.out_features) if is_engine_linear(module) else ()
            if NARROW_PRODUCT.is_met(LayerUse(fp8_recipe=options.fp8_recipe, widths=widths)):  # type: ignore[arg-type]
                module.forward = _outside_fp8(module.forward)
        self._try_precision()
        if "0" in self.layers:
            self._mark_shared_embedding()
        for module in self.layers.modules():
            if hasattr(module, "waits"):
                module.waits = self.waits  # type: ignore[assignment]
        self.delays_weight_gradients = defer_in_modules(self.layers)
        """True if every forward with a backward needs an active queue, split or not."""
        accumulate = find_accumulation(options.params_dtype) if options.accumulates_in_products else None
        if accumulate is not None:
            tied = self.shared_parameter  # it gets gradients from two layers, one of which would be lost
            accumulate_into_buffers((each for each in self.parameters() if each is not tied), accumulate)

    @property
    def link(self) -> RankLink:
        """The tensor parallel ranks of this stage."""
        return RankLink(self.groups.tp, self.config.sequence_parallel, self.waits)

    @property
    def is_first(self) -> bool:
        """True if this stage holds the unit's first layer."""
        return self.layer_range.start == 0

    @property
    def is_last(self) -> bool:
        """True if this stage holds the unit's last layer."""
        return self.layer_range.stop == len(self.unit.layers)

    @property
    def shared_embedding_weight(self) -> Tensor | None:
        """This stage's copy of tied word embeddings, if it has one."""
        if not self.unit.ties_embeddings or "0" not in self.layers:
            return None
        return self.layers["0"].word_embeddings.weight  # type: ignore[union-attr, return-value]

    @property
    def shared_parameter(self) -> Tensor | None:
        """The tied word embeddings of this stage, or what is added to their new rows if only these are trained."""
        weight = self.shared_embedding_weight
        adapter = None if weight is None else adapter_of(self.layers["0"].word_embeddings)  # type: ignore[union-attr, arg-type]
        return weight if adapter is None else adapter.down

    def sharding(self, name: str) -> ParameterSharding:
        """Return the split of one of this stage's parameters over tensor parallel ranks."""
        return sharding_of(self.unit, name)

    def num_rows(self, num_tokens: int) -> int:
        """Return the rows of this rank's hidden states between layers; num_tokens: of its tensor parallel group."""
        rows = self.context.input_context.num_padded_rows(num_tokens)
        return rows // self.groups.tp.size() if self.config.sequence_parallel else rows

    def forward(self, hidden: Tensor | None, batch: PackedInput, item_embeddings: Tensor | None = None) -> Tensor | HeadOutput:
        """Run the stage on hidden states, [rows, 1, channels] with `width_behind` channels, or None on the first stage.

        item_embeddings: [num_item_tokens, channels], the encoders' outputs in the order of `batch.item_rows`; for a generator's
        first stage [num_images, the LLM's hidden size], to which `batch.condition_rows` refers. Returns such hidden states, rows
        = `num_rows(batch.num_tokens)`; [num_merged_tokens, channels] after an encoder's projector; a HeadOutput after the head.
        """
        state = () if hidden is None else self.carried.split(hidden, behind=self.layer_range.start - 1)
        given = self.prepare(batch, item_embeddings)
        with self.precision():
            for index in self.layer_range:
                found = self._advance(index, state, given)
                if isinstance(found, HeadOutput):
                    return found
                state = found
        return self.carried.join(state)

    def _advance(self, index: int, state: State, given: StagePass) -> State | HeadOutput:
        """Run one layer on the state that the layer before it returned."""
        carried, hidden = self.carried.enter(index, state)
        if self.guard is not None:
            hidden = self.guard.before(index, hidden)
        output = self.run_layer(index, hidden, given)  # type: ignore[arg-type]
        if self.guard is not None:
            output = self.guard.after(index, output)
        return output if isinstance(output, HeadOutput) else self.carried.leave(index, carried, output)

    def precision(self) -> AbstractContextManager[None]:
        """Return the context in which layers of Transformer Engine multiply in FP8, scaled alike on tensor parallel ranks."""
        if self.options.fp8_format is None:
            return nullcontext()
        from megatron.core.fp8_utils import get_fp8_recipe
        from transformer_engine.pytorch import fp8_autocast  # type: ignore[import-not-found,unused-ignore]

        return fp8_autocast(enabled=True, fp8_recipe=get_fp8_recipe(self.config), fp8_group=self.groups.tp)

    def _try_precision(self) -> None:
        """Raise ConfigError if the GPU does not have the recipe of FP8, or its CUDA does not."""
        try:
            with torch.no_grad(), self.precision():
                pass
        except AssertionError as problem:
            found = str(problem).rstrip(".")
            raise ConfigError(f"--fp8-recipe {self.options.fp8_recipe}: {found}; choose another, or no --fp8-format") from None

    def prepare(self, batch: PackedInput, item_embeddings: Tensor | None) -> StagePass:
        """Return the inputs that all layers read of a microbatch; arguments as in `forward`."""
        if (made := batch.items_made) is not None and made.are_pixels:
            assert batch.patches is not None and self.unit.image is not None
            dtype = self.options.rotary_dtype
            batch = replace(batch, patches=encode_images(batch.patches, made, self.unit.image, dtype=dtype))
        frequencies = self.frequencies(batch)
        lengths = batch.packed or pack_lengths(batch, self.context.input_context.num_padded_rows(batch.num_tokens))
        local = self.frequencies(batch, base) if (base := self.unit.transformer.rotary_local_base) is not None else None
        weight = self.shared_embedding_weight
        return StagePass(batch, item_embeddings, frequencies, lengths, weight, self.num_step_tokens, local)

    def run_layer(self, index: int, hidden: Tensor, given: StagePass) -> Tensor | HeadOutput:
        """Run one layer, by its index in the unit; `hidden` is None for a unit's first."""
        layer, kind = self.layers[str(index)], kind_of(self.unit, index)
        if index == 0:
            embedded = kind.run(layer, hidden, given)
            assert isinstance(embedded, Tensor)
            padded = pad_rows(embedded, self.context.input_context.num_padded_rows(given.batch.num_tokens))
            return share_rows(padded, self.link) if self.config.sequence_parallel else padded
        is_repeated = self.recomputes(index) and torch.is_grad_enabled()
        if is_repeated and (hidden.requires_grad or any(parameter.requires_grad for parameter in layer.parameters())):
            # The backward may recompute in another thread; it must find the queue there, or it would save other tensors than the
            # forward.
            contexts = (nullcontext(), self._recomputing(active_queue()))
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            return checkpoint(kind.run, layer, hidden, given, context_fn=lambda: contexts, **options)
        return kind.run(layer, hidden, given)

    @contextmanager
    def _recomputing(self, queue: WeightGradientQueue | None) -> Iterator[None]:
        with defer_weight_gradients(queue), self.precision():
            yield

    def segments(self) -> StageSegments:
        """Return the parts of this stage's segments; raises ConfigError if its layers cannot be cut."""
        where = f"unit '{self.unit.name}', layers {self.layer_range.start} to {self.layer_range.stop - 1}"
        if self.options.fp8_format is not None:
            raise ConfigError(
                f"{where}: the schedule runs segments of a layer on their own, whose products are not in FP8; leave out "
                "--fp8-format, or use a --schedule that runs whole stages"
            )
        is_engine = self.context.implementation != "local"
        if is_engine and self.groups.tp.size() > 1 and ADAPTED_SEGMENTS.is_met(LayerUse(unit=self.unit)):
            raise ConfigError(f"{where}: {ADAPTED_SEGMENTS.message}")
        if self.guard is not None:
            raise ConfigError(
                f"{where}: the schedule runs segments of a layer on their own, but the stage's weights are sharded over its "
                "replicas and are there only while a whole layer computes; leave out --data-parallel-sharding-strategy "
                "optim_grads_params, or use a --schedule that runs whole stages"
            )
        if self._segments is None:
            joined = join_segments((index, self._layer_segments(index)) for index in self.layer_range)
            self._segments = replace(joined, parts=self.carried.between_stages(joined.parts, self.layer_range))
        return self._segments

    def recomputes(self, index: int) -> bool:
        """Return True if backwards recompute a layer's forward."""
        return LAYER_KINDS[self.unit.layers[index]].recomputes and self.options.recompute == "full"

    def core_attention(self, index: int) -> CoreAttention | None:
        """Return the module in which a layer's tokens attend; None if they do not, or only in windows, in linear time."""
        attention = getattr(self.layers[str(index)], "self_attention", None)
        return attention.core_attention if attention is not None and isinstance(attention.core_attention, CoreAttention) else None

    def _layer_segments(self, index: int) -> Segments:
        if (segments := kind_of(self.unit, index).segments(self.layers[str(index)])) is not None:
            return self.carried.past(index, segments)

        def whole(state: State, given: StagePass) -> State:
            return self._advance(index, state, given)  # type: ignore[return-value]  # a head's output is a tuple, too

        return ((LayerPart(whole),),)

    def frequencies(self, batch: PackedInput, local_base: float | None = None) -> Tensor | None:
        """Return the rotary angles of this rank's rows, if any; local_base: of layers with angles of their own."""
        if not self.unit.transformer.has_rotary_positions:
            return None
        shape, dtype = self.unit.transformer, self.options.rotary_dtype
        if local_base is not None:
            shape = replace(shape, rotary_base=local_base, rotary_scaling=(), rotary_factors=())
        lengths, short = self._sequence_lengths(batch), shape.rotary_short_length or 0
        factors = shape.rotary_factors, shape.rotary_long_factors
        frequencies = rotary_frequencies(
            batch.places,
            head_channels=shape.head_channels,
            base=shape.rotary_base,
            dtype=dtype,
            sections=shape.rotary_sections,
            is_interleaved=shape.has_interleaved_sections,
            is_staggered=shape.has_staggered_axes,
            scaling=shape.rotary_scaling,
            divisors=frequency_divisors(*factors, short_length=short, lengths=lengths, dtype=dtype),
        )
        return pad_rows(frequencies, self.context.input_context.num_padded_rows(batch.num_tokens))

    def _sequence_lengths(self, batch: PackedInput) -> Tensor:
        """Return [num_tokens]: the length of each token's sequence, where rotary positions depend on it."""
        device = batch.positions.device
        if not self.unit.transformer.rotary_long_factors:
            return torch.empty(0, device=device)
        packed = batch.packed or pack_lengths(batch, batch.num_tokens)
        numbers = packed.sequence_numbers(device)[: batch.num_tokens]
        return torch.tensor((*batch.lengths, 0), device=device).index_select(0, numbers)

    def _adapt_layer(self, index: int) -> None:
        if modules := self.unit.adapted_modules(index):
            assert self.unit.lora is not None
            attach_adapters(self.layers[str(index)], modules, rank=self.unit.lora.rank, scale=self.unit.lora.scale)
            adapt_engine_linears(self.layers[str(index)])
        if tokens := self.unit.new_rows(self.unit.layers[index]):
            layer, (matrix,) = self.layers[str(index)], kind_of(self.unit, index).column_parallel
            attach_new_rows(layer, getattr(layer, matrix), tokens, tensor_parallel_rank=self.groups.tp.rank())

    def _build_layer(self, index: int) -> Module:
        return kind_of(self.unit, index).build(self.context, index)

    def _mark_shared_embedding(self) -> None:
        if self.shared_embedding_weight is None:
            return
        embedding: Module = self.layers["0"].word_embeddings  # type: ignore[union-attr, assignment]
        if self.is_last:
            head: Module = self.layers[str(self.layer_range.stop - 1)].output_layer  # type: ignore[union-attr, assignment]
            share_adapter(head, embedding)
        for parameter in embedding.parameters() if not (self.is_first and self.is_last) else ():
            parameter.shared_embedding = True  # type: ignore[attr-defined]  # megatron-core gives it a bucket of its own
            parameter.shared = not self.is_first  # type: ignore[attr-defined]  # count it once in the gradient norm


def _outside_fp8(forward: Callable[..., Any]) -> Callable[..., Any]:
    from transformer_engine.pytorch import fp8_autocast

    @wraps(forward)
    def outside(*arguments: Any, **options: Any) -> Any:
        with fp8_autocast(enabled=False):
            return forward(*arguments, **options)

    return outside
