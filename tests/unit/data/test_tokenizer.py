"""Bytes, a local tokenizer.json, and what each refuses."""

import json
import sys
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.data.conversation import (
    ROLES,
    Conversation,
    GeneratedSegment,
    ItemSegment,
    Segment,
    TextSegment,
    build_conversation,
    build_sample_text,
)
from multimodal.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, build_tokenizer
from multimodal.values.errors import ConfigError
from tests.unit.golden_answers import Kinds, golden_test


@given(st.text())
def test_bytes_round_trip_and_never_special(text):
    tokenizer = ByteTokenizer()
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert all(token < 256 for token in token_ids)


def test_special_tokens_of_bytes_are_distinct_and_silent():
    tokenizer = ByteTokenizer()
    assert sorted(set(astuple(tokenizer.special))) == list(range(256, tokenizer.vocab_size))
    assert tokenizer.decode([tokenizer.special.begin, 65, tokenizer.special.image, 66, tokenizer.special.end]) == "AB"


def test_lone_surrogates_become_question_marks():
    """JSON can hold half a character; UTF-8 cannot."""
    assert ByteTokenizer().encode("a\ud800b") == [97, 63, 98]


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A word-level tokenizer.json that has an end token and an image placeholder, and nothing else special."""
    pytest.importorskip("tokenizers", reason="the optional package 'tokenizers' is not installed")
    vocabulary = {"[UNK]": 0, "two": 1, "cats": 2, "</s>": 3, "<image>": 4, "user": 5, "<|": 6, "|>": 7}
    cut = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    padded = {"strategy": {"Fixed": 5}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": cut,
        "padding": {**padded, "pad_token": "[UNK]"},
        "added_tokens": [],
    }
    content |= {"normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    content["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def test_a_local_file_gains_the_special_tokens_it_lacks(tokenizer_file):
    """Known spellings are taken over, the others are added behind the vocabulary."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_file)
    assert (tokenizer.special.end, tokenizer.special.image) == (3, 4)
    assert sorted(set(astuple(tokenizer.special))) == [3, 4, *range(8, 15)]
    assert tokenizer.vocab_size == 15
    assert tokenizer.encode("two cats") == [1, 2]
    assert tokenizer.decode([tokenizer.special.user, 1, 2, tokenizer.special.end]) == "two cats"
    assert HuggingFaceTokenizer(tokenizer_file.parent).special == tokenizer.special


def test_sound_has_tokens_of_its_own_where_the_file_has_them(tokenizer_file):
    content = json.loads(tokenizer_file.read_text())
    special = HuggingFaceTokenizer(tokenizer_file).special
    assert (special.audio_start, special.audio, special.audio_end) == (special.vision_start, special.image, special.vision_end)
    content["model"]["vocab"] |= {"<|audio_bos|>": 8, "<|audio_eos|>": 9, "<|AUDIO|>": 10}
    tokenizer_file.write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizer(tokenizer_file)
    special = tokenizer.special
    assert (special.audio_start, special.audio_end, special.audio, special.image) == (8, 9, 10, 4)
    made = build_conversation([GeneratedSegment("audio")], tokenizer=tokenizer, seq_length=9)
    assert made.token_ids.tolist() == [special.begin, special.assistant, 8, 9, special.end]


def test_a_text_cannot_spell_a_special_token(tokenizer_file):
    """Marks inside the data are text, so nobody can forge a role or an image."""
    assert HuggingFaceTokenizer(tokenizer_file).encode("<|user|>") == [6, 5, 7]


def test_a_text_is_neither_cut_nor_padded(tokenizer_file):
    assert HuggingFaceTokenizer(tokenizer_file).encode("two cats two cats") == [1, 2, 1, 2]
    assert HuggingFaceTokenizer(tokenizer_file).encode("two") == [1]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    assert isinstance(build_tokenizer("ByteTokenizer"), ByteTokenizer)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'braid\[tokenizers\]'"):
        build_tokenizer("HuggingFaceTokenizer", tmp_path / "tokenizer.json")


def test_missing_and_damaged_files_are_named(tokenizer_file):
    with pytest.raises(ConfigError, match=r"gone\.json: no such file"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_file.parent / "gone.json")
    no_table = (b"[]", b'{"tokenizer_class": "Llama"}', b"\n\x0e\n\x05<unk>")
    for content in (b"{", b"", b'{"version": "caf\xe9"}', b"[" * 100_000, *no_table):
        tokenizer_file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer\.json .*; give the file of that name"):
            build_tokenizer("HuggingFaceTokenizer", tokenizer_file)
    tokenizer_file.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file; give --tokenizer-model"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_file.parent)


def test_a_panic_of_the_package_is_an_error_of_the_file(tokenizer_file, monkeypatch):
    """Rust's panics are no Exceptions in Python; an interruption stays what it is."""
    import tokenizers

    class PanicException(BaseException):
        pass

    def fail(path: str) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_file=fail))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer\.json .*index out of bounds"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_file)


def test_an_id_that_no_embedding_can_hold_is_named(tokenizer_file):
    """Else the embedding's rows exhaust the memory."""
    content = json.loads(tokenizer_file.read_text())
    content["model"]["vocab"]["cats"] = 4_000_000_000
    tokenizer_file.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json: token .* has the id 4,000,000,0\d\d, .*expected ids below 16,777,216"
    ):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_file)


def test_half_a_character_becomes_a_question_mark(tokenizer_file):
    assert HuggingFaceTokenizer(tokenizer_file).encode("two \ud800") == HuggingFaceTokenizer(tokenizer_file).encode("two ?")


def test_a_text_that_the_vocabulary_cannot_hold_is_named(tokenizer_file):
    content = json.loads(tokenizer_file.read_text())
    content["model"] |= {"vocab": {"two": 0}, "unk_token": "[UNK]"}
    tokenizer_file.write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"tokenizer\.json: cannot tokenise 'dogs' .*; give it a token for what it does not know"
    ):
        HuggingFaceTokenizer(tokenizer_file).encode("dogs")


TOKENIZER = ByteTokenizer()
SPELLING = {
    TOKENIZER.special.begin: "^",
    TOKENIZER.special.end: "$",
    TOKENIZER.special.user: "U",
    TOKENIZER.special.assistant: "A",
    TOKENIZER.special.document: "D",
    TOKENIZER.special.vision_start: "[",
    TOKENIZER.special.vision_end: "]",
    TOKENIZER.special.image: "#",
}


def spell(conversation: Conversation) -> tuple[str, str]:
    """The tokens, one character each, and a line below that marks the trained ones."""
    tokens = "".join(SPELLING.get(token) or chr(token) for token in conversation.token_ids.tolist())
    return tokens, "".join("-x"[trained] for trained in conversation.is_trained.tolist())


def build(*segments: Segment, seq_length: int = 100) -> Conversation:
    return build_conversation(segments, tokenizer=TOKENIZER, seq_length=seq_length)


def described(document: dict[str, Any]) -> str:
    """Say the tokens, which of them are trained, the items as (number, start, tokens), and whether the sample was cut."""
    kinds = {list: lambda each: TextSegment(*each), int: ItemSegment, str: lambda _: GeneratedSegment()}
    found = build(*(kinds[type(each)](each) for each in document["segments"]), seq_length=document["seq_length"])
    return " ".join([*spell(found), str([*found.item_starts]), *["cut"] * found.is_cut])


CONVERSATIONS: Kinds = {"sample": ({"segments": [], "seq_length": 100}, described)}
test_samples_are_spelled_as_written = golden_test("conversations.txt", CONVERSATIONS)


def test_labels_are_the_next_tokens():
    """The token before an answer already has a target; the last token has none."""
    text = build_sample_text(build(TextSegment("user", "q"), TextSegment("assistant", "y")), pad_id=TOKENIZER.special.pad)
    special = TOKENIZER.special
    assert text.token_ids.tolist() == [special.begin, special.user, ord("q"), special.assistant, ord("y"), special.end]
    assert text.labels.tolist() == [special.user, ord("q"), special.assistant, ord("y"), special.end, special.pad]
    assert text.is_target.tolist() == [False, False, False, True, True, False]
    assert text.token_ids.dtype == text.labels.dtype == np.int64 and text.is_target.dtype == np.bool_


SEGMENTS = st.one_of(
    st.builds(TextSegment, st.sampled_from(ROLES), st.text(max_size=8)),
    st.builds(ItemSegment, st.integers(1, 6)),
    st.builds(GeneratedSegment),
)


@given(st.lists(SEGMENTS, min_size=1, max_size=6), st.integers(1, 60))
def test_any_sample_keeps_its_promises(segments, seq_length):
    """Within the limit; a prefix of the uncut sample; placeholders exactly in the items' spans and never targets."""
    cut, whole = build(*segments, seq_length=seq_length), build(*segments, seq_length=10**6)
    assert len(cut.token_ids) <= seq_length
    assert cut.token_ids.tolist() == whole.token_ids[: len(cut.token_ids)].tolist()
    assert cut.is_cut == (len(cut.token_ids) < len(whole.token_ids))
    text = build_sample_text(cut, pad_id=TOKENIZER.special.pad)
    spans = {position for _, start, length in text.item_starts for position in range(start, start + length)}
    assert spans == set(np.flatnonzero(text.token_ids == TOKENIZER.special.image).tolist())
    assert not (text.is_target & (text.labels == TOKENIZER.special.image)).any()
    assert not text.is_target[-1] and text.is_target.sum() == cut.num_target_tokens
