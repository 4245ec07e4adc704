"""One virtual stage of a unit: the layers of one range, built for this rank alone."""

from contextlib import nullcontext
from typing import Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor
from torch.nn import Module, ModuleDict
from torch.utils.checkpoint import checkpoint

from multimodal.attention.packed_lengths import PackedLengths
from multimodal.model.generator_head import GeneratorHead
from multimodal.model.generator_projector import GeneratorProjector
from multimodal.model.language_head import HeadOutput, LanguageHead
from multimodal.model.layer_spec import transformer_layer_spec
from multimodal.model.mask_rule import mask_rule_of
from multimodal.model.patch_embedding import PatchEmbedding
from multimodal.model.projector import Projector
from multimodal.model.rotary import rotary_frequencies
from multimodal.model.stage_input import PackedInput, pad_rows, padded_num_tokens
from multimodal.model.token_embedding import TokenEmbedding
from multimodal.model.transformer_config import BuildOptions, build_transformer_config
from multimodal.model.weight_gradient_queue import DeferWeightGradients, active_queue
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import LayerKind, ModelGraph, Role, Unit


class LayerGuard(Protocol):
    """Who has to know when a layer computes: where its weights are not there all the time."""

    def before(self, layer: int, hidden: Tensor | None) -> Tensor | None:
        """Called before the layer with its input; returns what to compute with."""

    def after(self, layer: int, output: Tensor | HeadOutput) -> Tensor | HeadOutput:
        """Called after the layer with what it gave; returns what to hand on."""


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
        self.output_size = _output_size(graph, unit)
        self.condition_size = graph.backbone.transformer.hidden_size
        self.guard: LayerGuard | None = None
        self.vocab_size = vocab_size
        self.mask_rule = mask_rule_of(unit, graph=graph, mode=options.attention_mask)
        self.shares_embedding = unit.role is Role.BACKBONE and not unit.untie_embeddings_and_output_weights
        self.layers = ModuleDict({str(index): self._build_layer(index) for index in layers})
        if self.shares_embedding and self.is_last and not self.is_first:
            # The last stage keeps a copy of the first stage's word embeddings; gradients.py keeps the two alike.
            self.layers["0"] = self._build_layer(0)
        for index in layers:
            self.layers[str(index)].requires_grad_(unit.is_trainable(index))
        if "0" in self.layers:
            self.layers["0"].requires_grad_(unit.is_trainable(0))
            self._mark_shared_embedding()

    @property
    def is_first(self) -> bool:
        """Whether this stage holds the unit's embedding."""
        return self.layer_range.start == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage holds the unit's projector or head."""
        return self.layer_range.stop == len(self.unit.layers)

    @property
    def shared_embedding_weight(self) -> Tensor | None:
        """This stage's copy of tied word embeddings, if it has one."""
        if not self.shares_embedding or "0" not in self.layers:
            return None
        weight: Tensor = self.layers["0"].word_embeddings.weight  # type: ignore[union-attr, assignment]
        return weight

    def num_rows(self, num_tokens: int) -> int:
        """Rows of this rank's hidden states between transformer layers, of `num_tokens` that its tensor parallel group holds."""
        rows = self._num_padded_rows(num_tokens)
        return rows // self.groups.tp.size() if self.config.sequence_parallel else rows

    def _num_padded_rows(self, num_tokens: int) -> int:
        """Where sequences are spread over ranks, one that holds nothing computes one row: layers cannot do without."""
        rows = num_tokens if self.groups.cp.size() == 1 else max(1, num_tokens)
        return padded_num_tokens(rows, multiple=self.groups.tp.size()) if self.config.sequence_parallel else rows

    def forward(self, hidden: Tensor | None, batch: PackedInput, item_embeddings: Tensor | None = None) -> Tensor | HeadOutput:
        """Run the stage.

        hidden: [rows, 1, hidden_size] from the stage before, rows = `num_rows(batch.num_tokens)`; None on the first stage.
        item_embeddings: [num_item_tokens, hidden_size], the encoders' outputs in the order of `batch.item_rows`; a generator's
        first stage: [num_images, the LLM's hidden size], what `batch.condition_rows` counts.
        Returns the same shape as `hidden`; [num_merged_tokens, output_size] after an encoder's projector; a HeadOutput after the
        head.
        """
        output: Tensor | HeadOutput | None = hidden
        position, lengths = self._position_inputs(batch)
        for index in self.layer_range:
            if self.guard is not None:
                output = self.guard.before(index, output)  # type: ignore[arg-type]
            output = self._run_layer(index, output, batch, item_embeddings, position, lengths)  # type: ignore[arg-type]
            if self.guard is not None:
                output = self.guard.after(index, output)
        assert output is not None
        return output

    def _run_layer(
        self,
        index: int,
        hidden: Tensor,
        batch: PackedInput,
        item_embeddings: Tensor | None,
        frequencies: Tensor,
        lengths: PackedLengths,
    ) -> Tensor | HeadOutput:
        layer = self.layers[str(index)]
        kind = self.unit.layers[index]
        if kind is LayerKind.TRANSFORMER:
            return self._run_transformer_layer(layer, hidden, frequencies, lengths)
        if kind is LayerKind.PATCH_EMBEDDING:
            return self._share_tokens(layer(batch.patches), batch)
        if kind is LayerKind.TOKEN_EMBEDDING:
            return self._share_tokens(layer(batch.token_ids, batch.item_rows, item_embeddings), batch)
        if kind is LayerKind.PROJECTOR and self.unit.role is Role.GENERATOR:
            return self._share_tokens(layer(item_embeddings, batch.condition_rows, batch.positions), batch)
        if kind is LayerKind.PROJECTOR:
            projected: Tensor = layer(hidden, batch.num_tokens)
            return projected
        return self._run_head(layer, hidden, batch)

    def _run_head(self, layer: Module, hidden: Tensor, batch: PackedInput) -> HeadOutput:
        output: HeadOutput
        if self.unit.role is Role.GENERATOR:
            output = layer(hidden, patches=batch.patches)
        else:
            output = layer(
                hidden,
                target_rows=batch.target_rows,
                targets=batch.targets,
                shared_weight=self.shared_embedding_weight,
                generator_rows=batch.generator_rows,
            )
        return output

    def _run_transformer_layer(self, layer: Module, hidden: Tensor, frequencies: Tensor, lengths: PackedLengths) -> Tensor:
        def run(states: Tensor) -> Tensor:
            output: Tensor = layer(states, attention_mask=None, rotary_pos_emb=frequencies, packed_seq_params=lengths)[0]
            return output

        has_backward = hidden.requires_grad or any(parameter.requires_grad for parameter in layer.parameters())
        if self.options.recompute == "full" and torch.is_grad_enabled() and has_backward:
            # The backward may recompute in another thread; it must find the queue, or save other tensors than the forward.
            contexts = (nullcontext(), DeferWeightGradients(active_queue()))
            recomputed: Tensor = checkpoint(
                run, hidden, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts
            )
            return recomputed
        return run(hidden)

    def _share_tokens(self, hidden: Tensor, batch: PackedInput) -> Tensor:
        padded = pad_rows(hidden, self._num_padded_rows(batch.num_tokens))
        if not self.config.sequence_parallel:
            return padded
        shared: Tensor = scatter_to_sequence_parallel_region(padded, group=self.groups.tp)
        return shared

    def _position_inputs(self, batch: PackedInput) -> tuple[Tensor, PackedLengths]:
        frequencies = rotary_frequencies(
            batch.positions,
            head_channels=self.unit.transformer.head_channels,
            base=self.unit.transformer.rotary_base,
            dtype=self.options.precision.rotary_dtype,
        )
        lengths = batch.lengths
        num_rows = self._num_padded_rows(batch.num_tokens)
        if batch.share is None and num_rows > batch.num_tokens:
            lengths = (*lengths, num_rows - batch.num_tokens)
        return pad_rows(frequencies, num_rows), PackedLengths(lengths=lengths, items=batch.items, share=batch.share)

    def _build_layer(self, index: int) -> Module:
        kind = self.unit.layers[index]
        config, groups = self.config, self.groups
        if kind is LayerKind.TRANSFORMER:
            spec = transformer_layer_spec(
                implementation=self.options.transformer_impl,
                rule=self.mask_rule,
                recompute=self.options.recompute,
                attention_backend=self.options.attention_backend,
                is_shared=groups.cp.size() > 1,
                num_overlapped_parts=self.options.num_overlapped_parts,
            )
            layer: Module = build_module(spec, config=config, layer_number=index, pg_collection=groups)
            return layer
        if kind is LayerKind.TOKEN_EMBEDDING:
            return TokenEmbedding(config=config, groups=groups, vocab_size=self.vocab_size)
        if kind is LayerKind.HEAD and self.unit.role is Role.BACKBONE:
            return LanguageHead(config=config, groups=groups, vocab_size=self.vocab_size, shares_embedding=self.shares_embedding)
        image, precision = self.unit.image, self.options.precision
        assert image is not None, f"unit '{self.unit.name}' has no image"
        channels = image.in_channels * image.patch_size**2
        if kind is LayerKind.HEAD:
            return GeneratorHead(config=config, groups=groups, patch_channels=channels)
        if kind is LayerKind.PATCH_EMBEDDING:
            return PatchEmbedding(patch_channels=channels, hidden_size=config.hidden_size, precision=precision)
        if self.unit.role is Role.GENERATOR:
            return GeneratorProjector(
                condition_size=self.condition_size,
                hidden_size=config.hidden_size,
                rotary_base=self.unit.transformer.rotary_base,
                precision=precision,
            )
        return Projector(
            config=config,
            groups=groups,
            merge_factor=image.merge_size**2,
            projector_hidden_size=self.unit.projector_hidden_size,
            output_size=self.output_size,
        )

    def _mark_shared_embedding(self) -> None:
        if self.shared_embedding_weight is None or (self.is_first and self.is_last):
            return
        weight = self.shared_embedding_weight
        weight.shared_embedding = True  # type: ignore[attr-defined]  # megatron-core gives it a bucket of its own
        weight.shared = not self.is_first  # type: ignore[attr-defined]  # count it once in the gradient norm


def _output_size(graph: ModelGraph, unit: Unit) -> int:
    """Width of what leaves the unit: an encoder's projector speaks the LLM's language, the LLM its own."""
    if unit.role is not Role.ENCODER:
        return unit.transformer.hidden_size
    sizes = {graph.unit(name).transformer.hidden_size for name in graph.downstream(unit.name)}
    if len(sizes) > 1:
        raise ModelError(f"unit '{unit.name}' feeds units of different hidden sizes {sorted(sizes)}; it can feed only one size")
    return sizes.pop() if sizes else unit.transformer.hidden_size
