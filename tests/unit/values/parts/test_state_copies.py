"""Which ranks share a copy of the optimizer state."""

from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.parts.state_copies import (
    EVERY_REPLICA,
    replicas_of_copies,
    sharers_of_stage,
    sharing_groups,
    state_sharers,
)
from multimodal.values.plan import Replica, Stage, UnitPlan

TIED = ModelGraph((Unit("llm", Role.BACKBONE, Transformer(3, 8, 2, 16), untie_embeddings_and_output_weights=False),), ())
"""Five layers: the embeddings and the head beside three."""


def whole(*ranks: int) -> Replica:
    return Replica((Stage(ranks, ((0, 5),), len(ranks)),))


def cut(first: int, second: int) -> Replica:
    return Replica((Stage((first,), ((0, 2),)), Stage((second,), ((2, 5),))))


def test_replicas_are_dealt_to_copies_evenly() -> None:
    unit = UnitPlan(tuple(whole(rank) for rank in range(7)))
    assert replicas_of_copies(unit, 1) == [range(7)]
    assert replicas_of_copies(unit, 3) == [range(2), range(2, 4), range(4, 7)]
    assert replicas_of_copies(unit, EVERY_REPLICA) == [range(rank, rank + 1) for rank in range(7)]


def test_those_share_that_hold_the_same_of_a_layer() -> None:
    unit = UnitPlan((whole(0), cut(1, 2), whole(3, 4), whole(5, 6)))
    assert state_sharers(unit, 1, replicas=range(4), tensor_size=1) == ((0, 1),)
    assert state_sharers(unit, 2, replicas=range(4), tensor_size=1) == ((0, 2),)
    assert state_sharers(unit, 2, replicas=range(4), tensor_size=2) == ((3, 5), (4, 6))
    assert state_sharers(unit, 2, replicas=range(2), tensor_size=2) == ()
    assert list(sharers_of_stage(unit, 0, 0, num_copies=1)) == [(range(2), (0, 1)), (range(2, 5), (0, 2))]
    assert list(sharers_of_stage(unit, 3, 0, num_copies=2)) == [(range(2), (3, 5)), (range(2, 5), (3, 5))]
    assert list(sharers_of_stage(unit, 1, 1, num_copies=EVERY_REPLICA)) == [(range(2, 5), (2,))]


def test_copies_of_tied_embeddings_are_shared_by_last_stages_that_have_them() -> None:
    unit = UnitPlan((whole(0), cut(1, 2), cut(3, 4)))
    assert set(sharing_groups(TIED, "llm", unit, num_copies=1)) == {(0, 1, 3), (0, 2, 4), (2, 4)}
    assert set(sharing_groups(TIED, "llm", unit, num_copies=EVERY_REPLICA)) == {(0,), (1,), (2,), (3,), (4,)}


def test_context_parallel_ranks_share_too() -> None:
    unit = UnitPlan((Replica((Stage((0, 1, 2, 3), ((0, 5),)),)),), tensor_parallel_size=2, context_parallel_size=2)
    assert state_sharers(unit, 0, replicas=range(1), tensor_size=2) == ((0, 2), (1, 3))
