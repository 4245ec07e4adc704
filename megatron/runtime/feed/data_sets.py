"""The training and the validation set that the flags name."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from megatron.runtime.flags.configuration import RunConfig
from multimodal.data.digits import DigitsSource
from multimodal.data.digits_to_draw import DigitsToDrawSource
from multimodal.data.manifest import ManifestSource
from multimodal.data.sample_source import SampleSource
from multimodal.data.source_views import InterleavedSource, SourceSubset
from multimodal.data.splits import split_indices
from multimodal.data.tokenizer import Tokenizer, build_tokenizer
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph, Unit

DIGITS = "digits"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSets:
    """What is trained on and judged by, and the tokenizer of both."""

    train: SampleSource
    valid: SampleSource
    tokenizer: Tokenizer


def build_data_sets(config: RunConfig, graph: ModelGraph) -> DataSets:
    """Open `--data-path`; raises DataError or ConfigError when it cannot be used."""
    tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
    if config.data.data_path == DIGITS:
        return _digits(config, graph, tokenizer)
    source = ManifestSource(
        config.data.data_path,
        graph=graph,
        tokenizer=tokenizer,
        seq_length=config.data.seq_length,
        needs_items_first=config.model.attention_mask == "prefix",
        allows_outside_paths=config.data.allow_outside_paths,
        max_image_pixels=config.data.max_image_pixels,
    )
    for reason, count in source.skipped.items():
        logger.info("%s: left out %d samples %s", config.data.data_path, count, reason)
    if source.num_cut:
        logger.info(
            "%s: cut %d samples to %d tokens (--seq-length)", config.data.data_path, source.num_cut, config.data.seq_length
        )
    parts = split_indices(len(source), split=config.data.split, seed=config.training.seed)
    return DataSets(SourceSubset(source, parts.train), SourceSubset(source, parts.valid), tokenizer)


def padded_vocab_size(tokenizer: Tokenizer, config: RunConfig) -> int:
    """Vocabulary padded to a multiple of --make-vocab-size-divisible-by, whatever the plan."""
    multiple = config.model.make_vocab_size_divisible_by
    return -(-tokenizer.vocab_size // multiple) * multiple


def _digits(config: RunConfig, graph: ModelGraph, tokenizer: Tokenizer) -> DataSets:
    encoders = [unit for unit in graph.encoders if unit.image is not None]
    if len(encoders) != 1:
        raise ConfigError(
            f"--data-path digits needs a model with one image encoder, found {len(encoders)}; use examples/digits/model.yaml"
        )
    if len(graph.generators) > 1:
        raise ConfigError(
            f"--data-path digits has work for one generator, found {len(graph.generators)}; use "
            "examples/digits_generator/model.yaml"
        )
    kinds: list[tuple[Callable[..., SampleSource], Unit]] = [(DigitsSource, encoders[0])]
    kinds += [(DigitsToDrawSource, unit) for unit in graph.generators]

    def build(num_samples: int, split: str) -> SampleSource:
        sources = [
            kind(
                -(-num_samples // len(kinds)),
                seed=config.training.seed,
                split=split,
                unit=unit.name,
                image=unit.image,
                tokenizer=tokenizer,
                seq_length=config.data.seq_length,
            )
            for kind, unit in kinds
        ]
        return sources[0] if len(sources) == 1 else InterleavedSource(sources)

    num_valid = max(1, config.evaluation.eval_iters * config.training.global_batch_size)
    return DataSets(build(config.data.digits_samples or 1, "train"), build(num_valid, "valid"), tokenizer)
