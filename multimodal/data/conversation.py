"""Turns the ordered segments of a sample into tokens: role markers, image placeholders and training targets.

A sample reads `begin`, then its turns. A turn is a run of text segments of one role: the role's marker, the texts, and for
assistant and document turns `end`. An image is `vision_start`, one placeholder per output token, `vision_end`, and a clip of
sound likewise `audio_start`, placeholders, `audio_end`; inside a turn if the text on either side belongs to it (or no text
follows), else between turns.

    begin [image] user "how many?" assistant "three" end
                                              ^^^^^  ^^^   targets

Targets are the texts of assistant turns and their `end`. A sample with document text only is trained on all of it. A system turn
is written like a document turn.

An image that a generator makes is part of an assistant turn, as `vision_start vision_end` without placeholders, and sound as
`audio_start audio_end`. The first of the two is a target (the LLM decides what follows), its hidden state the generator's input.

    begin user "draw 7" assistant vision_start vision_end end
                                  ^^^^^^^^^^^^            ^^^   targets
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from multimodal.data.sample_source import SampleText
from multimodal.data.tokenizer import Tokenizer
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

ROLES = ("user", "assistant", "document", "system")


class TextSegment(NamedTuple):
    """A text and the role of its speaker."""

    role: str
    """A name of ROLES."""
    text: str


@dataclass(frozen=True, slots=True)
class ItemSegment:
    """An image, a video or a step of it, or a clip of sound, that becomes this many tokens of the LLM."""

    num_output_tokens: int
    """Output tokens of all tiles."""
    kind: Literal["image", "audio", "video"] = "image"
    num_tiles: int = 1
    """Number of consecutive items, with equal shares of these tokens."""
    row_length: int | None = None
    """Tokens of a row of an image, with the one that ends it; None: rows have no ends."""
    times: tuple[str, ...] = ()
    """Texts before each tile, if these are steps of a video that stand alone (Qwen3-VL)."""

    @property
    def alone(self) -> "list[ItemSegment]":
        """The steps that stand alone, or the item itself."""
        if not self.times:
            return [self]
        return [replace(self, num_output_tokens=self.num_output_tokens // self.num_tiles, num_tiles=1, times=())] * self.num_tiles


@dataclass(frozen=True, slots=True)
class GeneratedSegment:
    """An image or sound in the assistant's answer: a generator makes it, and the LLM has no tokens for it."""

    kind: Literal["image", "audio"] = "image"


Segment = TextSegment | ItemSegment | GeneratedSegment


@dataclass(frozen=True, slots=True)
class Conversation:
    """A tokenised sample, in the compact form that an index keeps."""

    token_ids: npt.NDArray[np.int32]
    """[num_tokens]."""
    is_trained: npt.NDArray[np.bool_]
    """[num_tokens]; True where this token is to be predicted."""
    item_starts: tuple[tuple[int, int, int], ...]
    """(item_index, start, num_output_tokens) of the items that fit; see `SampleText`."""
    is_cut: bool
    loss_weight: float = 1.0

    @property
    def num_target_tokens(self) -> int:
        """Tokens to be predicted; the first one never is."""
        return int(self.is_trained[1:].sum())


class TokenRun(NamedTuple):
    """Consecutive tokens that belong together; an item's run contains its output tokens."""

    token_ids: list[int]
    is_trained: Sequence[bool]
    """Of each of them."""
    item_at: int | None = None
    """Place of an item's first output token among them; None: a text."""
    num_output_tokens: int = 0
    num_tiles: int = 1


def build_conversation(segments: Sequence[Segment], *, tokenizer: Tokenizer, seq_length: int) -> Conversation:
    """Tokenise segments up to `seq_length` tokens."""
    return join_runs(_token_runs(segments, tokenizer=tokenizer), seq_length=seq_length)


def join_runs(runs: Iterable[TokenRun], *, seq_length: int) -> Conversation:
    """Join runs up to `seq_length` tokens, cut inside a text, or before the first item that does not fit."""
    token_ids, trained, is_cut = list[int](), list[bool](), False
    item_starts: list[tuple[int, int, int]] = []
    for run in runs:
        is_cut = len(token_ids) + len(run.token_ids) > seq_length
        if run.item_at is not None and is_cut:
            break
        if run.item_at is not None:
            share, first = run.num_output_tokens // run.num_tiles, len(token_ids) + run.item_at
            item_starts += [(len(item_starts) + tile, first + tile * share, share) for tile in range(run.num_tiles)]
        token_ids += run.token_ids
        trained += run.is_trained
        if is_cut:
            break
    del token_ids[seq_length:], trained[seq_length:]
    return Conversation(np.array(token_ids, dtype=np.int32), np.array(trained, dtype=np.bool_), tuple(item_starts), is_cut)


def find_item_behind_text(conversation: Conversation) -> int | None:
    """Return the index of the first item with other tokens than `begin` and items before it; None if there is none."""
    start = 2
    for item_index, item_start, num_output_tokens in conversation.item_starts:
        if num_output_tokens and item_start not in (start, start - 2):  # tiles of one image follow each other
            return item_index
        start = item_start + num_output_tokens + 2 if num_output_tokens else start
    return None


def build_sample_lengths(
    conversation: Conversation, *, sample_id: int, units: Sequence[str], sizes: Sequence[int]
) -> SampleLengths:
    """Return the lengths of a sample; units, sizes: for every item that fits, its unit and its tokens inside the unit."""
    outputs = [num_output_tokens for _, _, num_output_tokens in conversation.item_starts]
    return SampleLengths(
        sample_id,
        tuple(map(ItemLengths, units, sizes, outputs)),
        num_text_tokens=len(conversation.token_ids) - sum(outputs),
        num_target_tokens=conversation.num_target_tokens,
        item_starts=tuple(start for _, start, _ in conversation.item_starts),
        loss_weight=conversation.loss_weight,
    )


def build_sample_text(conversation: Conversation, *, pad_id: int) -> SampleText:
    """Shift tokens into labels; the last token has no successor, so its label is `pad_id` and never a target."""
    token_ids = conversation.token_ids.astype(np.int64)
    labels, is_target = np.append(token_ids[1:], pad_id), np.append(conversation.is_trained[1:], False)
    return SampleText(token_ids, labels, is_target, conversation.item_starts)


def _text_run(token_ids: list[int], *, is_trained: bool = False) -> TokenRun:
    return TokenRun(token_ids, [is_trained] * len(token_ids))


def _token_runs(segments: Sequence[Segment], *, tokenizer: Tokenizer) -> Iterator[TokenRun]:
    special = tokenizer.special
    yield _text_run([special.begin])
    roles = [_role(segment) for segment in segments if not isinstance(segment, ItemSegment)]
    trained_role = "document" if set(roles) == {"document"} else "assistant"
    markers = {"user": special.user, "assistant": special.assistant, "document": special.document, "system": special.document}
    turn: str | None = None
    num_seen = 0
    for segment in segments:
        next_role = roles[num_seen] if num_seen < len(roles) else turn
        if turn is not None and next_role != turn:
            if turn != "user":
                yield _text_run([special.end], is_trained=turn == trained_role)
            turn = None
        if isinstance(segment, ItemSegment):
            start, placeholder, end = special.around(segment.kind)
            yield from [_text_run([start])] if segment.times else ()
            for time, each in zip(segment.times or ("",), segment.alone, strict=True):
                yield from [_text_run(tokenizer.encode(time))] if time else ()
                run = [start, *[placeholder] * each.num_output_tokens, end]
                yield TokenRun(run, [False] * len(run), 1, each.num_output_tokens, each.num_tiles)
            yield from [_text_run([end])] if segment.times else ()
            continue
        num_seen += 1
        if turn is None:
            yield _text_run([markers[_role(segment)]])
        turn = _role(segment)
        if isinstance(segment, GeneratedSegment):
            start, _, end = special.around(segment.kind)
            yield TokenRun([start, end], [True, False], 0)  # only the token that announces it is to be predicted
            continue
        yield _text_run(tokenizer.encode(segment.text), is_trained=turn == trained_role)
    if turn not in (None, "user"):
        yield _text_run([special.end], is_trained=turn == trained_role)


def _role(segment: TextSegment | GeneratedSegment) -> str:
    return segment.role if isinstance(segment, TextSegment) else "assistant"
