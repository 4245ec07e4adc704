"""Names of the tokenizer and the chat template, from which any process can open the same ones."""

import hashlib
import importlib.metadata
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from multimodal.data.chat.chat_format import ChatFormat
from multimodal.data.chat.chat_template import ChatTemplate, find_chat_template
from multimodal.data.sample_source import file_digest
from multimodal.data.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer, tokenizer_file


@dataclass(frozen=True)
class TextSettings:
    """The values of --tokenizer-type, --tokenizer-model and --chat-template."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    chat_template: str | None = None

    def open(self) -> tuple[Tokenizer, ChatFormat | None]:
        """Return the tokenizer, and the chat format if its folder, or --chat-template, has a template; raises ConfigError."""
        model = self.tokenizer_model
        if self.tokenizer_type == "ByteTokenizer" or model is None or (template := self._template) is None:
            return build_tokenizer(self.tokenizer_type, model), None
        tokenizer = HuggingFaceTokenizer(model, adds_tokens=False)
        return tokenizer, ChatFormat(template, tokenizer=tokenizer, folder=tokenizer_file(model).parent)

    @property
    def digests(self) -> dict[str, str | None]:
        """Digests of the files that determine the tokens of a text, tokenizer and chat template, wherever they are stored."""
        model, template = self.tokenizer_model, self._template
        rendered = repr((template.text, sorted(template.tokens.items()))) if template else None
        return {
            "tokenizer_digest": file_digest(tokenizer_file(model)) if model else None,
            "chat_template_digest": hashlib.blake2b(rendered.encode(), digest_size=16).hexdigest() if rendered else None,
        }

    @property
    def identity(self) -> str:
        """A text that differs if texts might be tokenised differently: digests, and the versions of the tokenizing packages."""
        return " ".join(map(str, (*self.digests.values(), *_versions())))

    @property
    def _template(self) -> ChatTemplate | None:
        model = self.tokenizer_model
        return find_chat_template(model, chosen=self.chat_template) if model is not None else None


@lru_cache(maxsize=1)
def _versions() -> tuple[str, ...]:
    found = []
    for package in ("braid", "tokenizers", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return tuple(found)
