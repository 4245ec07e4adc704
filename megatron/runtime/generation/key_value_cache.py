"""Keys and values of an LLM's attention layers, so that a further token costs a forward of that token alone."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimodal.attention.block_attention import capped
from multimodal.attention.core_attention import CoreAttention
from multimodal.attention.packed_lengths import MaskRule
from multimodal.model.layers.registry import kind_of
from multimodal.model.unit_stage import UnitStage


class _Known(NamedTuple):
    """A sequence whose tokens are computed."""

    logits: Tensor
    states: tuple[tuple[Tensor, Tensor], ...]
    """[num_layers] keys and values, [num_tokens, 1, groups, head_channels] each."""


class KeyValueCache:
    """Keys and values of the sequences that the last call asked about, found by their token ids.

    So beams may be reordered, doubled and dropped without a word to the cache. llm: its only stage, without context or tensor
    parallelism. Leaving the context removes the cache from the layers.
    """

    def __init__(self, llm: UnitStage) -> None:
        self._is_kept = not llm.unit.transformer.rotary_long_factors
        """False if rotary angles of all tokens change with the sequence's length."""
        self._known: dict[tuple[int, ...], _Known] = {}
        self._before: Sequence[tuple[Tensor, Tensor]] = ()
        self._behind: list[tuple[Tensor, Tensor]] = []
        attentions = (kind_of(llm.unit, index).core_attention(llm.layers[str(index)]) for index in llm.layer_range)
        self._hooks = [each.register_forward_hook(self._attend, with_kwargs=True) for each in attentions if each is not None]

    def __enter__(self) -> "KeyValueCache":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def next_logits(self, sequences: Tensor, compute: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return the logits behind each sequence, [num_sequences, vocab_size]; sequences: [num_sequences, num_tokens] ids.

        compute: runs the LLM on a sequence, [num_tokens], but for so many tokens at its begin, and returns [vocab_size].
        """
        computed: dict[tuple[int, ...], _Known] = {}
        for ids in sequences:
            sequence = tuple(ids.tolist())
            if sequence in computed:
                continue
            before = self._known.get(sequence[:-1]) if self._is_kept else None
            self._before, self._behind = () if before is None else before.states, []
            logits = compute(ids, 0 if before is None else len(ids) - 1)
            computed[sequence] = _Known(logits, tuple(self._behind))
        self._known = computed
        return torch.stack([computed[tuple(ids.tolist())].logits for ids in sequences])

    def _attend(self, attention: CoreAttention, given: tuple[Any, ...], options: Any, output: Tensor) -> Tensor:
        """Keep keys and values; let a single token attend to those before it, too."""
        query, key, value = given[:3]
        if self._before:
            keys, values = self._before[len(self._behind)]
            key, value = torch.cat((keys, key)), torch.cat((values, value))
            output = attend_to_all(query, key, value, rule=attention.choice.rule, softmax_scale=attention.softmax_scale)
        self._behind.append((key, value))
        return output


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, *, rule: MaskRule, softmax_scale: float | None) -> Tensor:
    """Let the last token of a sequence, which is text, attend to all tokens, or to the last ones in the rule's window.

    query: [1, 1, heads, head_channels]; key, value: [num_tokens, 1, groups, head_channels].
    Returns [1, 1, heads x head_channels].
    """
    wide, first = torch.promote_types(query.dtype, torch.float32), -(rule.window or len(key))
    key, value = (tensor[first:, 0].to(wide) for tensor in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if softmax_scale is None else softmax_scale
    grouped = query[0, 0].unflatten(0, (key.shape[1], -1)).to(wide)
    scores = capped(torch.einsum("ghc,kgc->ghk", grouped, key) * scale, rule.softcap)
    return torch.einsum("ghk,kgc->ghc", scores.softmax(dim=-1), value).to(query.dtype).reshape(1, 1, -1)
