"""Takes the assignment with the shortest predicted step."""

from collections.abc import Iterable, Iterator, Sequence

from multimodal.balance.balance_options import Prediction, Predictor
from multimodal.values.assignment import Assignment
from multimodal.values.sample_lengths import SampleLengths


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
