"""A model's chat template: its file in the model's folder, its rendering by transformers, and the assistant's text in it.

The assistant's spans are those that the template marks ({% generation %}). If it marks none, a span lies between its rendering of
the messages before an answer, with the generation prompt, and its rendering of the messages up to the answer; both must be
prefixes of the whole. If the latter is not, because the template writes an answer differently once more messages follow (Qwen3
leaves out its thoughts), the span is the part of the whole that corresponds to the answer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from multimodal.data.tokenizer import tokenizer_file
from multimodal.values.errors import ConfigError, DataError
from multimodal.values.file_form import read_mapping, read_text

NO_TEMPLATE = "none"
Message = Mapping[str, Any]
Span = tuple[int, int]
_TEMPLATE_NAMES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_CONFIG_NAMES = ("special_tokens_map.json", "tokenizer_config.json")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIXED_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"
"""Some templates write today's date, which would change samples from day to day; this is their date if they are told none."""
_TOKEN_AT_END = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])$")
_TOKEN_IN_FRONT = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_PROBE = "is it a list?"
_MARK = "\U0010fffc"
"""A private-use character that replaces an answer."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the spellings of the special tokens that it uses."""

    text: str
    source: str
    """The file that it comes from, for messages."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token` and others -> spelling."""

    @property
    def marks_spans(self) -> bool:
        """True if the template itself marks the assistant's text."""
        return _GENERATION.search(self.text) is not None

    @cached_property
    def takes_parts(self) -> bool:
        """True if a message's content is a list of parts; else it is one text."""
        try:
            rendered, _ = self._render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        except ConfigError:
            return False
        return _PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered

    def render_example(self) -> tuple[str, list[Span], str]:
        """Return a question with its answer, the answer's spans, and the prompt of the question alone; raises ConfigError."""
        content = [[{"type": "text", "text": text}] if self.takes_parts else text for text in ("question", "answer")]
        messages = [{"role": role, "content": part} for role, part in zip(("user", "assistant"), content, strict=True)]
        try:
            text, spans = self.render(messages)
        except DataError as problem:
            raise ConfigError(str(problem)) from None
        found = [(start, end) for start, end in spans if "answer" in text[start:end] and "question" not in text[start:end]]
        if not found:
            raise ConfigError(self._no_spans("the answer to one question is not found"))
        return text, found, self._render(messages[:1], with_prompt=True)[0]

    def render(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return a conversation's text and the spans of what the assistant says; raises ConfigError, or DataError."""
        text, spans = self._render(messages)
        return text, spans if self.marks_spans else self._spans_between_prefixes(text, messages)

    def _spans_between_prefixes(self, text: str, messages: Sequence[Message]) -> list[Span]:
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:index], with_prompt=True)
            upto = text if index + 1 == len(messages) else self._render(messages[: index + 1])[0]
            if text.startswith(before) and text.startswith(upto) and len(before) < len(upto):
                answer = upto[len(before) :]
                stripped = answer.rstrip()
                # Models are not trained to predict spaces behind the token that ends a turn.
                ends_turn = _TOKEN_AT_END.search(stripped) or stripped.endswith(self.tokens.get("eos_token") or "\0")
                spans.append((len(before), len(before) + len(stripped if ends_turn else answer)))
            elif (span := self._span_in_whole(text, messages, index)) is not None and text.startswith(before):
                spans.append(span)
            else:
                raise DataError(self._no_spans(f"what it renders of the first {index + 1} messages does not begin the whole"))
        return spans

    def _span_in_whole(self, text: str, messages: Sequence[Message], index: int) -> Span | None:
        """Return the span of an answer that the whole writes differently from a conversation ending with it (no thoughts).

        Another text in its place shows its beginning and end. None if the rest of the whole changes with it.
        """
        content = [{"type": "text", "text": _MARK}] if self.takes_parts else _MARK
        marked, _ = self._render([*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]])
        before, _, behind = marked.partition(_MARK)
        end = len(text) - len(behind)
        shown = text[len(before) : end].strip()
        is_alike = marked.count(_MARK) == 1 and text.startswith(before) and text.endswith(behind)
        said = messages[index]["content"]
        said = said if isinstance(said, str) else "".join(part.get("text", "") for part in said)
        if not (is_alike and shown and said.strip().endswith(shown)):
            return None
        # The span includes the token that ends a turn, right behind an answer.
        eos_token, found = self.tokens.get("eos_token"), _TOKEN_IN_FRONT.match(behind)
        if eos_token and behind.startswith(eos_token):
            return len(before), end + len(eos_token)
        return len(before), end + found.end() if found else end

    def _no_spans(self, reason: str) -> str:
        has = "a {% generation %} that does not hold it" if self.marks_spans else "no {% generation %}"
        return (
            f"{self.source}: what the assistant says cannot be told in the chat template, which has {has}, and {reason}; set "
            "that mark around what the assistant says, give another --chat-template FILE, or none"
        )

    def _render(self, messages: Sequence[Message], *, with_prompt: bool = False) -> tuple[str, list[Span]]:
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as problem:
            raise ConfigError(
                f"{self.source}: a chat template needs the package 'transformers'; install it with: pip install 'braid[hf]', or "
                f"use --chat-template {NO_TEMPLATE}"
            ) from problem
        template = _FIXED_DATE + self.text if "strftime_now" in self.text else self.text
        options = {"chat_template": template, "return_assistant_tokens_mask": self.marks_spans, **self.tokens}
        try:
            rendered, spans = render_jinja_template([list(messages)], add_generation_prompt=with_prompt, **options)
        except Exception as problem:  # Jinja's, or any error of a template's expressions
            raise ConfigError(
                f"{self.source}: the chat template fails ({type(problem).__name__}: {problem}); correct it, or give another "
                "--chat-template FILE"
            ) from problem
        return rendered[0], [(start, end) for start, end in spans[0]] if self.marks_spans else []


def find_chat_template(tokenizer: str | Path, *, chosen: str | None) -> ChatTemplate | None:
    """Return the template beside a tokenizer's file or folder, or the `chosen` file, if any; raises ConfigError."""
    if chosen == NO_TEMPLATE:
        return None
    folder, tokens = tokenizer_file(tokenizer).parent, {}
    for path in (folder / name for name in _CONFIG_NAMES):
        for key, value in read_mapping(path, error=ConfigError).items() if path.is_file() else ():
            spelling = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(spelling, str):
                tokens[key] = spelling
    if chosen is not None:
        if (text := _read_template(Path(chosen))) is None:
            raise ConfigError(f"--chat-template {chosen}: holds no chat template; give a .jinja file, or {NO_TEMPLATE}")
        return ChatTemplate(text, chosen, tokens)
    for name in _TEMPLATE_NAMES:
        if (folder / name).is_file() and (text := _read_template(folder / name)) is not None:
            return ChatTemplate(text, str(folder / name), tokens)
    return None


def _read_template(path: Path) -> str | None:
    """Return the template in a file: all of it, or a JSON object's `chat_template`, or the one named default among several."""
    if not path.is_file():
        raise ConfigError(f"--chat-template {path}: no such file; give a .jinja file, or {NO_TEMPLATE}")
    if path.suffix != ".json":
        return read_text(path, error=ConfigError)
    found = read_mapping(path, error=ConfigError).get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
