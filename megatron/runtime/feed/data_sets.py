"""The training and validation sets that the flags name, and their description in checkpoints, which a resumed run must match."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron.runtime.feed.agreement import check_share
from megatron.runtime.flags.configuration import HELD_OUT, RunConfig
from megatron.runtime.flags.field_flags import value_of
from megatron.runtime.launch.rank_place import read_token
from multimodal.data.blend import NamedData
from multimodal.data.chat.chat_format import ChatFormat
from multimodal.data.chat.text_settings import TextSettings
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.global_batches import DataPart, SplitPart, join_samples, shuffled, split_indices
from multimodal.data.index.index_cache import IndexCache
from multimodal.data.index.item_reader import CachedLatents, ItemDecoder, ItemReader
from multimodal.data.index.sample_indexer import BAD, IndexOptions, SampleIndexer
from multimodal.data.manifest import ManifestSource
from multimodal.data.remote import data_path
from multimodal.data.sample_source import SampleRequest, SampleSource, file_digest, open_program
from multimodal.data.source_views import AveragedSamples, Mixture, PassedItems, SourceSubset
from multimodal.data.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer
from multimodal.hugging_face.architecture import autoencoder_digest
from multimodal.hugging_face.registry import CONFIG_NAME, read_config
from multimodal.values.errors import CheckpointError, ConfigError, DataError
from multimodal.values.model_graph import ImageInput, ModelGraph

if TYPE_CHECKING:
    from megatron.runtime.feed.producers.produced_items import ProducedItems

logger = logging.getLogger(__name__)


class DataSet(NamedTuple):
    """Samples, and how they are drawn."""

    source: SampleSource
    parts: tuple[DataPart, ...]
    """The data sets of a mixture, in the order of their samples in `source`, or the one that there is."""


@dataclass(frozen=True)
class DataSets:
    """The data sets of training and evaluation, and the tokenizer of both."""

    train: DataSet
    valid: DataSet
    tokenizer: Tokenizer
    valid_sets: Mapping[str, DataSet] = field(default_factory=dict)
    """The sets of --valid-data-path by their names."""

    @property
    def num_train(self) -> int:
        """Samples of the training, or sequences of them."""
        return sum(part.num_samples for part in self.train.parts)


def build_data_sets(config: RunConfig, graph: ModelGraph, *, in_turn: AbstractContextManager[None] | None = None) -> DataSets:
    """Open `--data-path`; raises DataError or ConfigError. in_turn: lets one rank of a node index the data before the others."""
    if (program := config.data.sample_program) is not None:
        tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
        num_valid = max(1, config.evaluation.eval_iters * config.training.global_batch_size)
        seed, num_train = config.training.seed, config.data.program_samples
        request = SampleRequest(graph, tokenizer, config.data.seq_length, seed, num_train, num_valid)
        with in_turn or nullcontext():
            sets = _validation_sets(config, graph=graph, tokenizer=tokenizer, chat=None)
        train, valid = ([_join(source, config=config, name=program.name)] for source in open_program(program, request))
        weights = [1.0]
    else:
        tokenizer, chat = text_settings(config).open()
        check_placeholders(config.model.model, tokenizer, chat)
        with in_turn or nullcontext():
            open_data = partial(_open_named, config=config, graph=graph, tokenizer=tokenizer, chat=chat)
            sources = [(named, open_data(named)) for named in config.data.mixture]
            sets = _validation_sets(config, graph=graph, tokenizer=tokenizer, chat=chat)
        split = partial(split_indices, split=config.data.split, seed=config.training.seed)
        parts = [(named.path, source, split(len(source))) for named, source in sources]
        train = [_join(source, part.train, config=config, name=path, is_shuffled=True) for path, source, part in parts]
        valid = [_join(source, part.valid, config=config, name=f"{path} ({HELD_OUT})") for path, source, part in parts]
        weights = [of.weight or of.repetitions * part.num_samples for (of, _), (_, part) in zip(sources, train, strict=True)]

    def mixed(joined: Sequence[tuple[SampleSource, DataPart]], weights: Sequence[float] = (1.0,)) -> DataSet:
        sources = [source for source, _ in joined]
        source = sources[0] if len(sources) == 1 else Mixture(sources, loss_weights=config.training.sample_loss_weight)
        source = PassedItems(source, graph=graph) if graph.passes_items_on else source
        source = AveragedSamples(source) if config.training.loss_average == "samples" else source
        return DataSet(source, tuple(replace(part, weight=weight) for (_, part), weight in zip(joined, weights, strict=True)))

    alone = {name: mixed([_join(source, config=config, name=name)]) for name, source in sets.items()}
    return DataSets(mixed(train, weights), mixed(valid, weights), tokenizer, alone)


def _join(
    source: SampleSource, indices: SplitPart | None = None, *, config: RunConfig, name: str, is_shuffled: bool = False
) -> tuple[SampleSource, DataPart]:
    """Return samples, all or of these indices, as they are drawn: singly, or joined into sequences, in the seed's order."""
    most = config.training.packing_seq_length
    if most is None:
        found = source if indices is None else SourceSubset(source, indices)
        return found, DataPart(len(found))
    order = np.arange(len(source)) if indices is None else np.asarray(indices)
    order = shuffled(order, seed=config.training.seed) if is_shuffled else order
    if isinstance(source, ManifestSource):
        num_tokens = source.num_tokens[order]
    else:
        num_tokens = np.array([source.lengths(index).num_tokens for index in order.tolist()], np.int64)
    starts = join_samples(num_tokens, most=most)
    count, total = len(starts) - 1, int(num_tokens.sum())
    if count:
        what = "%s: joined %d samples into %d sequences of at most %d tokens, %.1f%% full on average (%d of padding avoided)"
        logger.info(what, name, len(order), count, most, 100 * total / (count * most), count * most - total)
    return SourceSubset(source, order), DataPart(count, starts=starts)


def _validation_sets(config: RunConfig, **how: Any) -> Mapping[str, SampleSource]:
    found = {}
    for name, named in config.evaluation.valid_sets.items():
        try:
            found[name] = _open_named(named, config=config, **how)
        except DataError as problem:
            raise DataError(f"--valid-data-path {named.path}: {problem}") from problem
    return found


_OF_ITEMS = ("overlong", "max_image_pixels", "num_frames", "video_fps", "video_max_pixels", "video_sound")
"""Flags that an index of the data follows."""


def _open_named(named: NamedData, **how: Any) -> SampleSource:
    """Open one data set of a mixture, with its ranges of samples; arguments and errors as of `open_manifest`."""
    source: SampleSource = open_manifest(named.path, **how)
    if named.ranges:
        source = SourceSubset(source, taken := named.samples(len(source)))
        if not taken:
            raise DataError(f"{named.path}: no sample is left of it by the ranges of its metadataset; widen them")
    return source


def open_manifest(
    path: str, *, config: RunConfig, graph: ModelGraph, tokenizer: Tokenizer, chat: ChatFormat | None
) -> ManifestSource:
    """Open one data set of a run; raises DataError or ConfigError if it, or a producer, cannot be used."""
    options = IndexOptions(
        config.data.seq_length,
        needs_items_first=config.model.attention_mask == "prefix",
        allows_outside_paths=config.data.allow_outside_paths,
        media_dir=str(data_path(config.data.media_dir).absolute()) if config.data.media_dir else None,
        skips_bad=config.data.bad_sample == "skip",
        **{name: getattr(config.data, name) for name in _OF_ITEMS},
    )
    texts = text_settings(config)
    files = open_sample_files(path, config.data.remote)
    local = ItemReader(graph, files)
    producers = _find_producers(path, config, graph, texts=texts, options=options, local=local)
    decoder: ItemDecoder = producers or local
    if config.data.latent_cache is not None:
        images = latent_images(graph)
        digests = {name: autoencoder_digest(image) for name, image in images.items()}
        decoder = CachedLatents(config.data.latent_cache, images, digests, data_path=path, decoder=decoder)
    source = ManifestSource(
        files,
        graph=graph,
        tokenizer=tokenizer,
        options=options,
        chat=chat,
        decoder=decoder,
        indexing=producers.index_all if producers else SampleIndexer.index_all,
        cache=IndexCache(texts.identity, chosen=config.data.data_cache_path),
    )
    if bad := {reason.removeprefix(BAD): count for reason, count in source.skipped.items() if reason.startswith(BAD)}:
        num_samples, most = len(source) + sum(source.skipped.values()), config.data.bad_samples_per_thousand
        check_share(sum(bad.values()), num_samples, most_per_thousand=most, problem=next(iter(bad)))
    for reason, count in source.skipped.items():
        logger.info("%s: left out %d samples %s", path, count, reason)
    if source.shows_single_frames:
        logger.info("%s: the frames of videos are images to this model, which has no steps of several (`video`)", path)
    if source.num_cut:
        logger.info("%s: cut %d samples to %d tokens (--seq-length)", path, source.num_cut, config.data.seq_length)
    return source


def with_cached_latents(graph: ModelGraph) -> ModelGraph:
    """Return the model with latents that come from a cache, so that costs count no encoding."""
    units = {unit.name: unit for unit in graph.units}
    for name, image in latent_images(graph).items():
        assert image.latents is not None
        units[name] = replace(units[name], image=replace(image, latents=replace(image.latents, is_cached=True)))
    return replace(graph, units=tuple(units.values()))


def latent_images(graph: ModelGraph) -> dict[str, ImageInput]:
    """Return the images of the generators that make latents."""
    return {unit.name: unit.image for unit in graph.generators if unit.image is not None and unit.image.latents is not None}


def _find_producers(
    path: str, config: RunConfig, graph: ModelGraph, *, texts: TextSettings, options: IndexOptions, local: ItemReader
) -> "ProducedItems | None":
    """Return the client of the run's producers, after checking that all of them are there; None without producers."""
    token_path = config.data.producer_token
    if not config.data.producers or token_path is None:
        return None
    from megatron.runtime.feed.producers.produced_items import ProducedItems, describe_data_set  # needs an extra

    found = ProducedItems(
        [address for several in config.data.producers for address in several.split(",") if address],
        token=read_token(token_path, flag="--producer-token"),
        data_set=describe_data_set(graph, path, texts=texts, options=options),
        local=local,
    )
    found.check()
    return found


def text_settings(config: RunConfig) -> TextSettings:
    """Return the settings by which the run's texts become tokens."""
    return TextSettings(config.data.tokenizer_type, config.data.tokenizer_model, config.data.chat_template)


def with_vocabulary(graph: ModelGraph, tokenizer: Tokenizer) -> ModelGraph:
    """Enlarge an LLM's exact vocabulary to the tokenizer's if that is larger, for special tokens that it lacks.

    Rows that frozen embeddings lack, or had to spare, become `new_tokens`. Raises ConfigError for another model's tokenizer.
    """
    backbone = graph.backbone
    own, known = tokenizer.num_own_tokens, backbone.vocab_size or 0
    if not backbone.has_exact_vocabulary or own == tokenizer.vocab_size <= known:
        return graph
    if own > known > 0:
        raise ConfigError(
            f"the tokenizer has {own} tokens, but the vocabulary of unit '{backbone.name}' "
            f"{backbone.vocab_size}; give the model's own: --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR"
        )
    new = None if backbone.trains_weights(0) else (own, tokenizer.vocab_size)
    larger = replace(backbone, vocab_size=max(known, tokenizer.vocab_size), new_tokens=new)
    return replace(graph, units=tuple(larger if unit is backbone else unit for unit in graph.units))


def check_placeholders(model: Path, tokenizer: Tokenizer, chat: ChatFormat | None) -> None:
    """Raise ConfigError if a tokenizer's placeholders differ from a model folder's config.json; byte tokenizers are exempt."""
    if not model.is_dir() or not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    architecture, config = read_config(model)
    config = {**config, **config.get("thinker_config", {})}
    for kind in architecture.items:
        key, found = architecture.placeholders[kind], getattr(tokenizer.special, kind)
        if chat is not None:
            found = chat.placeholders[kind].token_id if kind in chat.placeholders else None
        if isinstance(config.get(key), int) and found != config[key]:
            fix = "give the model's own, with its chat template: --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR"
            if chat is None:
                fix = (
                    "turns of Braid's own have no other, and no chat template is used: the tokenizer's folder has none "
                    "(chat_template.jinja), or --chat-template none says so. Add the model's, or give --chat-template FILE"
                )
            found_there = f"{model / CONFIG_NAME} says {key} {config[key]}"
            raise ConfigError(f"the placeholder ({kind}) is token {found} of the tokenizer, but {found_there}; {fix}")


def padded_vocab_size(tokenizer: Tokenizer, config: RunConfig, *, graph: ModelGraph) -> int:
    """Return the vocabulary size padded to a multiple of --make-vocab-size-divisible-by, whatever the plan."""
    multiple = config.model.make_vocab_size_divisible_by
    exact = graph.backbone.vocab_size if graph.backbone.has_exact_vocabulary else None
    return -(-(exact or tokenizer.vocab_size) // multiple) * multiple


RunData = Mapping[str, Any]
"""Plain values, as stored in a checkpoint."""


class _Compared(NamedTuple):
    name: str
    flag: str
    shown: str = ""
    """The entry that messages show instead; empty: this entry."""
    unit: str = ""
    may_change: bool = False
    """True if --new-phase may change it."""


_COMPARED = (
    _Compared("seed", "--seed"),
    _Compared("global_batch_size", "--global-batch-size", may_change=True),
    _Compared("data_digest", "--data-path", shown="data_path", may_change=True),
    _Compared("program_samples", "--program-samples", may_change=True),
    _Compared("split", "--split", may_change=True),
    _Compared("seq_length", "--seq-length", may_change=True),
    _Compared("packing_seq_length", "--packing-seq-length", may_change=True),
    _Compared("tokenizer_type", "--tokenizer-type"),
    _Compared("tokenizer_digest", "--tokenizer-model", shown="tokenizer_model"),
    _Compared("chat_template_digest", "--chat-template", shown="chat_template", may_change=True),
    _Compared("attention_mask", "--attention-mask"),
    _Compared("num_train_samples", "--data-path", unit="training samples", may_change=True),
)
"""In the order in which differences are reported: the last follows from those before it, unless image files changed."""
_DESCRIBED = (
    *("seed", "global_batch_size", "seq_length", "packing_seq_length"),
    *("tokenizer_type", "tokenizer_model", "chat_template", "attention_mask"),
)
"""Flags that are described by their values."""


def describe_data(config: RunConfig, data: DataSets) -> RunData:
    """Return the description that checkpoints store, of files by content, as they may move; O(bytes of the manifest). OSError."""
    program = config.data.sample_program
    remote, mixture = config.data.remote, config.data.mixture
    digests = [file_digest(program)] if program else []
    for named in () if program else mixture:
        ranges = "".join(f" {first:g} to {last:g}" for first, last in named.ranges)
        digests.append(open_sample_files(named.path, remote).digest + ranges)
    parts = data.train.parts
    split = None if program else config.data.split
    weighted = repr([(digest, part.weight) for digest, part in zip(digests, parts, strict=True)])
    joined = hashlib.blake2b(weighted.encode(), digest_size=16).hexdigest()
    return {
        **{name: value_of(config, name) for name in _DESCRIBED},
        "data_path": " ".join(config.data.data_path),
        "data_digest": digests[0] if len(parts) == 1 else joined,
        "program_samples": config.data.program_samples if program else None,
        "split": split,
        **text_settings(config).digests,
        "num_train_samples": len(data.train.source),
        "data_sets": [
            [data_set_name(digest, split, part.num_samples), part.weight] for digest, part in zip(digests, parts, strict=True)
        ],
    }


def data_set_name(digest: str, split: str | None, num_samples: int) -> str:
    """Return the name of a data set; data sets with the same name have the same order of samples."""
    return f"{digest} {split} {num_samples}"


def check_same_data(where: str, *, saved: RunData, current: RunData, is_new_phase: bool = False) -> None:
    """Raise CheckpointError with the first difference that would make a resumed run continue differently.

    where: names the checkpoint; is_new_phase: allow what --new-phase allows. What only one of the two has is not compared.
    """
    for name, flag, shown, unit, may_change in _COMPARED:
        if name not in saved or saved[name] == current[name] or (is_new_phase and may_change):
            continue
        before, now = (
            f"{data.get(shown)} (content {str(data[name])[:12]})" if shown else f"{data[name]} {unit}".strip()
            for data in (saved, current)
        )
        or_change = "add --new-phase to go on otherwise from here, " if may_change else ""
        raise CheckpointError(
            f"{where}: it was trained with {flag} {before}, this run has {now}, so the data would not go on as it was; use "
            f"{flag} {before}, {or_change}or start another run from its weights alone: --finetune, with a --save of its own"
        )
