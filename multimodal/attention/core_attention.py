"""Core attention over packed sequences, as megatron-core's layers call it: sequence by sequence, or under a bitfield mask."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from multimodal.attention.attention_backend import AUTO, FLASH, SEQUENCES, AttentionShape, load_backend, load_preparation
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.context_parallel import ContextGroup, attend_across_ranks
from multimodal.attention.device_values import CPU
from multimodal.attention.packed_lengths import ItemParts, MaskRule, PackedLengths
from multimodal.attention.sequence_attention import attend_by_sequence
from multimodal.attention.triton_kernels.options import MAX_CHANNELS
from multimodal.cost.token_shares import BlockShares
from multimodal.kernels import kernels
from multimodal.values.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The mask rule of a unit's tokens and the backends that compute their attention."""

    rule: MaskRule
    shape: AttentionShape
    backend: str
    """The backend of all tokens; with context parallelism, of the tokens of shared sequences."""
    alone: str
    """The backend of whole sequences on one rank, beside sequences that ranks share."""

    def prepare(self, packed: PackedLengths) -> None:
        """Derive, on the CPU, the inputs of the attention to these tokens."""
        if packed.share is None:
            self._prepare(self.backend, packed)
            return
        parts = packed.item_parts
        shared = packed if parts is None else parts.cut
        if shared.lengths:
            shared.gathered_rows(CPU)
            self._prepare(self.backend, shared)
        if parts is not None and parts.whole.lengths:
            self._prepare(self.alone, parts.whole)

    def _prepare(self, backend: str, packed: PackedLengths) -> None:
        if backend == FLASH:
            packed.starts(CPU)
        elif backend != SEQUENCES:
            load_preparation(backend)(packed.mask(self.rule), self.shape)


_Tensors = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, as `CoreAttention.forward` takes them."""


class CoreAttention(torch.nn.Module):
    """Plugs into a TransformerLayer spec as `core_attention`: tokens attend by the mask rule, on one rank or over several.

    There may be several query heads per key head (grouped-query attention). choice: the rule; the backend of all tokens; and, if
    ranks share sequences, that of whole ones. recompute: keep no inner activations for the backward (Megatron's selective
    recomputation). repeats: True if attention over several ranks keeps none, as within recomputed layers (full recomputation).
    pg_collection: its `cp` are the ranks that share a sequence. Raises ConfigError if a backend's package is missing.
    """

    def __init__(
        self,
        *,
        choice: AttentionChoice,
        recompute: bool = False,
        softmax_scale: float | None = None,
        repeats: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.choice, self.recompute, self.repeats = choice, recompute, recompute or repeats
        self.softmax_scale, self.context_group = softmax_scale, getattr(pg_collection, "cp", None)
        self.masked = {name: load_backend(name) for name in {choice.backend, choice.alone}.difference(BY_SEQUENCE)}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: PackedLengths, **_: Any
    ) -> Tensor:
        """Attend; if ranks share tokens, query, key and value are of this rank's tokens and their padding rows.

        query: [num_tokens, 1, heads / tp, head_channels]; key, value: [num_tokens, 1, groups / tp, head_channels].
        Returns [num_tokens, 1, heads x head_channels / tp], zeros for padding.
        """
        packed, share = packed_seq_params, packed_seq_params.share
        if share is None:
            return self._attend_alone((query, key, value), packed, self.choice.backend)
        own = query[: share.num_tokens], key[: share.num_tokens], value[: share.num_tokens]
        parts = packed.item_parts
        mixed = self._attend_across_ranks(own, packed) if parts is None else self._attend_by_item(own, parts)
        return torch.cat((mixed, mixed.new_zeros(query.shape[0] - share.num_tokens, *mixed.shape[1:])))

    def _attend(self, backend: str, query: Tensor, key: Tensor, value: Tensor, packed: PackedLengths) -> Tensor:
        rule, scale = self.choice.rule, self.softmax_scale
        if backend not in BY_SEQUENCE:
            masked = self.masked[backend](query[:, 0], key[:, 0], value[:, 0], mask=packed.mask(rule), softmax_scale=scale)
            return masked.flatten(1)[:, None]
        if backend == FLASH:
            kernel = find_kernel()
            assert kernel is not None, "`can_flash` says whether there is one"
            rows, max_length = (query[:, 0], key[:, 0], value[:, 0]), max(packed.lengths, default=0)
            return kernel(*rows, packed.starts(query.device), max_length, rule.is_causal, scale).flatten(1)[:, None]
        groups = query.shape[2] // key.shape[2]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
        if not query.is_cuda:
            rows = query[:, 0], key[:, 0], value[:, 0]
            return attend_by_sequence(*rows, packed.lengths, is_causal=rule.is_causal, scale=scale).flatten(1)[:, None]
        # [num_tokens, 1, heads, channels] -> per sequence [1, heads, length, channels]
        sequences = zip(*(tensor.permute(1, 2, 0, 3).split(packed.lengths, dim=2) for tensor in (query, key, value)), strict=True)
        mixed = [scaled_dot_product_attention(q, k, v, is_causal=rule.is_causal, scale=scale) for q, k, v in sequences]
        return torch.cat(mixed, dim=2).permute(2, 0, 1, 3).flatten(2)

    def _attend_by_item(self, own: _Tensors, parts: ItemParts) -> Tensor:
        """Attend to cut items over the ranks, all of which know if there are any, and to whole items alone."""
        if not parts.cut.lengths:
            return self._attend_alone(own, parts.whole, self.choice.alone)
        parts = parts.on(own[0].device)
        cut = self._attend_across_ranks(_select(own, parts.cut_rows), parts.cut)
        whole = self._attend_alone(_select(own, parts.whole_rows), parts.whole, self.choice.alone)
        return torch.cat((cut, whole)).index_select(0, parts.places)

    def _attend_alone(self, own: _Tensors, packed: PackedLengths, backend: str) -> Tensor:
        """Attend on this rank; without items there are no rows, which not every backend accepts."""
        if not packed.lengths:
            return own[0].flatten(2)
        if not (self.recompute and torch.is_grad_enabled() and own[0].requires_grad):
            return self._attend(backend, *own, packed)
        return checkpoint(self._attend, backend, *own, packed, use_reentrant=False, preserve_rng_state=False)

    def _attend_across_ranks(self, own: _Tensors, packed: PackedLengths) -> Tensor:
        """Attend over the ranks, without checkpointing, which would gather keys and values once more."""
        share = packed.share
        assert share is not None and isinstance(share.shares, BlockShares) and self.context_group is not None
        query, key, value = (each[:, 0] for each in own)
        context = ContextGroup(self.context_group, share.shares, packed.gathered_rows(query.device))
        how: dict[str, Any] = {"mask": packed.mask(self.choice.rule), "attend": self.masked[self.choice.backend]}
        how |= {"softmax_scale": self.softmax_scale, "recompute": self.repeats}
        return attend_across_ranks(query, key, value, context=context, **how).flatten(1)[:, None]


class WindowedAttention(torch.nn.Module):
    """Tokens attend only inside their window, by the core attention `inner`; no rank needs tokens of others."""

    def __init__(self, *, inner: ModuleSpec, **options: Any) -> None:
        super().__init__()
        self.inner = build_module(inner, **options)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: PackedLengths, **_: Any
    ) -> Tensor:
        """Attend, window by window; arguments as in `CoreAttention.forward`. Returns zeros for padding."""
        windows = packed_seq_params.windows
        assert windows is not None, "a unit with windows says where they are"
        num_padding = query.shape[0] - len(windows.order)
        if not windows.lengths:
            return query.flatten(2)
        sequences = packed_seq_params.window_sequences
        mixed = self.inner(*_select((query, key, value), windows.order), None, packed_seq_params=sequences)
        mixed = mixed.index_select(0, windows.places)
        return torch.cat((mixed, mixed.new_zeros(num_padding, *mixed.shape[1:]))) if num_padding else mixed


def _select(tensors: _Tensors, rows: Tensor) -> _Tensors:
    query, key, value = tensors
    return query.index_select(0, rows), key.index_select(0, rows), value.index_select(0, rows)


FLASH_CHANNELS = 256

VariableLengths = Callable[..., Tensor]
"""A kernel for all sequences, in half precision: of query, key, value, starts, max_length, is_causal and scale."""


def can_flash(shape: AttentionShape) -> bool:
    """Return True if a kernel for such heads is installed."""
    fits = shape.dtype.itemsize == 2 and shape.channels % 8 == 0 and shape.channels <= FLASH_CHANNELS
    return shape.is_cuda and fits and find_kernel() is not None


@cache
def find_kernel() -> VariableLengths | None:
    """Return the first of FlashAttention 3, FlashAttention 2 and torch's own kernel that is installed; None without any."""
    for module, name, adapt in (
        ("flash_attn_interface", "flash_attn_varlen_func", _of_package),
        ("flash_attn", "flash_attn_varlen_func", _of_package),
        ("torch.nn.attention.varlen", "varlen_attn", _of_torch),
    ):
        try:
            return adapt(getattr(import_module(module), name))
        except (ImportError, AttributeError):
            continue
    return None


def _of_package(function: Callable[..., Any]) -> VariableLengths:
    def attend(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, max_length: int, is_causal: bool, scale: float | None
    ) -> Tensor:
        return function(query, key, value, starts, starts, max_length, max_length, softmax_scale=scale, causal=is_causal)

    return attend


def _of_torch(function: Callable[..., Any]) -> VariableLengths:
    """Adapt torch's kernel, whose arguments (windows for `is_causal`, scale, grouped heads) differ between releases."""
    known = inspect.signature(function).parameters
    if "scale" not in known or not {"window_size", "is_causal"} & set(known):
        raise AttributeError("varlen_attn")

    def attend(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, max_length: int, is_causal: bool, scale: float | None
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        options: dict[str, Any] = {"scale": scale}
        if "is_causal" in known:
            options["is_causal"] = is_causal
        else:
            options["window_size"] = (-1, 0 if is_causal else -1)
        if "enable_gqa" in known:
            options["enable_gqa"] = groups > 1
        elif groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        return function(query, key, value, starts, starts, max_length, max_length, **options)

    return attend


ON_CPU = AttentionShape()
BY_SEQUENCE = (SEQUENCES, FLASH)
"""Backends that take whole sequences and no mask."""


def choose_attention(name: str, *, rule: MaskRule, shape: AttentionShape, is_shared: bool) -> AttentionChoice:
    """Choose by a backend's name, for sequences that ranks share or not; raises ConfigError as `choose_backend`."""
    backend = choose_backend(name, rule=rule, is_shared=is_shared, shape=shape)
    alone = choose_backend(name, rule=rule, shape=shape)
    return AttentionChoice(rule, shape, backend, alone if alone in BY_SEQUENCE else backend)


def choose_backend(name: str, *, rule: MaskRule, is_shared: bool = False, shape: AttentionShape = ON_CPU) -> str:
    """Resolve `auto`; raises ConfigError when a backend that takes whole sequences cannot evaluate the mask."""
    needs_mask = rule.is_causal and (rule.mode is not MaskMode.CAUSAL or (rule.window or rule.softcap) is not None)
    if name == AUTO:
        if needs_mask or is_shared or (shape.is_cuda and not can_flash(shape)):  # no loop over sequences launches kernels there
            if not shape.is_cuda or shape.dtype == torch.float64:
                return "blocks"
            is_installed = find_spec("triton") is not None and kernels is not None
            suits = is_installed and shape.channels <= MAX_CHANNELS and rule.softcap is None
            return "triton" if suits else "flex"  # which can bound scores
        return FLASH if can_flash(shape) else SEQUENCES
    if name in BY_SEQUENCE and is_shared:
        raise ConfigError(
            f"--attention-backend {name} needs whole sequences, which context parallelism spreads over ranks; choose "
            "--attention-backend blocks"
        )
    if name in BY_SEQUENCE and needs_mask:
        of_model = f"sliding_window {rule.window}" if rule.window is not None else f"attention_softcap {rule.softcap}"
        what = of_model if rule.mode is MaskMode.CAUSAL else f"--attention-mask {rule.mode}"
        raise ConfigError(f"--attention-backend {name} cannot evaluate {what}; choose --attention-backend blocks")
    if name == "triton" and rule.softcap is not None:
        raise ConfigError(
            f"--attention-backend triton cannot bound scores (attention_softcap {rule.softcap}); choose "
            "--attention-backend flex, or blocks"
        )
    if name == "triton" and kernels is None:
        raise ConfigError(
            "--attention-backend triton takes its work from the C++ kernels, which cannot be used here; run 'pip install -e .' "
            "where this copy of Braid lies, or choose --attention-backend flex"
        )
    if name == FLASH and not can_flash(shape):
        raise ConfigError(
            f"--attention-backend flash runs on CUDA in half precision, with heads of at most 256 channels, a multiple of 8, and "
            f"torch 2.10 or the package flash-attn; found {'CUDA' if shape.is_cuda else 'a CPU'}, {shape.dtype}, heads of "
            f"{shape.channels} channels; choose --attention-backend sequences"
        )
    return name
