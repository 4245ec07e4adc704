import pickle
from dataclasses import dataclass, field, replace

from multimodal.cost.memoize import memoized


@dataclass(frozen=True)
class Doubles:
    unit: int
    calls: list[tuple[int, bool]] = field(default_factory=list, compare=False)

    @memoized
    def of(self, number: int, *, negated: bool) -> int | None:
        """Double a number."""
        self.calls.append((number, negated))
        return None if not number else self.unit * number * (-2 if negated else 2)


def test_results_are_computed_once_for_each_object_and_arguments():
    first, second = Doubles(1), Doubles(1)
    for _ in range(2):
        assert [first.of(3, negated=False), first.of(3, negated=True), first.of(0, negated=True)] == [6, -6, None]
    assert second.of(3, negated=False) == 6
    assert (first.calls, second.calls) == ([(3, False), (3, True), (0, True)], [(3, False)])
    assert first == second


def test_results_travel_with_the_object_but_not_to_changed_ones():
    first = Doubles(1)
    first.of(3, negated=False)
    assert pickle.loads(pickle.dumps(first)).of(3, negated=False) == 6
    assert replace(first, unit=2).of(3, negated=False) == 12
