"""Tokens that stand for an image or an audio clip in a model's prompts, read from its folder, with the tokens around them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimodal.data.tokenizer import MISSING, HuggingFaceTokenizer
from multimodal.values.errors import ConfigError

_CONFIG_KEYS = {"image": ("image_token_id", "image_token_index"), "audio": ("audio_token_id", "audio_token_index")}
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
    """Return the placeholders by kind, image and audio; raises ConfigError if the tokenizer lacks those of config.json."""
    config: Any = {}
    if (folder / "config.json").is_file():
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except ValueError as problem:
            raise ConfigError(f"{folder / 'config.json'}: is no JSON ({problem}); copy the model's folder again") from problem
    config = {**config, **config.get("thinker_config", {})}
    ends = tuple(map(tokenizer.id_of, _ROW_ENDS)) if (config.get("vision_config") or {}).get("model_type") == "pixtral" else ()
    if MISSING in ends:
        raise ConfigError(f"{folder}: the tokenizer lacks {' or '.join(_ROW_ENDS)}; give the model's own")
    wrap = [tokenizer.id_of(token) for token in _WRAPPED.get(config.get("model_type"), ())]
    if MISSING in wrap:
        raise ConfigError(f"{folder}: the tokenizer lacks {' or '.join(_WRAPPED[config['model_type']])}; give the model's own")
    special = tokenizer.special
    found: dict[str, Placeholder] = {}
    for kind, (start, own, end) in {
        "image": (special.vision_start, special.image, special.vision_end),
        "audio": (special.audio_start, special.audio, special.audio_end),
    }.items():
        token_id = next((config[key] for key in _CONFIG_KEYS[kind] if isinstance(config.get(key), int)), own)
        if token_id == MISSING or any(token_id == other.token_id for other in found.values()):
            continue
        around = (MISSING, MISSING) if wrap or token_id != own else (start, end)
        spelling = _spelled_placeholder(kind, token_id, around=around, folder=folder, tokenizer=tokenizer)
        row_ends = (ends[0], ends[1]) if ends and kind == "image" else None
        found[kind] = Placeholder(token_id, spelling, tuple(wrap[:1]), tuple(wrap[1:]), row_ends)
    return found


def _spelled_placeholder(
    kind: str, token_id: int, *, around: tuple[int, int], folder: Path, tokenizer: HuggingFaceTokenizer
) -> str:
    """Return a placeholder as text, with the tokens around it in documents, if there are any."""
    spellings = {number: spelling for spelling, number in tokenizer.special_spellings.items()}
    if token_id not in spellings:
        raise ConfigError(
            f"{folder / 'config.json'}: the placeholder ({kind}) is token {token_id}, which is none of the tokenizer's special "
            "tokens; give the model's own: --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR"
        )
    start, end = (spellings.get(number, "") for number in around)
    return f"{start}{spellings[token_id]}{end}" if start and end else spellings[token_id]
