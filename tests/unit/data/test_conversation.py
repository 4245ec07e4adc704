"""Tokens, targets and truncation, worked out by hand."""

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
from multimodal.data.tokenizer import ByteTokenizer

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
    """Build with the byte tokenizer."""
    return build_conversation(segments, tokenizer=TOKENIZER, seq_length=seq_length)


IMAGE = ItemSegment(3)


@pytest.mark.parametrize(
    ("segments", "tokens", "trained"),
    [
        ([IMAGE, TextSegment("assistant", "a cat")], "^[###]Aa cat$", "-------xxxxxx"),
        ([IMAGE, TextSegment("user", "q"), TextSegment("assistant", "yes")], "^[###]UqAyes$", "---------xxxx"),
        ([TextSegment("user", "q"), IMAGE, TextSegment("assistant", "yes")], "^Uq[###]Ayes$", "---------xxxx"),
        ([TextSegment("document", "ab"), IMAGE, TextSegment("document", "c")], "^Dab[###]c$", "--xx-----xx"),
        ([TextSegment("document", "ab"), IMAGE], "^Dab[###]$", "--xx-----x"),
        ([IMAGE, TextSegment("document", "ab"), IMAGE], "^[###]Dab[###]$", "-------xx-----x"),
        ([TextSegment("document", "d"), TextSegment("user", "q"), TextSegment("assistant", "y")], "^Dd$UqAy$", "-------xx"),
        ([TextSegment(role, "t") for role in ("user", "assistant", "user", "assistant")], "^UtAt$UtAt$", "----xx---xx"),
        ([TextSegment("assistant", "a"), IMAGE, TextSegment("assistant", "b")], "^Aa[###]b$", "--x-----xx"),
        ([TextSegment("assistant", "a"), IMAGE, TextSegment("user", "b")], "^Aa$[###]Ub", "--xx-------"),
        ([TextSegment("user", "q"), TextSegment("user", "r")], "^Uqr", "----"),
        ([TextSegment("assistant", "")], "^A$", "--x"),
        ([IMAGE], "^[###]", "------"),
    ],
)
def test_whole_samples(segments: list[Segment], tokens: str, trained: str) -> None:
    """Role markers, images and ends where they belong; only answers (or plain documents) are trained on."""
    conversation = build(*segments)
    assert spell(conversation) == (tokens, trained)
    assert not conversation.is_cut
    starts = [index + 1 for index, token in enumerate(tokens) if token == "["]
    assert conversation.item_starts == tuple((number, start, 3) for number, start in enumerate(starts))


@pytest.mark.parametrize(
    ("segments", "tokens", "trained", "items"),
    [
        ([TextSegment("user", "q"), GeneratedSegment()], "^UqA[]$", "----x-x", ((0, 4, 0),)),
        ([GeneratedSegment(), TextSegment("assistant", "y")], "^A[]y$", "--x-xx", ((0, 2, 0),)),
        ([TextSegment("assistant", "y"), GeneratedSegment(), TextSegment("user", "q")], "^Ay[]$Uq", "--xx-x--", ((0, 3, 0),)),
        ([IMAGE, TextSegment("user", "q"), GeneratedSegment()], "^[###]UqA[]$", "---------x-x", ((0, 2, 3), (1, 9, 0))),
        ([TextSegment("document", "d"), GeneratedSegment()], "^Dd$A[]$", "-----x-x", ((0, 5, 0),)),
    ],
)
def test_an_image_to_make_is_announced_and_has_no_tokens(
    segments: list[Segment], tokens: str, trained: str, items: tuple[tuple[int, int, int], ...]
) -> None:
    """It belongs to an assistant turn; the generator is given the state of the token that announces it."""
    conversation = build(*segments)
    assert spell(conversation) == (tokens, trained)
    assert conversation.item_starts == items


def test_an_image_to_make_is_never_cut_in_two() -> None:
    segments = (TextSegment("user", "q"), GeneratedSegment())
    assert spell(build(*segments, seq_length=6)) == ("^UqA[]", "----x-")
    cut = build(*segments, seq_length=5)
    assert (spell(cut), cut.item_starts) == (("^UqA", "----"), ())


@pytest.mark.parametrize(
    ("seq_length", "tokens", "num_items"),
    [
        (15, "^Dab[###]c[###]", 2),
        (14, "^Dab[###]c", 1),
        (10, "^Dab[###]c", 1),
        (9, "^Dab[###]", 1),
        (8, "^Dab", 0),
        (3, "^Da", 0),
        (1, "^", 0),
    ],
)
def test_long_samples_are_cut_at_the_end(seq_length: int, tokens: str, num_items: int) -> None:
    """A text is cut anywhere; an image that does not fit goes as a whole and ends the sample."""
    segments = (TextSegment("document", "ab"), IMAGE, TextSegment("document", "c"), IMAGE)
    conversation = build(*segments, seq_length=seq_length)
    assert spell(conversation)[0] == tokens
    assert len(conversation.item_starts) == num_items
    assert conversation.is_cut


def test_labels_are_the_next_tokens() -> None:
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
def test_any_sample_keeps_its_promises(segments: list[Segment], seq_length: int) -> None:
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
