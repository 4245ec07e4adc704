"""Answers to the questions of a data set: transformers' `generate` chooses tokens, with logits of Braid's own stages."""

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.runtime.feed.step_planner import StepOptions, StepPlanner
from megatron.runtime.generation.whole_model import OpenedModel, StoredModel, open_model
from megatron.runtime.session import Session
from multimodal.attention.block_attention import capped
from multimodal.attention.core_attention import CoreAttention
from multimodal.attention.packed_lengths import MaskRule
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.data.chat.chat_format import ChatFormat
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.global_batches import DataPart, GlobalBatches
from multimodal.data.index.sample_indexer import IndexOptions
from multimodal.data.manifest import ManifestSource
from multimodal.data.remote import data_path
from multimodal.data.sample_source import NUM_FRAMES, SampleSource
from multimodal.data.source_views import PassedItems
from multimodal.data.tokenizer import Tokenizer
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.values.errors import ConfigError, DataError, require_package
from multimodal.values.model_graph import ModelGraph


class _Known(NamedTuple):
    """A sequence whose tokens are computed."""

    logits: Tensor
    states: tuple[tuple[Tensor, Tensor], ...]
    """[num_layers] keys and values, [num_tokens, 1, groups, head_channels] each."""


class KeyValueCache(AbstractContextManager["KeyValueCache"]):
    """Keys and values of the sequences that the last call asked about, found by their token ids, so that beams may come and go.

    llm: its only stage, without context or tensor parallelism. Leaving the context removes the cache from the layers.
    """

    def __init__(self, llm: UnitStage) -> None:
        self._is_kept = not llm.unit.transformer.rotary_long_factors
        """False if rotary angles of all tokens change with the sequence's length."""
        self._known: dict[tuple[int, ...], _Known] = {}
        self._before: Sequence[tuple[Tensor, Tensor]] = ()
        self._behind: list[tuple[Tensor, Tensor]] = []
        attentions = map(llm.core_attention, llm.layer_range)
        self._hooks = [each.register_forward_hook(self._attend, with_kwargs=True) for each in attentions if each is not None]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def next_logits(self, sequences: Tensor, compute: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return the logits behind each sequence, [num_sequences, vocab_size]; sequences: [num_sequences, num_tokens] ids.

        compute: runs the LLM on a sequence, [num_tokens], but for so many tokens at its begin, and returns [vocab_size].
        """
        computed: dict[tuple[int, ...], _Known] = {}
        for ids in sequences:
            sequence = tuple(ids.tolist())
            if sequence in computed:
                continue
            before = self._known.get(sequence[:-1]) if self._is_kept else None
            self._before, self._behind = () if before is None else before.states, []
            logits = compute(ids, 0 if before is None else len(ids) - 1)
            computed[sequence] = _Known(logits, tuple(self._behind))
        self._known = computed
        return torch.stack([computed[tuple(ids.tolist())].logits for ids in sequences])

    def _attend(self, attention: CoreAttention, given: tuple[Any, ...], options: Any, output: Tensor) -> Tensor:
        """Keep keys and values; let a single token attend to those before it, too."""
        query, key, value = given[:3]
        if self._before:
            keys, values = self._before[len(self._behind)]
            key, value = torch.cat((keys, key)), torch.cat((values, value))
            output = attend_to_all(query, key, value, rule=attention.choice.rule, softmax_scale=attention.softmax_scale)
        self._behind.append((key, value))
        return output


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, *, rule: MaskRule, softmax_scale: float | None) -> Tensor:
    """Let the last token of a sequence, which is text, attend to all tokens, or to the last ones in the rule's window.

    query: [1, 1, heads, head_channels]; key, value: [num_tokens, 1, groups, head_channels].
    Returns [1, 1, heads x head_channels].
    """
    wide, first = torch.promote_types(query.dtype, torch.float32), -(rule.window or len(key))
    key, value = (tensor[first:, 0].to(wide) for tensor in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if softmax_scale is None else softmax_scale
    grouped = query[0, 0].unflatten(0, (key.shape[1], -1)).to(wide)
    scores = capped(torch.einsum("ghc,kgc->ghk", grouped, key) * scale, rule.softcap)
    return torch.einsum("ghk,kgc->ghc", scores.softmax(dim=-1), value).to(query.dtype).reshape(1, 1, -1)


_UNBOUNDED = 2**20
"""Most tokens of a question: none is cut."""
Message = dict[str, Any]


class Question(NamedTuple):
    """The last question of a sample."""

    token_ids: tuple[int, ...]
    """All tokens before the answer."""
    answer: tuple[int, ...]
    """The answer in the data, with the token that ends it."""


class Answering:
    """A model, and the samples whose questions it answers."""

    def __init__(self, session: Session, source: SampleSource, tokenizer: Tokenizer) -> None:
        self._session, self.source, self.tokenizer, self.graph = session, source, tokenizer, session.graph
        self._backbone = session.stages[session.graph.backbone.name, 0]
        batches = GlobalBatches((DataPart(len(source)),), 1, seed=0, shuffle=False)
        balance, options = BalanceOptions(micro_batch_size=1), StepOptions(session.schedules(forward_only=True), rank=0)
        self._planner = StepPlanner(source, batches=batches, balancer=BALANCERS["none"], balance_options=balance, options=options)

    def question(self, index: int) -> Question:
        """Return the tokens before and in the last answer of a sample; raises DataError if nothing in it is an answer."""
        text = self.source.text(index)
        learnt = text.is_target.nonzero()[0].tolist()
        if not learnt:
            raise DataError(f"sample {index}: nothing in it is an answer; give it a user's and an assistant's turn")
        first = next((end for start, end in reversed([*pairwise(learnt)]) if end - start > 1), learnt[0])
        return Question(tuple(text.token_ids[: first + 1].tolist()), tuple(text.labels[first : learnt[-1] + 1].tolist()))

    def expected(self, index: int) -> str:
        """Return the answer in the data."""
        return self.tokenizer.decode(self.question(index).answer)

    def asked(self, index: int) -> str:
        """Return the text before it."""
        return self.tokenizer.decode(self.question(index).token_ids)

    @torch.no_grad()
    def answer(self, index: int, *, max_new_tokens: int = 64, seed: int = 0, **options: Any) -> str:
        """Return the model's own answer.

        options: of transformers' `generate`, such as do_sample, temperature, top_p, top_k, num_beams; without them the likeliest
        token each time. It ends with the token that ends answers in the data, or after max_new_tokens.
        """
        question = self.question(index)
        before, items = self._inputs(index, num_tokens=len(question.token_ids))
        special = (*astuple(self.tokenizer.special), *getattr(self.tokenizer, "special_spellings", {}))
        end = question.answer[-1] if question.answer[-1] in special else None
        options = {"do_sample": False, **options, "use_cache": False, "eos_token_id": end, "pad_token_id": end}
        torch.manual_seed(seed)
        ids = torch.tensor([question.token_ids], device=before.positions.device)
        compute = partial(self._next_logits, before, items)
        with KeyValueCache(self._backbone) as cache:
            model = _token_by_token(lambda sequences: cache.next_logits(sequences, compute), device=ids.device)
            found = model.generate(ids, max_new_tokens=max_new_tokens, **options)
        return self.tokenizer.decode(found[0, len(question.token_ids) :].tolist())

    def _inputs(self, index: int, *, num_tokens: int) -> tuple[PackedInput, Tensor | None]:
        """Return the LLM's input of a sample's first tokens, and what its encoders say of the items in them."""
        _, (_, whole, items) = self.inputs_of(self._backbone.unit.name, index)
        rows = torch.tensor([num_tokens - 1], device=whole.positions.device)
        cut = replace(
            whole,
            lengths=(num_tokens,),
            positions=whole.positions[:num_tokens],
            token_ids=whole.token_ids[:num_tokens],
            target_rows=rows,
            targets=torch.zeros_like(rows),
            target_weights=None,
            generator_rows=None,
            packed=None,
        )
        return cut, items

    def inputs_of(self, unit: str, index: int) -> tuple[UnitStage, tuple[Any, ...]]:
        """Return the stage of a unit, and what reaches it of a sample, which runs as in an evaluation."""
        stage, given = self._session.stages[unit, 0], list[tuple[Any, ...]]()
        hook = stage.register_forward_pre_hook(lambda _, arguments: given.append(arguments))
        try:
            self._session.executor.execute(self._planner[index])
        finally:
            hook.remove()
        return stage, given[0]

    def _next_logits(self, before: PackedInput, items: Tensor | None, ids: Tensor, num_known: int) -> Tensor:
        """Return the logits behind a question and what was answered so far; ids: [num_tokens]; returns [vocab_size].

        num_known: tokens at the begin whose keys and values are kept; 0, or all but the last.
        """
        assert before.token_ids is not None
        num_new = len(ids) - len(before.token_ids)
        behind = before.positions.max() + 1 + torch.arange(num_new, device=ids.device)
        positions = behind.reshape(-1, *[1] * (before.positions.dim() - 1)).expand(num_new, *before.positions.shape[1:])
        batch = replace(
            before,
            lengths=(len(ids) - num_known,),
            positions=torch.cat([before.positions, positions.to(before.positions.dtype)])[num_known:],
            token_ids=ids[num_known:],
            target_rows=torch.tensor([len(ids) - num_known - 1], device=ids.device),
        )
        if num_known:
            items, batch = None, replace(batch, items=(), item_rows=None, item_ends=None, item_sources=None)
        head: HeadOutput = self._backbone(None, batch, items)
        assert head.predicted is not None, "the LLM is evaluated"
        return head.predicted[0, : self._backbone.unit.num_tokens_known(self._session.options.vocab_size)]


def open_answering(session: Session, model: StoredModel, path: Path, **frames: Any) -> Answering:
    """Return what answers the samples of a file, in any form that --data-path takes; frames: as in `open_questions`."""
    tokenizer, chat = model.texts.open()
    if chat is None and tokenizer.vocab_size > (num_rows := model.graph.backbone.vocab_size or model.vocab_size):
        raise ConfigError(
            f"{model.texts.tokenizer_model}: questions need {tokenizer.vocab_size} tokens, those of turns included, but the "
            f"model has {num_rows}; give its --chat-template FILE, or train it first"
        )
    source: SampleSource = open_questions(path, graph=session.graph, tokenizer=tokenizer, chat=chat, **frames)
    if session.graph.passes_items_on:
        source = PassedItems(source, graph=session.graph)
    return Answering(session, source, tokenizer)


def open_questions(
    path: Path, *, graph: ModelGraph, tokenizer: Tokenizer, chat: ChatFormat | None, **frames: Any
) -> ManifestSource:
    """Open a file of questions, none of which is cut; frames: fields of IndexOptions about videos. Raises DataError."""
    options = IndexOptions(_UNBOUNDED, allows_outside_paths=True, **frames)
    return ManifestSource(open_sample_files(path), graph=graph, tokenizer=tokenizer, options=options, chat=chat)


def user_message(
    prompt: str, *, images: Sequence[str | Path] = (), audio: Sequence[str | Path] = (), videos: Sequence[str | Path] = ()
) -> Message:
    """Return what a user says, with files before the text."""
    kinds = ("image", images), ("video", videos), ("audio", audio)
    files = [{"type": kind, kind: str(data_path(str(path)).absolute())} for kind, paths in kinds for path in paths]
    return {"role": "user", "content": [*files, {"type": "text", "text": prompt}]}


def generate(
    model: str | Path | OpenedModel,
    prompt: str | Sequence[Message],
    *,
    images: Sequence[str | Path] = (),
    audio: Sequence[str | Path] = (),
    videos: Sequence[str | Path] = (),
    num_frames: int = NUM_FRAMES,
    video_fps: float | None = None,
    max_new_tokens: int = 64,
    seed: int = 0,
    **options: Any,
) -> str:
    """Return a trained model's answer, computed by this process.

    model: the folder of a run's checkpoints, one of them, a folder of Hugging Face, or what `open_model` gives for one, which
    spares reading it for every question. prompt: a question, after images, videos and clips of sound from these files; or the
    messages of a conversation, the last one a user's, as `user_message` makes them. num_frames: most frames that are seen of a
    video; video_fps: frames of a second of it. options: as in `Answering.answer`. Raises BraidError if the model cannot be read,
    or takes no such files.
    """
    if not isinstance(prompt, str) and (images or audio or videos):
        raise ConfigError("images, audio, videos go with a question; in a conversation name them in its messages (user_message)")
    answer = {"role": "assistant", "content": [{"type": "text", "text": "."}]}  # only its place counts
    opening = nullcontext(model) if isinstance(model, tuple) else open_model(model)
    with opening as opened, tempfile.TemporaryDirectory() as folder:
        messages = [user_message(prompt, images=images, audio=audio, videos=videos)] if isinstance(prompt, str) else prompt
        path = Path(folder) / "question.jsonl"
        path.write_text(json.dumps({"messages": [*messages, answer]}) + "\n")
        try:
            answering = open_answering(*opened, path, num_frames=num_frames, video_fps=video_fps)
            return answering.answer(0, max_new_tokens=max_new_tokens, seed=seed, **options)
        except DataError as problem:
            raise DataError(str(problem).replace(str(path), "the question")) from problem


def _token_by_token(next_logits: Callable[[Tensor], Tensor], *, device: torch.device) -> Any:
    """Return a model of transformers with the logits of a function of token ids; both [num_sequences, ...]."""
    require_package("transformers", extra="hf", needed_by="answering", error=ConfigError)
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    class TokenByToken(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        config_class = PretrainedConfig
        main_input_name = "input_ids"

        @property
        def device(self) -> torch.device:
            return device

        def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Any = None, **_: Any) -> dict[str, Any]:
            return {"input_ids": input_ids}

        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            return CausalLMOutput(logits=next_logits(input_ids)[:, None])

    return TokenByToken(PretrainedConfig())
