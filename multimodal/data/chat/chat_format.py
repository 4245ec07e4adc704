"""A conversation in a model's chat template and tokenizer: tokens, targets, and the places of its images and clips.

Text that contains the spelling of a special token stays text. Every placeholder that the template writes for an image or a clip
is repeated to its number of output tokens; templates write them in the order of a message's items.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multimodal.data.chat.chat_template import ChatTemplate, Span
from multimodal.data.conversation import Conversation, GeneratedSegment, ItemSegment, Segment, TextSegment, TokenRun, join_runs
from multimodal.data.tokenizer import MISSING, HuggingFaceTokenizer
from multimodal.values.errors import ConfigError, DataError
from multimodal.values.file_form import read_mapping

_KINDS = "image", "audio", "video"
_WRAPPED = {"internvl": ("<img>", "</img>")}
"""Model type -> tokens that the processor, rather than the template, puts around an image."""
_ROW_ENDS = "[IMG_BREAK]", "[IMG_END]"
"""Tokens that Pixtral's processor puts behind the rows of an image, and behind the last one."""


@dataclass(frozen=True)
class Placeholder:
    """The tokens that a prompt has for an image or an audio clip."""

    token_id: int
    spelling: str
    """The token as text, with the tokens around it in documents."""
    before: tuple[int, ...]
    """Tokens that the processor, rather than the template, puts before it."""
    after: tuple[int, ...]
    row_ends: tuple[int, int] | None = None
    """Tokens behind the rows of an image, and behind the last one; None: rows have no ends."""

    def tokens(self, num_tokens: int, *, row_length: int | None) -> list[int]:
        """Return the tokens of an item; row_length: tokens of an image's rows with their ends, if they have any."""
        if row_length is None or self.row_ends is None:
            return [self.token_id] * num_tokens
        rows = [*[self.token_id] * (row_length - 1), self.row_ends[0]] * (num_tokens // row_length)
        return [*rows[:-1], self.row_ends[1]]


def find_placeholders(folder: Path, tokenizer: HuggingFaceTokenizer) -> dict[str, Placeholder]:
    """Return the placeholders by kind, image, audio and video; raises ConfigError if the tokenizer lacks those of config.json."""
    path = folder / "config.json"
    config: Any = read_mapping(path, error=ConfigError) if path.is_file() else {}
    config = {**config, **config.get("thinker_config", {})}
    spelled = _ROW_ENDS if (config.get("vision_config") or {}).get("model_type") == "pixtral" else ()
    wrapping = _WRAPPED.get(config.get("model_type"), ())
    ends, wrap = (tuple(map(tokenizer.id_of, tokens)) for tokens in (spelled, wrapping))
    if MISSING in (*ends, *wrap):
        raise ConfigError(f"{folder}: the tokenizer lacks {' or '.join(spelled or wrapping)}; give the model's own")
    special, spellings = tokenizer.special, tokenizer.special_spellings
    found: dict[str, Placeholder] = {}
    for kind, (start, own, end) in ((kind, special.around(kind)) for kind in _KINDS):
        keys = f"{kind}_token_id", f"{kind}_token_index"
        token_id = next((config[key] for key in keys if isinstance(config.get(key), int)), own)
        if token_id == MISSING or any(token_id == other.token_id for other in found.values()):
            continue
        if kind == "video" and token_id not in spellings:  # of those that name it by default
            continue
        around = (MISSING, MISSING) if wrap or token_id != own else (start, end)
        if token_id not in spellings:
            raise ConfigError(
                f"{path}: the placeholder ({kind}) is token {token_id}, which is none of the tokenizer's special tokens; give "
                "the model's own: --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR"
            )
        before, behind = (spellings.get(number, "") for number in around)
        spelling = f"{before}{spellings[token_id]}{behind}" if before and behind else spellings[token_id]
        row_ends = (ends[0], ends[1]) if ends and kind == "image" else None
        found[kind] = Placeholder(token_id, spelling, wrap[:1], wrap[1:], row_ends)
    return found


_HIDDEN = "\U0010fffd"
"""A private-use character that encloses the id of a special token whose spelling a text contains."""
_HIDDEN_TOKEN = re.compile(f"{_HIDDEN}(\\d+){_HIDDEN}")
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")


class ChatFormat:
    """Builds conversations by a template."""

    def __init__(self, template: ChatTemplate, *, tokenizer: HuggingFaceTokenizer, folder: Path) -> None:
        """folder: the model's, whose config.json gives the placeholders of images and sound, if there is one.

        Raises ConfigError if an example cannot be rendered, or its answer be located behind the generation prompt.
        """
        self._template, self._tokenizer, self._spellings = template, tokenizer, tokenizer.special_spellings
        # Compared as tokens: a space before an answer may be part of its first token.
        text, spans, prompt = self._template.render_example()
        tokens, offsets = self._tokenizer.encode_rendered(text, adds_special_tokens=False)
        asked, _ = self._tokenizer.encode_rendered(prompt, adds_special_tokens=False)
        between = text[len(prompt) : spans[0][0]] if text.startswith(prompt) else ""
        self._lead = "" if between.strip() else between  # what is generated first, where a template marks less
        first = int(_trained(offsets, self._with_lead(text, spans)).argmax())
        if asked != tokens[:first]:
            before = text[: offsets[first][0]]
            raise ConfigError(
                f"{self._template.source}: an answer that is learnt stands behind {before[-40:]!r}, but the generation prompt "
                f"ends in {prompt[-40:]!r}, so that a trained model would be asked otherwise than it was taught; make both alike "
                "(add_generation_prompt, or where {% generation %} begins), give another --chat-template FILE, or none"
            )
        self.placeholders = find_placeholders(folder, tokenizer)
        self._has_processor = any((folder / name).is_file() for name in _PROCESSORS)

    def build(self, segments: Sequence[Segment], *, seq_length: int, where: str) -> Conversation:
        """Tokenise segments as `build_conversation` does; raises DataError, which names `where`, for what no template renders."""
        if any(isinstance(segment, GeneratedSegment) for segment in segments):
            raise DataError(f"{where}: a chat template has no images that the assistant answers with; use --chat-template none")
        roles = {segment.role for segment in segments if isinstance(segment, TextSegment)}
        if "document" in roles and roles != {"document"}:
            raise DataError(f"{where}: document texts beside turns, which no chat template has; use --chat-template none")
        try:
            text, spans = self._document(segments) if "document" in roles else self._turns(segments)
        except (ConfigError, DataError) as problem:
            raise DataError(f"{where}: {problem}") from problem
        items = [segment for segment in segments if isinstance(segment, ItemSegment)]
        text, spans = self._with_times(text, spans, items)
        text, spans, literal = self._shown(text, spans)
        begin = self._template.tokens.get("bos_token")
        adds = ("document" in roles or self._has_processor) and not (begin and text.startswith(begin))
        token_ids, offsets = self._tokenizer.encode_rendered(text, adds_special_tokens=adds)
        trained = _trained(offsets, spans).tolist()
        if literal:
            token_ids, trained = self._with_literal(token_ids, trained, offsets, literal)
        items = [each for item in items for each in item.alone]
        return join_runs(self._expanded(token_ids, trained, items, where=where), seq_length=seq_length)

    def _turns(self, segments: Sequence[Segment]) -> tuple[str, list[Span]]:
        messages = [
            {"role": role, "content": parts if self._template.takes_parts else self._joined(parts)}
            for role, parts in _messages(segments, hide=self._hide)
        ]
        text, spans = self._template.render(messages)
        return text, self._with_lead(text, spans)

    def _with_lead(self, text: str, spans: list[Span]) -> list[Span]:
        return [(start - len(self._lead) * text.endswith(self._lead, 0, start), end) for start, end in spans]

    def _joined(self, parts: Sequence[dict[str, Any]]) -> str:
        """Return the content of a message as one text, for templates without parts; images at its ends have their own lines."""
        is_text = [part["type"] == "text" for part in parts]
        content = ""
        for index, part in enumerate(parts):
            if is_text[index]:
                content += part["text"]
            elif not any(is_text[:index]):
                content += f"{self._spelling(part['type'])}\n"
            else:
                content += f"{'' if any(is_text[index:]) else chr(10)}{self._spelling(part['type'])}"
        return content

    def _document(self, segments: Sequence[Segment]) -> tuple[str, list[Span]]:
        text, spans = "", []
        for segment in segments:
            if isinstance(segment, TextSegment):
                spans.append((len(text), len(text) + len(hidden := self._hide(segment.text))))
                text += hidden
            elif isinstance(segment, ItemSegment):
                text += self._spelling(segment.kind)
        end = self._template.tokens.get("eos_token", "")
        return text + end, [*spans, (len(text), len(text) + len(end))]

    def _spelling(self, kind: str) -> str:
        if kind not in self.placeholders:
            raise DataError(
                f"an item ({kind}) for which neither config.json ({kind}_token_id) nor the tokenizer knows a placeholder; "
                "take the folder of a model that takes such items, or --chat-template none"
            )
        return self.placeholders[kind].spelling

    @cached_property
    def _spelled(self) -> re.Pattern[str] | None:
        longest_first = sorted(self._spellings.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def _hide(self, text: str) -> str:
        """Replace spellings of special tokens in a text by their ids between private-use characters."""
        text = text.encode(errors="replace").decode().replace(_HIDDEN, "?")
        if self._spelled is None:
            return text
        return self._spelled.sub(lambda match: f"{_HIDDEN}{self._tokenizer.id_of(match[0])}{_HIDDEN}", text)

    def _with_times(self, text: str, spans: list[Span], items: Sequence[ItemSegment]) -> tuple[str, list[Span]]:
        """Repeat the placeholder of a video whose steps stand alone behind the time of each, as Qwen3-VL's processor does."""
        videos = [item for item in items if item.kind == "video"]
        if not any(item.times for item in videos) or "video" not in self.placeholders:
            return text, spans
        placeholder = self.placeholders["video"]
        token = self._spellings[placeholder.token_id]
        found = [*re.finditer(re.escape(token), text)][: len(videos)]  # of others `_expanded` tells
        steps = ["".join(f"{time}{placeholder.spelling}" for time in item.times) or token for item in videos]
        text, moved = _replaced(text, found, steps[: len(found)])
        return text, [(moved(start), moved(end)) for start, end in spans]

    def _shown(self, text: str, spans: list[Span]) -> tuple[str, list[Span], dict[int, str]]:
        """Restore the spellings of hidden tokens; returns text, spans, and the start of each such spelling."""
        matches = list(_HIDDEN_TOKEN.finditer(text))
        spelled = [self._spellings[int(match[1])] for match in matches]
        shown, moved = _replaced(text, matches, spelled)
        literal = {moved(match.start()): new for match, new in zip(matches, spelled, strict=True)}
        return shown, [(moved(start), moved(end)) for start, end in spans], literal

    def _with_literal(
        self, token_ids: list[int], trained: list[bool], offsets: list[Span], literal: dict[int, str]
    ) -> tuple[list[int], list[bool]]:
        """Replace special tokens that come from spellings in a text by the tokens of their letters."""
        ids: list[int] = []
        flags: list[bool] = []
        for token_id, is_trained, (start, end) in zip(token_ids, trained, offsets, strict=True):
            spelling = next((text for place, text in literal.items() if start <= place < end), None)
            letters = self._tokenizer.encode(spelling) if spelling is not None and token_id in self._spellings else [token_id]
            ids += letters
            flags += [is_trained] * len(letters)
        return ids, flags

    def _expanded(self, token_ids: list[int], trained: list[bool], items: list[ItemSegment], *, where: str) -> Iterator[TokenRun]:
        """Yield a text's tokens with those of every item in place of its placeholder."""
        kinds = {placeholder.token_id: kind for kind, placeholder in self.placeholders.items()}
        places = [(index, kinds[token_id]) for index, token_id in enumerate(token_ids) if token_id in kinds]
        if [kind for _, kind in places] != [item.kind for item in items]:
            raise DataError(
                f"{where}: {self._template.source} writes {len(places)} placeholders for {len(items)} items, or in another "
                "order; take the tokenizer and the template of a model that takes such items, or --chat-template none"
            )
        done = 0
        for (place, kind), item in zip(places, items, strict=True):
            placeholder, (start, _, end) = self.placeholders[kind], self._tokenizer.special.around(kind)
            for beside in (place - 1, place + 1):
                if token_ids[beside : beside + 1] and token_ids[beside] in (start, end):
                    trained[beside] = False  # a model is shown items, and does not write them
            yield TokenRun(token_ids[done:place], trained[done:place])
            own = placeholder.tokens(item.num_output_tokens, row_length=item.row_length)
            run = [*placeholder.before, *own, *placeholder.after]
            yield TokenRun(run, [False] * len(run), len(placeholder.before), item.num_output_tokens, item.num_tiles)
            done = place + 1
        yield TokenRun(token_ids[done:], trained[done:])


def _replaced(text: str, matches: Sequence[re.Match[str]], new: Sequence[str]) -> tuple[str, Callable[[int], int]]:
    """Replace what was found in a text; returns it, and where a place in it is now."""
    growth = [0, *accumulate(len(each) - len(match[0]) for each, match in zip(new, matches, strict=True))]
    ends = [match.end() for match in matches]
    between = [text[start:end] for start, end in zip([0, *ends], [*[match.start() for match in matches], len(text)], strict=True)]
    whole = between[0] + "".join(map("".join, zip(new, between[1:], strict=True)))
    return whole, lambda place: place + growth[bisect_right(ends, place)]


def _trained(offsets: list[Span], spans: list[Span]) -> npt.NDArray[np.bool_]:
    """[num_tokens]: True from the first to the last token that lies in a span, even if only in part."""
    trained = np.zeros(len(offsets), dtype=np.bool_)
    starts, ends = (np.array([offset[side] for offset in offsets], dtype=np.int64) for side in (0, 1))
    for start, end in spans:
        inside = np.flatnonzero((ends > start) & (starts < end))
        if len(inside):
            trained[inside[0] : inside[-1] + 1] = True
    return trained


def _messages(segments: Sequence[Segment], *, hide: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (role, parts) of every turn: an item belongs to the turn around or behind it, but not to an answer behind it."""
    turns, waiting = list[tuple[str, list[dict[str, Any]]]](), list[dict[str, Any]]()
    for segment, behind in pairwise([*segments, TextSegment("", ""), None]):
        if not isinstance(segment, TextSegment):
            kind = segment.kind if isinstance(segment, ItemSegment) else "image"
            waiting.append({"type": kind, kind: ""})  # some templates ask for the type, some for the key
            continue
        last = turns[-1][0] if turns else None
        if waiting and segment.role not in ("user", last):
            turns += [] if last == "user" else [("user", [])]
            turns[-1][1].extend(waiting)
            waiting = []
        turns += [] if last == segment.role else [(segment.role, [])]
        opens_items = last == "assistant" != segment.role and not segment.text and isinstance(behind, ItemSegment)
        turns[-1][1].extend([*waiting, *([] if opens_items else [{"type": "text", "text": hide(segment.text)}])])
        waiting = []
    yield from turns[:-1]
