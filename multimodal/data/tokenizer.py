"""Text to token ids and back, with the special tokens of conversations with images."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from multimodal.values.errors import ConfigError, require_package

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the special tokens, which no text encodes to."""

    pad: int
    begin: int
    end: int
    user: int
    assistant: int
    document: int
    vision_start: int
    vision_end: int
    image: int
    """The placeholder: one for each output token of an image."""
    audio_start: int
    audio_end: int
    audio: int
    """The three tokens of sound: the tokens of images in vocabularies without separate ones."""
    video: int
    """The placeholder of videos: that of images in vocabularies without one."""

    def around(self, kind: str) -> tuple[int, int, int]:
        """Return the tokens before, in and behind an item; kind: image, audio or video."""
        if kind == "audio":
            return self.audio_start, self.audio, self.audio_end
        return self.vision_start, self.video if kind == "video" else self.image, self.vision_end


class Tokenizer(Protocol):
    """The interface of a tokenizer, as the data sets use it."""

    special: SpecialTokens
    vocab_size: int
    """One more than the largest id, added tokens included."""
    num_own_tokens: int
    """One more than the largest id without added special tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; never special ones, whatever the text."""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are left out."""


class ByteTokenizer:
    """One token per UTF-8 byte (ids 0 to 255), then the special tokens."""

    special = SpecialTokens(*range(256, 265), *range(262, 265), *range(264, 265))
    num_own_tokens, vocab_size = 256, 265

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text; a lone surrogate, which UTF-8 cannot hold, becomes '?'."""
        return list(text.encode(errors="replace"))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of the ids; bytes that are no UTF-8 become the replacement character."""
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")


MISSING = -1
"""The id of a special token that the vocabulary lacks, if none is added."""
_MAX_VOCABULARY = 2**24
"""Fifty times the largest vocabulary that models have."""
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "pad": ("<|pad|>", "<pad>", "[PAD]", "<|endoftext|>"),
    "begin": ("<|begin_of_text|>", "<s>", "<bos>", "<|im_start|>", "<|endoftext|>"),
    "end": ("<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|endoftext|>"),
    "user": ("<|user|>",),
    "assistant": ("<|assistant|>",),
    "document": ("<|document|>",),
    "vision_start": ("<|vision_start|>", "<|vision_bos|>"),
    "vision_end": ("<|vision_end|>", "<|vision_eos|>"),
    "image": ("<|image_pad|>", "<|IMAGE|>", "<image>"),
}
"""Spellings of special tokens in known vocabularies; the first is the one that is added to others."""
_OTHER_SPELLINGS = {
    "audio_start": ("vision_start", ("<|audio_bos|>",)),
    "audio_end": ("vision_end", ("<|audio_eos|>",)),
    "audio": ("image", ("<|AUDIO|>", "<|audio_pad|>")),
    "video": ("image", ("<|video_pad|>", "<|VIDEO|>")),
}
"""Spellings of the tokens of sound and videos, and the tokens of images that are used if a vocabulary has none of these."""


class HuggingFaceTokenizer:
    """A local tokenizer.json, read by the `tokenizers` package; missing special tokens are added behind its vocabulary."""

    def __init__(self, path: str | Path, *, adds_tokens: bool = True) -> None:
        """Load `path`, a tokenizer.json or the folder that contains one; raises ConfigError if that is impossible.

        adds_tokens: False if a chat template writes the special tokens: none is added, and missing ones are MISSING.
        """
        self._file = tokenizer_file(path)
        self._tokenizer = _load(self._file)
        self._tokenizer.no_truncation()  # the file may enable both; the data set decides on lengths
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.num_own_tokens = max(vocabulary.values(), default=-1) + 1
        chosen = {name: next((each for each in known if each in vocabulary), known[0]) for name, known in _SPELLINGS.items()}
        for name, (of_images, known) in _OTHER_SPELLINGS.items():
            chosen[name] = next((each for each in known if each in vocabulary), chosen[of_images])
        if adds_tokens:
            self._tokenizer.add_special_tokens(list(dict.fromkeys(chosen.values())))
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        found = {name: vocabulary.get(spelling, MISSING) for name, spelling in chosen.items()}
        self.special = SpecialTokens(**{**found, "pad": max(found["pad"], 0)})
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > _MAX_VOCABULARY:
            largest = max(vocabulary, key=lambda token: vocabulary[token])
            raise ConfigError(
                f"{self._file}: token {largest!r} has the id {vocabulary[largest]:,}, and an embedding would need as many rows; "
                f"expected ids below {_MAX_VOCABULARY:,}; correct the file"
            )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without the begin and end tokens that the file's post-processor may add."""
        self._tokenizer.encode_special_tokens = True  # "<|user|>" inside a text is text; set here, since pickling forgets it
        text = text.encode(errors="replace").decode()  # half a character, which JSON can hold, becomes '?'
        return list(self._guard(text, adds_special_tokens=False).ids)

    def _guard(self, text: str, *, adds_special_tokens: bool) -> "tokenizers.Encoding":
        try:
            return self._tokenizer.encode(text, add_special_tokens=adds_special_tokens)
        except Exception as problem:  # the package raises bare Exception
            raise ConfigError(
                f"{self._file}: cannot tokenise {text[:40]!r} ({problem}); give it a token for what it does not know, or take "
                "another file"
            ) from problem

    @property
    def special_spellings(self) -> dict[int, str]:
        """The ids of the file's special tokens, with their spellings."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    def id_of(self, token: str) -> int:
        """Return the id of a token; MISSING if the vocabulary lacks it."""
        found = self._tokenizer.token_to_id(token)
        return MISSING if found is None else int(found)

    def encode_rendered(self, text: str, *, adds_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text with spelled special tokens, and their (start, end); adds_special_tokens: as the file says."""
        self._tokenizer.encode_special_tokens = False
        encoded = self._guard(text, adds_special_tokens=adds_special_tokens)
        return list(encoded.ids), list(encoded.offsets)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | Path | None = None) -> Tokenizer:
    """Build the tokenizer of `--tokenizer-type` and `--tokenizer-model`; raises ConfigError if its file cannot be read."""
    if tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    assert tokenizer_model is not None, "a rule of the flags asks for it"
    return HuggingFaceTokenizer(tokenizer_model)


def tokenizer_file(path: str | Path) -> Path:
    """Return the path of a tokenizer.json: the given one, or that in the given folder."""
    return Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)


def _load(file: Path) -> "tokenizers.Tokenizer":
    require_package("tokenizers", extra="tokenizers", needed_by="HuggingFaceTokenizer", error=ConfigError)
    import tokenizers

    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give --tokenizer-model a local tokenizer.json (nothing is downloaded)")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as problem:  # the package raises bare Exception, and its panics are not even that
        raise ConfigError(
            f"{file}: not a tokenizer.json that 'tokenizers' can read ({problem}); give the file of that name which a model of "
            "Hugging Face brings (a SentencePiece model must be converted to it)"
        ) from problem
