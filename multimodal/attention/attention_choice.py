"""Chooses the backends of a unit's attention, and prepares their inputs from a microbatch's lengths ahead of the step."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from multimodal.attention.attention_backend import AUTO, FLASH, SEQUENCES, AttentionShape, load_preparation
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.device_values import CPU
from multimodal.attention.flash_attention import can_flash
from multimodal.attention.packed_lengths import MaskRule, PackedLengths
from multimodal.attention.triton_kernels.options import MAX_CHANNELS
from multimodal.values.errors import ConfigError

ON_CPU = AttentionShape()
BY_SEQUENCE = (SEQUENCES, FLASH)
"""Backends that take whole sequences and no mask."""


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


def choose_attention(name: str, *, rule: MaskRule, shape: AttentionShape, is_shared: bool) -> AttentionChoice:
    """Choose by the name of a backend; is_shared: a sequence's tokens are spread over ranks (context parallelism).

    Raises ConfigError if the backend cannot evaluate the mask, or does not run on the device.
    """
    backend = choose_backend(name, rule=rule, is_shared=is_shared, shape=shape)
    alone = choose_backend(name, rule=rule, shape=shape)
    return AttentionChoice(rule, shape, backend, alone if alone in BY_SEQUENCE else backend)


def choose_backend(name: str, *, rule: MaskRule, is_shared: bool = False, shape: AttentionShape = ON_CPU) -> str:
    """Resolve `auto`; raises ConfigError when a backend that takes whole sequences cannot evaluate the mask."""
    needs_mask = rule.is_causal and (rule.mode is not MaskMode.CAUSAL or (rule.window or rule.softcap) is not None)
    if name == AUTO:
        if needs_mask or is_shared or (shape.is_cuda and not can_flash(shape)):  # no loop over sequences launches kernels there
            return _of_blocks(shape, rule)
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
    if name == FLASH and not can_flash(shape):
        raise ConfigError(
            f"--attention-backend flash runs on CUDA in half precision, with heads of at most 256 channels, a multiple of 8, and "
            f"torch 2.10 or the package flash-attn; found {'CUDA' if shape.is_cuda else 'a CPU'}, {shape.dtype}, heads of "
            f"{shape.channels} channels; choose --attention-backend sequences"
        )
    return name


def _of_blocks(shape: AttentionShape, rule: MaskRule) -> str:
    """Return the fastest backend that evaluates masks: Triton's on CUDA, else torch's FlexAttention, which can bound scores."""
    if not shape.is_cuda or shape.dtype == torch.float64:
        return "blocks"
    has_kernels = find_spec("triton") is not None and shape.channels <= MAX_CHANNELS and rule.softcap is None
    return "triton" if has_kernels else "flex"
