"""The options of a balancer and their checks, and predictions of steps, by which a balancer may choose."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

import numpy as np

from multimodal.balance.length_cost import LengthCost
from multimodal.values.assignment import Assignment
from multimodal.values.errors import AssignmentError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import LengthBatch, SampleLengths


class Prediction(Protocol):
    """The prediction of one step under one assignment."""

    @property
    def seconds(self) -> float:
        """Predicted duration of the step."""

    @property
    def least_seconds(self) -> float:
        """A lower bound of `seconds` that is computed quickly."""

    @property
    def dealt_by_idle_time(self) -> tuple[Assignment, ...]:
        """The same microbatches on other encoder pipelines, chosen by the idle time of their ranks."""


class Predictor(Protocol):
    """Predicts steps, deterministically."""

    @property
    def margin(self) -> float:
        """Share of a step that must be gained for anything but the data's order to be chosen."""

    def predict_each(self, assignments: Sequence[Assignment], lengths: Sequence[SampleLengths]) -> Sequence[Prediction]:
        """Predict a step of these samples under each of several assignments."""


def choose_shortest(
    candidates: Iterator[Assignment], lengths: Sequence[SampleLengths], predictor: Predictor | None
) -> Assignment:
    """Return the first of the candidates with the shortest step; without a predictor, the first of all."""
    if predictor is None:
        return next(candidates)
    different = list(unique(candidates))
    return different[0] if len(different) == 1 else pick_shortest(different, predictor.predict_each(different, lengths))


def pick_shortest(candidates: Sequence[Assignment], predictions: Sequence[Prediction]) -> Assignment:
    """Return the first of the candidates with the shortest step, without predicting those that cannot win."""
    best_seconds, best = float("inf"), -1
    for index in sorted(range(len(candidates)), key=lambda index: predictions[index].least_seconds):
        if predictions[index].least_seconds > best_seconds:
            break
        best_seconds, best = min((best_seconds, best), (predictions[index].seconds, index))
    return candidates[best]


def unique(candidates: Iterable[Assignment]) -> Iterator[Assignment]:
    """Yield the assignments that differ from all before them."""
    seen: list[Assignment] = []
    for candidate in candidates:
        if candidate not in seen:
            seen.append(candidate)
            yield candidate


MOST_TOKENS = 2**31 - 1
"""Most tokens of one item or text: beyond it, sums of squares would not be exact."""


class Granularity(StrEnum):
    """The smallest unit that balancing an encoder moves."""

    ITEM = "item"
    """Every image and every clip on its own."""
    SAMPLE = "sample"
    """All items of a sample together, as the papers do."""


class MicrobatchCount(StrEnum):
    """The number of microbatches that a balancer makes if single samples are longer than an even microbatch."""

    GIVEN = "given"
    """The number that follows from `micro_batch_size`."""
    EFFECTIVE = "effective"
    """Entrain's K_eff: the largest number whose microbatches can all have the encoder work of the longest sample."""
    PREDICTED = "predicted"
    """One of these two numbers, or one between them: the one with the shortest predicted step."""


@dataclass(frozen=True, kw_only=True)
class BalanceOptions:
    """Sizes, costs and all other inputs that shape an assignment."""

    micro_batch_size: int = 1
    """Samples in one microbatch of the LLM. Balancers that equalise work use it as the mean, which gives their number."""
    tokens_per_microbatch: int | None = None
    """Most LLM tokens in one microbatch, instead of a number of samples; a longer sample has a microbatch of its own."""
    num_microbatches: int | None = None
    """Microbatches of every LLM replica, instead of their size; with fewer samples a replica has fewer."""
    encoder_micro_batch_sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Encoder -> most items in one of its microbatches; other encoders follow the LLM's microbatches."""
    granularity: Granularity = Granularity.ITEM
    microbatch_count: MicrobatchCount = MicrobatchCount.GIVEN
    """For balancers that can lower the number (`BalancerRow.defers`)."""
    merges_encoders: bool = False
    """True if encoders count as one, whose work is the sum of theirs; for balancers that defer (Entrain 4.5)."""
    refines_encoders: bool = False
    """True if encoders are balanced by themselves where a balancer would place them beside the LLM."""
    unit_costs: Mapping[str, LengthCost] = field(default_factory=lambda: MappingProxyType({}))
    """Unit -> its cost as a function of lengths in tokens; other units cost their FLOPs (see `BatchWork`)."""
    ranks_per_node: int = 8
    vocab_size: int = 32768
    predictor: Predictor | None = None
    """Predicts the steps that `auto` compares; without it, `auto` compares the largest work of a replica."""


def validate_inputs(lengths: Sequence[SampleLengths], *, graph: ModelGraph, options: BalanceOptions) -> None:
    """Check a global batch and the options; raises AssignmentError with what to change. O(items)."""
    if not lengths:
        raise AssignmentError("the global batch has no samples; give at least one (check --global-batch-size and the data)")
    for problem in _option_problems(graph, options):
        raise AssignmentError(problem)
    if not _is_plain(lengths, graph):
        for problem in _sample_problems(lengths, graph):
            raise AssignmentError(problem)


def _is_plain(lengths: Sequence[SampleLengths], graph: ModelGraph) -> bool:
    """Return True if the samples are certainly valid; else `_sample_problems` checks them one by one."""
    try:
        arrays = LengthBatch.of(lengths).arrays
    except (TypeError, OverflowError):
        return False
    known = {unit.name for unit in (*graph.encoders, *graph.generators)}
    columns = (arrays.num_text_tokens, arrays.num_target_tokens, arrays.num_item_tokens, arrays.num_output_tokens)
    in_range = all(column.min(initial=0) >= 0 and column.max(initial=0) <= MOST_TOKENS for column in columns)
    return in_range and known.issuperset(arrays.units) and len(np.unique(arrays.sample_ids)) == len(arrays)


def _option_problems(graph: ModelGraph, options: BalanceOptions) -> Iterator[str]:
    encoders = [unit.name for unit in graph.encoders]
    if options.micro_batch_size < 1:
        yield f"micro batch size {options.micro_batch_size} must be at least 1; set --micro-batch-size"
    if options.tokens_per_microbatch is not None and options.tokens_per_microbatch < 1:
        yield f"{options.tokens_per_microbatch} tokens per microbatch; there must be at least 1"
    if options.num_microbatches is not None and options.num_microbatches < 1:
        yield f"{options.num_microbatches} microbatches per replica; there must be at least 1"
    for name, size in options.encoder_micro_batch_sizes.items():
        if name not in encoders:
            yield (
                f"an encoder micro batch size is given for '{name}', which is no encoder of the model "
                f"(encoders: {', '.join(encoders) or 'none'}); remove it"
            )
        if size < 1:
            yield f"unit '{name}': micro batch size {size} must be at least 1; set --{name}-micro-batch-size"
    if unknown := [name for name in options.unit_costs if name not in graph.unit_names]:
        yield f"a cost is given for '{unknown[0]}', which is no unit of the model; remove it"
    if options.ranks_per_node < 1:
        yield f"{options.ranks_per_node} ranks per node; there must be at least 1"


def _sample_problems(lengths: Sequence[SampleLengths], graph: ModelGraph) -> Iterator[str]:
    encoders, generators = [unit.name for unit in graph.encoders], [unit.name for unit in graph.generators]
    seen: set[int] = set()
    for sample in lengths:
        if sample.sample_id in seen:
            yield f"sample {sample.sample_id} is in the global batch twice; give every sample an id of its own"
        seen.add(sample.sample_id)
        counts = sample.num_text_tokens, sample.num_target_tokens, *(count for item in sample.items for count in item[1:3])
        if wrong := [count for count in counts if not (isinstance(count, int) and 0 <= count <= MOST_TOKENS)]:
            yield f"sample {sample.sample_id} has a length of {wrong[0]} tokens; lengths are integers from 0 to {MOST_TOKENS}"
        for index, item in enumerate(sample.items):
            if item.unit not in encoders and item.unit not in generators:
                yield (
                    f"item {index} of sample {sample.sample_id} is for unit '{item.unit}', which is no encoder of the model "
                    f"(encoders: {', '.join(encoders) or 'none'}); remove the item or add the encoder"
                )
