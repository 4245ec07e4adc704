"""Predictions of steps, and the assignment with the shortest one."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from multimodal.values.assignment import Assignment
from multimodal.values.sample_lengths import SampleLengths


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

    def predict_each(self, assignments: Sequence[Assignment], lengths: Sequence[SampleLengths]) -> Sequence[Prediction]:
        """Predict a step of these samples under each of several assignments."""


def choose_shortest(candidates: Iterable[Assignment], lengths: Sequence[SampleLengths], predictor: Predictor) -> Assignment:
    """Return the first of the candidates with the shortest step."""
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
