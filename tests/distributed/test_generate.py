"""Answers of a trained model: every next token is the likeliest one that the training forward sees, and transformers' own.

With --sample-prompts they are asked for while it is trained over several ranks, without a change of the training.
"""

import json
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile

import multimodal
from megatron.runtime.generation.answering import Answering, KeyValueCache, open_answering, user_message
from megatron.runtime.generation.sample_prompts import answer_prompts
from megatron.runtime.generation.whole_model import StoredModel, empty_session, open_model
from megatron.runtime.hugging_face.unit_weights import load_units
from multimodal.data.chat.text_settings import TextSettings
from multimodal.model.initialization import initialize_parameters
from multimodal.values.errors import ConfigError, DataError
from multimodal.values.model_graph import ModelGraph
from tests.distributed.hugging_face_models import MODELS_WITH_EXPERTS, TEXT_MODELS, TOWERS, llama
from tests.distributed.launch import launch
from tests.distributed.small_run import working_flags, write_working_files
from tests.distributed.test_hugging_face_runs import small_qwen2
from tests.distributed.test_opaque import composed
from tests.distributed.wide_transformers import build_wide_model
from tests.unit.data.chat.templates import CHATML, write_tokenizer
from tools import generate

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'braid[hf]')")


BYTES = TextSettings("ByteTokenizer")


def three_axes(graph: ModelGraph) -> ModelGraph:
    llm = graph.backbone
    transformer = replace(llm.transformer, rotary_sections=(4, 4, 4))
    return replace(graph, units=tuple(replace(unit, transformer=transformer) if unit is llm else unit for unit in graph.units))


def write_questions(folder: Path) -> Path:
    """Two questions and answers about two pictures of different sizes, and one without any."""
    for name, size in (("wide.png", (32, 16)), ("tall.png", (16, 24))):
        Image.effect_noise(size, 90).save(folder / name)
    picture = [{"type": "image", "image": name} for name in ("wide.png", "tall.png")]
    said = [("user", [picture[0], {"type": "text", "text": "what?"}]), ("assistant", "two words"), ("user", [picture[1]])]
    chats = [[*said, ("assistant", "then three")], [("user", "no picture"), ("assistant", "right")]]
    lines = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "questions.jsonl"


def deepstack(graph: ModelGraph) -> ModelGraph:
    vision, llm = graph.units
    assert vision.image is not None
    return replace(graph, units=(replace(vision, image=replace(vision.image, deepstack_layers=(0, 1))), llm))


@pytest.mark.parametrize("change", [lambda graph: graph, three_axes, deepstack], ids=["one axis", "three axes", "deepstack"])
def test_next_tokens_are_those_of_the_training_forward(change, tmp_path):
    """Logits behind every prefix of an answer, against those of the whole sample in one forward."""
    graph = change(ModelGraph.from_file("tests/unit/runtime/six_layers.yaml"))
    assert_next_tokens(graph, write_questions(tmp_path), answers=["then three", "right"])


def test_next_tokens_behind_sound_that_an_encoder_of_transformers_hears(tmp_path):
    llama().save_pretrained(tmp_path / "llm")
    TOWERS["hubert"]().save_pretrained(tmp_path / "hubert")
    graph = composed(tmp_path, tmp_path, "hubert")
    llm = replace(graph.backbone, vocab_size=None, weights=None)
    graph = replace(graph, units=tuple(llm if unit is graph.backbone else unit for unit in graph.units))
    for name, length in (("a.wav", 170), ("b.wav", 219)):
        wavfile.write(tmp_path / name, 16000, np.random.default_rng(0).normal(size=length).astype(np.float32))
    heard = user_message("hm", audio=[tmp_path / "a.wav", tmp_path / "b.wav"])
    (tmp_path / "clips.jsonl").write_text(json.dumps({"messages": [heard, {"role": "assistant", "content": "four"}]}) + "\n")
    assert_next_tokens(graph, tmp_path / "clips.jsonl", answers=["four"])


def assert_next_tokens(graph: ModelGraph, questions: Path, *, answers: list[str]) -> None:
    model = StoredModel(graph, torch.float64, 384, BYTES)
    with empty_session(model) as session:
        for stage in session.stages.values():
            initialize_parameters(stage.eval(), seed=3)
        load_units(session)
        answering = open_answering(session, model, questions)
        for index, expected in enumerate(answers):
            assert answering.expected(index) == expected
            question, whole = answering.question(index), answering.source.text(index)
            learnt = torch.from_numpy(whole.is_target).nonzero()[:, 0]
            together = forward_logits(answering, index)[-len(question.answer) :]
            before, items = answering._inputs(index, num_tokens=len(question.token_ids))
            with KeyValueCache(answering._backbone) as cache:
                for length in range(len(question.answer)):
                    ids = torch.tensor([[*question.token_ids, *question.answer[:length]]])
                    compute = Mock(side_effect=partial(answering._next_logits, before, items))
                    (found,) = cache.next_logits(ids, compute)
                    assert compute.call_args.args[1] == (ids.shape[1] - 1 if length else 0), "the others are computed anew"
                    assert (found - together[length, : len(found)]).abs().max() < 1e-9
            assert learnt[-1] + 2 == len(question.token_ids) + len(question.answer)


def forward_logits(answering: Answering, index: int) -> torch.Tensor:
    """Return the logits of a sample's targets, as an evaluation computes them."""
    found = []
    llm = answering._backbone
    head = llm.layers[str(len(llm.unit.layers) - 1)].output_layer
    hook = head.register_forward_hook(lambda module, inputs, output: found.append(output[0][:, 0]))
    with torch.no_grad():
        answering._session.executor.execute(answering._planner[index])
    hook.remove()
    return found[0]


@pytest.mark.deep(when=lambda name: name in ("gemma2", "phi3"))
@pytest.mark.parametrize("name", ["small qwen2", "gemma2", "gemma3", "phi3", "mixtral with windows"])
def test_a_folder_answers_as_transformers_do(name, tmp_path):
    """Phi-3's angles depend on the length of the whole text."""
    make = {**TEXT_MODELS, **MODELS_WITH_EXPERTS, "small qwen2": small_qwen2}[name]
    folder = tmp_path / "model"
    model = build_wide_model(partial(make, vocab_size=280), folder)
    write_tokenizer(folder, template=CHATML)
    with open_model(folder, is_hugging_face=True, dtype=torch.float64) as (session, stored):
        (tmp_path / "chat.jsonl").write_text(
            json.dumps({"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}]}) + "\n"
        )
        answering = open_answering(session, stored, tmp_path / "chat.jsonl")
        question = answering.question(0)
        end = question.answer[-1]
        for options in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True, "top_k": 20}):
            torch.manual_seed(0)
            ids = torch.tensor([question.token_ids])
            theirs = model.double().generate(ids, max_new_tokens=12, eos_token_id=end, pad_token_id=end, **options)
            expected = answering.tokenizer.decode(theirs[0, ids.shape[1] :].tolist())
            assert answering.answer(0, max_new_tokens=12, **options) == expected


def test_a_program_asks_a_folder_once_or_an_open_model_again(tmp_path, capsys):
    folder = write_tokenizer(tmp_path / "model", template=CHATML)
    build_wide_model(lambda: small_qwen2(vocab_size=280), folder)
    options = {"max_new_tokens": 5, "num_beams": 2}
    said = multimodal.generate(folder, "who?", **options)
    assert generate.main(["--load-hf", str(folder), "--prompt", "who?", "--max-new-tokens", "5", "--num-beams", "2"]) == 0
    assert capsys.readouterr().out == said + "\n"
    with multimodal.open_model(folder) as model:
        assert multimodal.generate(model, [user_message("who?")], **options) == said
        talk = [user_message("who?"), {"role": "assistant", "content": said}, user_message("and who else?")]
        assert multimodal.generate(model, talk, **options) != said
        with pytest.raises(ConfigError, match="in a conversation name them in its messages"):
            multimodal.generate(model, talk, images=["a.png"])
        with pytest.raises(ConfigError, match="close the model that is open"):
            multimodal.generate(folder, "who?")


def test_questions_that_a_model_cannot_take_are_refused(tmp_path, capsys):
    folder = write_tokenizer(tmp_path / "model", template=CHATML)
    build_wide_model(lambda: small_qwen2(vocab_size=276), folder)
    refused = {"--image a.png": "images, which no unit of the model takes"}
    refused |= {"--chat-template none": "questions need 279 tokens, those of turns"}
    for flags, says in refused.items():
        assert generate.main(["--load-hf", str(folder), "--prompt", "what?", *flags.split()]) == 2
        assert says in capsys.readouterr().err


def log_of(folder: Path, name: str, *, prompts: Path | None = None) -> list[dict[str, Any]]:
    """Train with the LLM in two stages; returns what is in the log."""
    flags = working_flags(folder) | {"--llm-dp": 1, "--llm-pp": 2, "--dtype": "float64", "--split": "50,50", "--lora-rank": 2}
    flags |= {"--eval-iters": 1, "--eval-interval": 1, "--save": folder / name, "--log-json": folder / f"{name}.jsonl"}
    asked = {} if prompts is None else {"--sample-prompts": prompts, "--sample-max-new-tokens": 5}
    done = launch(flags | asked, num_ranks=3)
    assert done.exit_codes == (0, 0, 0), done.output
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_answers_are_those_of_the_checkpoint_and_change_nothing(tmp_path):
    write_working_files(tmp_path)
    prompts, output = tmp_path / "data" / "manifest.jsonl", tmp_path / "answers.jsonl"
    asked, plain = log_of(tmp_path, "asked", prompts=prompts), log_of(tmp_path, "plain")
    numbers = [[(entry["step"], entry["loss"]) for entry in log if "loss" in entry] for log in (asked, plain)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 4
    assert [entry["step"] for entry in asked if "samples" in entry] == [1, 2]
    assert not (tmp_path / "asked" / ".samples").exists()

    words = ["--load", str(tmp_path / "asked"), "--jsonl", str(prompts), "--output", str(output)]
    assert generate.main([*words, "--max-new-tokens", "5"]) == 0
    later = [json.loads(line) for line in output.read_text().splitlines()]
    (*_, last) = (entry["samples"] for entry in asked if "samples" in entry)
    assert [(each["answer"], each["expected"]) for each in last] == [(each["answer"], each["expected"]) for each in later]
    assert last[3]["expected"] == "picture 3"


def test_a_file_without_answers_is_an_error_at_the_start(tmp_path):
    write_working_files(tmp_path)
    prompts = write_question(tmp_path)
    flags = {**working_flags(tmp_path), "--eval-iters": 1, "--save": tmp_path / "saved", "--split": "50,50"}
    done = launch({**flags, "--sample-prompts": prompts}, num_ranks=2)
    assert all(done.exit_codes) and f"--sample-prompts {prompts}: {prompts}, line 1: the assistant" in done.output, done.output


def write_question(folder: Path) -> Path:
    (folder / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "what?"}]}\n')
    return folder / "prompts.jsonl"


@pytest.mark.deep  # it starts Python anew, as users' runs do
def test_a_lost_checkpoint_is_an_error_of_the_answers(tmp_path):
    with pytest.raises(DataError, match="no complete checkpoint"):
        answer_prompts(tmp_path, write_question(tmp_path), max_new_tokens=1, guidance_scale=1.0, timeout=timedelta(minutes=5))
