"""Conversations by a chat template, held against transformers' own rendering, tokens and assistant masks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")

from transformers import PreTrainedTokenizerFast

from multimodal.data.chat.chat_format import ChatFormat
from multimodal.data.chat.chat_template import ChatTemplate, find_chat_template
from multimodal.data.conversation import Conversation, GeneratedSegment, ItemSegment, Segment, TextSegment
from multimodal.data.tokenizer import HuggingFaceTokenizer
from multimodal.values.errors import ConfigError, DataError
from tests.unit.data.chat.templates import CHATML, FORGETFUL, LLAMA2, LLAVA, SPECIAL, write_tokenizer

QUESTION, ANSWER = TextSegment("user", "\n\nwhat is\nthe banané?"), TextSegment("assistant", "an 1st\nanswer\n")
TURNS = [QUESTION, ANSWER, TextSegment("user", "and then?"), TextSegment("assistant", "the end")]
SYSTEM = TextSegment("system", "be the best")


class Model:
    def __init__(self, folder: Path) -> None:
        self.theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        self.tokenizer = HuggingFaceTokenizer(folder, adds_tokens=False)
        template = find_chat_template(folder, chosen=None)
        assert template is not None
        self.chat = ChatFormat(template, tokenizer=self.tokenizer, folder=folder)

    def build(self, segments: list[Segment], seq_length: int = 1000) -> Conversation:
        return self.chat.build(segments, seq_length=seq_length, where="data.json, line 3")

    def trained_text(self, conversation: Conversation) -> str:
        return str(self.theirs.decode(conversation.token_ids[conversation.is_trained]))


@pytest.fixture
def open_model(tmp_path: Path) -> Callable[..., Model]:
    def build(template: str, **options: Any) -> Model:
        return Model(write_tokenizer(tmp_path / "model", template=template, **options))

    return build


def messages(segments: list[Any], *, as_text: bool) -> list[dict[str, Any]]:
    return [{"role": each.role, "content": each.text if as_text else [{"type": "text", "text": each.text}]} for each in segments]


@pytest.mark.parametrize("template", [CHATML, LLAVA, LLAMA2])
@pytest.mark.parametrize("with_system", [False, True])
def test_tokens_are_those_of_transformers(open_model, template, with_system):
    model = open_model(template)
    segments = [SYSTEM, *TURNS] if with_system and template != LLAMA2 else TURNS
    conversation = model.build(segments)
    marked = template == LLAVA
    theirs = model.theirs.apply_chat_template(
        messages(segments, as_text=template == LLAMA2), return_dict=True, return_assistant_tokens_mask=marked
    )
    assert conversation.token_ids.tolist() == theirs["input_ids"]
    assert not conversation.is_cut and conversation.item_starts == ()
    if marked:
        assert conversation.is_trained.tolist() == [bool(mask) for mask in theirs["assistant_masks"]]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "an 1st\nanswer\n<|im_end|>the end<|im_end|>"),
        (LLAVA, " an 1st\nanswer\n  the end "),  # the space before it is part of a token
        (LLAMA2, " an 1st\nanswer\n <|im_end|> the end <|im_end|>"),
    ],
)
def test_only_what_the_assistant_says_is_trained(open_model, template, expected):
    """And the token that ends its turn, but not the line end behind that."""
    model = open_model(template)
    assert model.trained_text(model.build(TURNS)) == expected
    number = model.trained_text(model.build([QUESTION, TextSegment("assistant", "47\U0010fffd1\U0010fffd")]))
    assert "47?1?" in number and number.startswith(" ") == expected.startswith(" ")  # a token of its own before a digit


@pytest.mark.parametrize(
    ("template", "config", "placeholder"),
    [
        (CHATML, {"image_token_id": 266}, "<|image_pad|>"),
        (LLAVA, {"image_token_index": 267}, "<image>"),
        (LLAMA2, {"image_token_index": 267}, "<image>"),
        (CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n"), {"model_type": "internvl"}, ""),
    ],
)
def test_placeholders_are_expanded_as_processors_do(open_model, template, config, placeholder):
    """Processors repeat the placeholder in the rendered text; InternVL's sets two tokens around them."""
    config = config if placeholder else {**config, "image_token_id": 272}
    model = open_model(template, **config)
    segments = [ItemSegment(3), TextSegment("user", "look the"), ANSWER, TextSegment("user", "and"), ItemSegment(2), ANSWER]
    segments += [TextSegment("user", ""), ItemSegment(1), ANSWER]  # a turn without text, as data with chats have it
    conversation = model.build(segments)
    as_text = template == LLAMA2
    parts: list[Any] = [
        [{"type": "image"}, {"type": "text", "text": "look the"}],
        [{"type": "text", "text": "and"}, {"type": "image"}],
        [{"type": "image"}],
    ]
    contents = ["<image>\nlook the", "and\n<image>", "<image>\n"] if as_text else parts
    answer = ANSWER.text if as_text else [{"type": "text", "text": ANSWER.text}]
    asked = [{"role": role, "content": each} for content in contents for role, each in (("user", content), ("assistant", answer))]
    text = model.theirs.apply_chat_template(asked, tokenize=False)
    mark = placeholder or "<IMG_CONTEXT>"
    wrap = ("", "") if placeholder else ("<img>", "</img>")
    first, *others = text.split(mark)
    expanded = first + "".join(f"{wrap[0]}{mark * n}{wrap[1]}{rest}" for n, rest in zip((3, 2, 1), others, strict=True))
    assert conversation.token_ids.tolist() == model.theirs(expanded, add_special_tokens=False)["input_ids"]
    placeholders = np.flatnonzero(conversation.token_ids == model.theirs.convert_tokens_to_ids(mark))
    spans = [list(range(start, start + length)) for _, start, length in conversation.item_starts]
    assert [len(span) for span in spans] == [3, 2, 1] and placeholders.tolist() == [*spans[0], *spans[1], *spans[2]]
    assert not conversation.is_trained[placeholders].any()
    inside = model.build([QUESTION, ANSWER, ItemSegment(2), ANSWER])
    assert as_text or {*SPECIAL[3:]}.isdisjoint(model.theirs.convert_ids_to_tokens(inside.token_ids[inside.is_trained]))


def test_rows_of_an_image_end_as_pixtrals_processor_ends_them(open_model):
    config = {"model_type": "llava", "image_token_index": 267, "vision_config": {"model_type": "pixtral"}}
    model = open_model(LLAVA, **config)
    conversation = model.build([ItemSegment(6, row_length=3), TextSegment("user", "and"), ItemSegment(3, row_length=3), ANSWER])
    own, row_break, end = model.theirs.convert_tokens_to_ids(["<image>", "[IMG_BREAK]", "[IMG_END]"])
    spans = [conversation.token_ids[start : start + length].tolist() for _, start, length in conversation.item_starts]
    assert spans == [[own, own, row_break, own, own, end], [own, own, end]]
    assert not any(conversation.is_trained[start : start + length].any() for _, start, length in conversation.item_starts)


def test_a_begin_token_is_added_as_a_processor_adds_it(open_model, tmp_path):
    """A model with a processor: unless the template writes one. A text model: never."""
    model = open_model(LLAVA, adds_begin=True)
    begin = model.theirs.bos_token_id
    assert model.build(TURNS).token_ids[0] != begin
    (tmp_path / "model" / "preprocessor_config.json").write_text("{}")
    assert Model(tmp_path / "model").build(TURNS).token_ids[:2].tolist().count(begin) == 1
    model = open_model("{{ bos_token }}" + LLAVA, adds_begin=True)
    assert model.build(TURNS).token_ids[:2].tolist().count(begin) == 1


def test_a_text_that_spells_a_special_token_stays_text(open_model):
    model = open_model(CHATML, image_token_id=266)
    spelled = "say <|im_end|> or <|image_pad|> the"
    conversation = model.build([ItemSegment(2), TextSegment("user", spelled), TextSegment("assistant", spelled)])
    found = conversation.token_ids.tolist()
    assert found.count(266) == 2 and found.count(model.theirs.eos_token_id) == 3
    plain = model.tokenizer.encode(spelled)
    assert "".join(map(chr, plain)) in "".join(map(chr, found))
    trained = conversation.token_ids[conversation.is_trained].tolist()
    assert trained == [*plain, model.theirs.eos_token_id]


AUDIO = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for content in message['content'] %}"
    "{% if content['type'] == 'audio' %}Audio: <s><img></s>\n{% elif content['type'] == 'image' %}<image>{% else %}"
    "{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("asked", ["content['type'] == 'audio'", "'audio' in content or 'audio_url' in content"])
def test_sound_has_placeholders_of_its_own(open_model, asked):
    """As Qwen2-Audio's templates have them; images and clips in one sample stay apart."""
    model = open_model(AUDIO.replace("content['type'] == 'audio'", asked), image_token_index=267, audio_token_index=270)
    found = model.build([ItemSegment(2, "audio"), ItemSegment(3), QUESTION, ANSWER])
    assert [length for _, _, length in found.item_starts] == [2, 3]
    assert [found.token_ids[start : start + length].tolist() for _, start, length in found.item_starts] == [[270] * 2, [267] * 3]
    swapped = AUDIO.replace("message['content']", "(message['content'] | sort(attribute='type', reverse=True))")
    with pytest.raises(DataError, match="writes 2 placeholders for 2 items, or in another order"):
        open_model(swapped, image_token_index=267, audio_token_index=270).build(
            [ItemSegment(2, "audio"), ItemSegment(3), QUESTION, ANSWER]
        )


def test_a_placeholder_that_the_tokenizer_lacks_is_refused(open_model):
    with pytest.raises(ConfigError, match=r"config.json: the placeholder \(audio\) is token 999, which is none"):
        open_model(AUDIO, audio_token_id=999)


def test_documents_are_trained_as_they_stand(open_model):
    model = open_model(CHATML, image_token_id=266)
    conversation = model.build([TextSegment("document", "the "), ItemSegment(2), TextSegment("document", "and")])
    assert model.theirs.decode(conversation.token_ids) == (
        "the <|vision_start|><|image_pad|><|image_pad|><|vision_end|>and<|im_end|>"
    )
    assert model.trained_text(conversation) == "the and<|im_end|>"
    assert conversation.num_target_tokens == conversation.is_trained.sum() - 1  # nothing stands before the first one
    with pytest.raises(DataError, match="line 3: document texts beside turns"):
        model.build([TextSegment("document", "the"), ANSWER])


def test_long_samples_lose_their_end(open_model):
    """A text is cut anywhere, an image that does not fit ends the sample."""
    model = open_model(CHATML, image_token_id=266)
    segments = [ItemSegment(3), QUESTION, ANSWER, ItemSegment(9), TextSegment("user", "?"), ANSWER]
    whole = model.build(segments)
    (_, _, _), (_, start, _) = whole.item_starts
    cut = model.build(segments, seq_length=start + 8)
    assert cut.is_cut and cut.item_starts == whole.item_starts[:1] and len(cut.token_ids) == start
    for length in (start + 9, 7):
        cut = model.build(segments, seq_length=length)
        assert cut.is_cut and cut.token_ids.tolist() == whole.token_ids[:length].tolist()
        assert cut.is_trained.tolist() == whole.is_trained[:length].tolist()


def test_earlier_answers_are_trained_as_the_whole_has_them(open_model):
    """An answer behind which others follow is rendered otherwise: without its thoughts."""
    model = open_model(FORGETFUL)
    assert model.trained_text(model.build(TURNS[:2])).startswith("<think>")
    expected = "an 1st\nanswer\n<|im_end|><think>\n\n</think>\n\nthe end<|im_end|>"
    assert model.trained_text(model.build(TURNS)) == expected


@pytest.mark.parametrize("earlier", ["'...'", "message['content'] | upper", "''"])
def test_answers_that_do_not_stay_are_refused_by_line(earlier, open_model):
    text = f"(message['content'] if loop.last or message['role'] == 'user' else {earlier})"
    model = open_model(FORGETFUL.replace("message['content']", text))
    with pytest.raises(DataError, match=r"line 3: .*jinja: what the assistant says cannot be told .* first 2 messages does not"):
        model.build(TURNS)


@pytest.mark.parametrize("prompt", ["ASSISTANT:", "ASSISTANT: ", ""])
def test_answers_must_stand_behind_the_generation_prompt(open_model, prompt):
    """As tokens: the published template has no space, which is part of an answer's first token, but not of a symbol's."""
    template = LLAVA.replace("'ASSISTANT:'", f"'{prompt}'")
    if prompt == "ASSISTANT:":
        open_model(template)
        template = template.replace("{% generation %}", "{{ '>' }}{% generation %}")
    with pytest.raises(ConfigError, match=r"jinja: an answer .* behind '.*ASSISTANT:.*', but the .*prompt ends in .*alike"):
        open_model(template)


def test_a_wrong_sample_is_named_with_its_line(open_model):
    model = open_model(LLAMA2, image_token_id=266)
    with pytest.raises(DataError, match=r"line 3: .*chat template fails .*roles must alternate"):
        model.build([SYSTEM, *TURNS])
    with pytest.raises(DataError, match="line 3: .*the assistant answers with; use --chat-template none"):
        model.build([QUESTION, GeneratedSegment()])
    blind = (
        "{% for message in messages %}{{ message.role }}{% for part in message.content if part.text %}"
        "{% generation %}{{ part.text }}{% endgeneration %}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    with pytest.raises(DataError, match=r"line 3: .*jinja writes 0 placeholders for 1 items"):
        open_model(blind, image_token_id=266).build([ItemSegment(1), QUESTION, ANSWER])


def test_dates_are_fixed():
    """A sample is the same on every day."""
    template = (
        "{{ strftime_now('%d %b %Y') }}{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}"
    )
    template += "{% endfor %}"
    assert ChatTemplate(template, "some.jinja").render([{"role": "user", "content": "a"}])[0] == "26 Jul 2024a"


def test_where_templates_lie(tmp_path):
    folder = write_tokenizer(tmp_path / "model")
    assert find_chat_template(folder, chosen=None) is None
    (folder / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}], '
        '"bos_token": {"content": "<s>"}, "eos_token": null}'
    )
    found = find_chat_template(folder / "tokenizer.json", chosen=None)
    assert found == ChatTemplate("a", str(folder / "tokenizer_config.json"), {"bos_token": "<s>"})
    (folder / "chat_template.json").write_text('{"chat_template": "c"}')
    (folder / "chat_template.jinja").write_text("d")
    for chosen, text in ((None, "d"), (str(folder / "chat_template.json"), "c"), ("none", None)):
        found = find_chat_template(folder, chosen=chosen)
        assert (found and found.text) == text
    (folder / "empty.json").write_text("{}")
    for chosen, message in (("gone.jinja", "no such file; give"), (str(folder / "empty.json"), "holds no chat template")):
        with pytest.raises(ConfigError, match=f"--chat-template .*{message}"):
            find_chat_template(folder, chosen=chosen)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text("{")
    with pytest.raises(ConfigError, match="chat_template.json, line 1: cannot be parsed"):
        find_chat_template(folder, chosen=None)
