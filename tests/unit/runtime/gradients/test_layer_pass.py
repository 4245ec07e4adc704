"""The calls of one pass through sharded layers, whatever asks for them."""

from collections.abc import Callable

import pytest

from megatron.runtime.gradients.sharded_layer import LayerPass, Visit
from multimodal.values.action import ActionKind

FORWARD = [Visit(0, (0,), ()), Visit(1, (1,), ()), Visit(2, (2,), ())]
BACKWARD = [Visit(2, (2,), (2,)), Visit(1, (1,), ()), Visit(0, (0,), (0,))]
"""Layer 1 is frozen."""
TIED = [Visit(2, (2, 0), (2,)), Visit(1, (1,), (1,)), Visit(0, (0,), (0,))]
"""The head computes with the embedding's weights."""


class RecordedLayer:
    def __init__(self, name: int, calls: list[str], gathered: dict[int, int]) -> None:
        self.name, self.calls, self.gathered = name, calls, gathered

    def start_gathering(self) -> None:
        self.gathered[self.name] = self.gathered.get(self.name, 0) + 1
        self.calls.append(f"gather {self.name}")

    def finish_gathering(self) -> None:
        assert self.gathered[self.name] > 0
        self.calls.append(f"have {self.name}")

    def release(self) -> None:
        self.gathered[self.name] -= 1
        self.calls.append(f"release {self.name}")

    def take_gradients(self) -> None:
        self.calls.append(f"keep {self.name}")

    def start_reduction(self) -> None:
        self.calls.append(f"reduce {self.name}")

    def finish_reduction(self) -> None:
        pass


def calls_of(visits: list[Visit], act: Callable[[LayerPass], None], *, reduces: bool = True) -> list[str]:
    calls: list[str] = []
    gathered: dict[int, int] = {}
    layers = {visit.layer: RecordedLayer(visit.layer, calls, gathered) for visit in visits}
    through = LayerPass(ActionKind.BACKWARD, visits, layers, reduces=reduces)  # type: ignore[arg-type]
    act(through)
    through.finish()
    assert not any(gathered.values()), "nothing stays gathered"
    return calls


def in_order(visits: list[Visit]) -> Callable[[LayerPass], None]:
    def act(through: LayerPass) -> None:
        for visit in visits:
            through.enter(visit.layer)
            through.enter(visit.layer)  # of two outputs each asks
            through.leave(visit.layer)

    return act


def test_the_next_two_layers_are_gathered_while_one_computes():
    visits = [*FORWARD, Visit(3, (3,), ())]
    assert calls_of(visits, in_order(visits)) == [
        *("gather 0", "gather 1", "gather 2", "have 0", "release 0"),
        *("gather 3", "have 1", "release 1"),
        *("have 2", "release 2", "have 3", "release 3"),
    ]


def test_gradients_are_reduced_where_a_layer_is_trained():
    for name, reduces in (("reduce", True), ("keep", False)):
        calls = calls_of(BACKWARD, in_order(BACKWARD), reduces=reduces)
        assert [call for call in calls if call.startswith(("reduce", "keep"))] == [f"{name} 2", f"{name} 0"]


@pytest.mark.parametrize("visits", [FORWARD, BACKWARD, TIED], ids=["forward", "backward", "tied"])
def test_whatever_computes_the_calls_are_the_same(visits: list[Visit]):
    """Nothing, the first layer alone, the last alone, or layers whose input asks for no gradient and so never leave."""
    expected = calls_of(visits, in_order(visits))
    for asked in ([], [visits[0].layer], [visits[-1].layer], [visit.layer for visit in visits]):
        assert calls_of(visits, lambda through, asked=asked: [through.enter(layer) for layer in asked]) == expected  # type: ignore[misc, func-returns-value]


def test_a_layer_where_the_pass_does_not_stop_is_nothing_to_it():
    weights_only = [Visit(2, (), (2,)), Visit(0, (), (0,))]

    def act(through: LayerPass) -> None:
        for layer in (2, 1, 0):
            through.enter(layer)

    assert calls_of(weights_only, act) == ["reduce 2", "reduce 0"]


def test_an_empty_pass_calls_nothing():
    assert calls_of([], lambda through: None) == []
