"""What context parallelism changes in the costs of a step, and how items are dealt whole to context parallel ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from multimodal.cost.cluster import collective_seconds
from multimodal.cost.model_costs import ModelCosts
from multimodal.cost.run_options import RunOptions
from multimodal.cost.step_memory import default_zero_stage, layer_static_bytes
from multimodal.cost.token_shares import CUT, TOLERANCE, ItemDealer, RankLoad, WholeItemShares, deal_items
from multimodal.cost.unit_load import UnitLoad, add_loads, item_loads
from multimodal.plan.plans_of_sizes import UnitSizes, build_unit_plan
from multimodal.values.action import Action, ActionKind, Place
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from tests.unit.cost.cost_cases import cluster_of, graph_of, layer_activation_bytes, transfer
from tests.unit.golden_answers import Kinds, golden_test

CLUSTER, GRAPH = cluster_of(gpus_per_node=16), graph_of(activation="gelu")
LENGTHS = [SampleLengths(sample, (ItemLengths("vision", 4000, 1000),), 2000, 1500) for sample in range(2)]
ASSIGNMENT = Assignment({"vision": (((Atom(0, 0),), (Atom(1, 0),)),), "llm": (((Atom(0),), (Atom(1),)),)})
NUM_TOKENS = 3000
LAYER_WEIGHTS = 12 * 64 * 64


def costs_of(*, vision: UnitSizes | None = None, **sizes: int) -> ModelCosts:
    """The LLM on the ranks from 0, two stages unless said otherwise, and the encoder behind it."""
    llm = UnitSizes(**{"pipeline_parallel_size": 2, "data_parallel_size": 1, **sizes})
    units = {"vision": (vision or UnitSizes(data_parallel_size=1), llm.num_ranks), "llm": (llm, 0)}
    plan = Plan({name: build_unit_plan(GRAPH.unit(name), sizes=size, first_rank=first) for name, (size, first) in units.items()})
    return ModelCosts(ASSIGNMENT.shape(GRAPH, plan), ASSIGNMENT, LENGTHS, CLUSTER, vocab_size=512)


ALONE, SPREAD = costs_of(), costs_of(context_parallel_size=4)


def test_rows_change_hands_where_units_on_the_same_ranks_spread_tokens():
    costs = costs_of(pipeline_parallel_size=1, context_parallel_size=4)
    vision = build_unit_plan(GRAPH.unit("vision"), sizes=UnitSizes(1, 1, 4, 1), first_rank=0)
    plan = Plan({**costs.shape.plan.units, "vision": vision})
    send = Action(ActionKind.SEND_FORWARD, "vision", 0, 0, 0, Place("llm", 0, 0, 0))
    shape = ASSIGNMENT.shape(GRAPH, plan)
    cost = transfer(replace(costs, shape=shape), send, shape=shape)
    assert cost.latency_seconds == pytest.approx(2e-6)
    assert cost.occupied_seconds == pytest.approx(1000 * 64 * 2 / 4 * 3 / 4 / 100e9), "of a quarter, a quarter stays"


def test_gradients_are_reduced_over_context_parallel_ranks_and_optimizer_state_is_shared_by_them():
    reduce = Action(ActionKind.REDUCE_GRADIENTS, "llm", 0, 0)
    assert ALONE.collective_seconds(reduce) == 0.0
    num_weights = LAYER_WEIGHTS + 512 * 64
    assert SPREAD.collective_seconds(reduce) == pytest.approx(
        collective_seconds(4 * num_weights, ranks=range(4), cluster=CLUSTER)
    )
    gathered = 4 * 2 * 16 * NUM_TOKENS * 2
    lane = SPREAD.shape.plan.lane_of_rank[0]
    assert SPREAD.static_bytes(lane) - SPREAD.memory.broker_bytes(0) == num_weights * (2 + 4 + 12 / 4) + gathered


def layer_bytes(**options) -> float:
    load = UnitLoad(NUM_TOKENS, NUM_TOKENS**2, 0)
    return layer_activation_bytes(GRAPH, "llm", "transformer", load, need=BackwardNeed.FULL, vocab_size=512, **options)


def test_activations_and_messages_are_divided():
    place = Place("llm", 0, 1, 0)
    kept = layer_bytes()
    head = ALONE.memory.activation_bytes(place) - kept
    assert head > 0 and SPREAD.memory.activation_bytes(place) == pytest.approx((layer_bytes(is_spread=True) + head) / 4)
    first = Place("llm", 0, 0, 0)
    output = 2 * NUM_TOKENS * 64
    alone = ALONE.memory.activation_bytes(first)
    assert SPREAD.memory.activation_bytes(first) == pytest.approx((alone + output) / 4), "encoders' rows, too"
    spread = costs_of(context_parallel_size=4, vision=UnitSizes(1, 1, 2, 1))
    assert spread.memory.broker_bytes(8) == pytest.approx(SPREAD.memory.broker_bytes(8) / 2), "gradients of what an encoder gave"


def test_float64_shares_nothing_and_is_wide_throughout():
    assert [default_zero_stage(size) for size in (2, 4, 8)] == [1, 1, 0]
    assert layer_static_bytes(100, is_trained=True, data_parallel_size=2, zero_stage=0, bytes_per_element=8) == 100 * 32
    double = replace(SPREAD, cluster=replace(CLUSTER, dtype="float64"), options=RunOptions(zero_stage=0))
    reduce = Action(ActionKind.REDUCE_GRADIENTS, "llm", 0, 0)
    assert double.collective_seconds(reduce) == 2 * SPREAD.collective_seconds(reduce)


ITEMS = [4096, 512, 512, 512, 512]
SAMPLES = [SampleLengths(0, tuple(ItemLengths("vision", length, length // 4) for length in ITEMS), 100, 50)]
SHORT, MIXED, LONG = ((Atom(0, 1), Atom(0, 2)), (Atom(0, 3), Atom(0, 0), Atom(0, 4)), (Atom(0, 0),))


def encoder_costs(*microbatches: tuple[Atom, ...], cp: int, **options) -> ModelCosts:
    """Costs of an encoder alone on its ranks, which is trained, as is the LLM behind it."""
    costs = costs_of(vision=UnitSizes(1, 1, cp, 1), pipeline_parallel_size=1)
    assignment = Assignment({"vision": (microbatches,), "llm": (((Atom(0),),),)})
    shape = assignment.shape(GRAPH, costs.shape.plan)
    return replace(costs, shape=shape, assignment=assignment, lengths=SAMPLES, options=RunOptions(**options))


def test_a_microbatch_of_whole_items_takes_as_long_as_one_rank_s_items_and_waits_for_nothing():
    one, two = encoder_costs((Atom(0, 1),), cp=1), encoder_costs(SHORT, cp=2)
    for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT, ActionKind.BACKWARD):
        action = Action(kind, "vision", 0, 0, 0)
        assert two.compute(action)[:2] == pytest.approx(one.compute(action)[:2])
        assert two.compute(action).tensor_parallel_seconds == 0.0
    place = Place("vision", 0, 0, 0)
    assert two.memory.activation_bytes(place) == one.memory.activation_bytes(place)
    lane = two.shape.plan.lane_of_rank[1]
    gathered = encoder_costs(SHORT, cp=2, item_block_size=None).static_bytes(lane) - two.static_bytes(lane)
    assert gathered == 4 * 2 * 16 * 1024 * 2


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_a_microbatch_of_one_item_takes_as_long_as_one_whose_tokens_are_spread(recompute):
    cut, spread = (encoder_costs(LONG, cp=2, recompute=recompute, item_block_size=size) for size in (128, None))
    for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT, ActionKind.BACKWARD):
        action = Action(kind, "vision", 0, 0, 0)
        assert cut.compute(action)[:2] == pytest.approx(spread.compute(action)[:2])
    assert cut.static_bytes(0) == spread.static_bytes(0)
    assert cut.memory.activation_bytes(Place("vision", 0, 0, 0)) == spread.memory.activation_bytes(Place("vision", 0, 0, 0))


def test_a_mixed_microbatch_waits_for_the_keys_of_what_is_cut():
    mixed = encoder_costs(MIXED, cp=2)
    whole, cut = (encoder_costs(MIXED, cp=2, item_block_size=size).loads.computed("vision")[0] for size in (None, 128))
    assert whole.cut is None and cut.cut is not None
    assert cut.all.num_squared == pytest.approx(whole.all.num_squared, rel=0.1), "attention is most of the work here"
    assert 4096 <= cut.cut.num_gathered < 5120 and cut.cut.attending.num_squared == 4096 * cut.cut.attending.num_tokens
    waits = mixed.compute(Action(ActionKind.FORWARD, "vision", 0, 0, 0)).tensor_parallel_seconds
    heads = collective_seconds(4 * cut.cut.num_gathered * 2 * 16 * 2, ranks=range(2), cluster=CLUSTER)
    assert waits == pytest.approx(2 * heads), "in two layers"


def test_a_replica_s_ranks_are_as_slow_as_the_one_with_the_most():
    """Three equal items of a block for two ranks: nothing can be cut."""
    items = tuple(ItemLengths("vision", 128, 32) for _ in range(3))
    costs = encoder_costs(tuple(Atom(0, index) for index in range(3)), cp=2)
    found = replace(costs, lengths=[SampleLengths(0, items, 100, 50)]).loads
    assert found.computed("vision")[0].all == UnitLoad(4 * 128, 4 * 128**2, 4 * 32, 2)
    assert found.fullest("vision")[0].whole == found.computed("vision")[0].all


BLOCK = 8
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
ITEM_GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", "image": {"merge_size": 2}, **SHAPE},
            "llm": {"role": "backbone", **SHAPE},
            "painter": {"role": "generator", "image": {"merge_size": 1}, **SHAPE},
        }
    }
)


def item_costs_of(lengths: Sequence[int]) -> list[int]:
    return [50 * length + length * length for length in lengths]


def share(lengths: Sequence[int], *, num_ranks: int) -> WholeItemShares:
    return deal_items(lengths, costs=item_costs_of(lengths), num_ranks=num_ranks, block_size=BLOCK)


def work_of_ranks(lengths: Sequence[int], shares: WholeItemShares, *, num_ranks: int) -> NDArray[np.float64]:
    """Every token once, at its item's cost per token."""
    work, per_token = np.zeros(num_ranks), []
    for length, cost, owner in zip(lengths, item_costs_of(lengths), shares.owners.tolist(), strict=True):
        if owner == CUT:
            per_token += [cost / length] * length
        else:
            work[owner] += cost
    np.add.at(work, np.repeat(shares.cut.owners, BLOCK)[: len(per_token)], per_token)
    return work


def owners_of(document: dict[str, Any]) -> str:
    """Return the ranks of items, -1 where an item is cut, and those of blocks of the cut ones."""
    shares = share(document["lengths"], num_ranks=document["ranks"])
    return f"items {shares.owners.tolist()}, blocks {shares.cut.owners.tolist()}"


DEALT: Kinds = {"items": ({"lengths": [30, 30], "ranks": 2}, owners_of)}
test_items_are_dealt_as_written = golden_test("dealt_items.txt", DEALT)


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30), num_ranks=st.integers(1, 6))
def test_every_token_has_one_rank_and_none_has_too_much(lengths: list[int], num_ranks: int) -> None:
    shares = share(lengths, num_ranks=num_ranks)
    num_cut = sum(length for length, owner in zip(lengths, shares.owners, strict=True) if owner == CUT)
    assert len(shares.cut.owners) == -(-num_cut // BLOCK)
    assert np.isin(shares.owners, (CUT, *range(num_ranks))).all() and np.isin(shares.cut.owners, range(num_ranks)).all()
    work = work_of_ranks(lengths, shares, num_ranks=num_ranks)
    assert work.sum() == pytest.approx(sum(item_costs_of(lengths)))
    costs_and_lengths = list(zip(item_costs_of(lengths), lengths, strict=True))
    even, of_block = work.sum() / num_ranks, BLOCK * max(cost / length for cost, length in costs_and_lengths)
    of_short = sum(cost for cost, length in costs_and_lengths if length <= BLOCK)
    assert work.max() <= max((1 + TOLERANCE) * even, even + of_block, of_short) + 1e-6


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30), num_ranks=st.integers(2, 6))
def test_nothing_is_cut_where_whole_items_are_near_to_even_shares(lengths: list[int], num_ranks: int) -> None:
    costs = sorted(item_costs_of(lengths), reverse=True)
    whole = np.zeros(num_ranks)
    for cost in costs:
        whole[whole.argmin()] += cost
    shares = share(lengths, num_ranks=num_ranks)
    is_near = whole.max() <= (1 + TOLERANCE) * whole.mean()
    assert not (is_near and (shares.owners == CUT).any())
    longer = [
        length for length, cost in zip(lengths, item_costs_of(lengths), strict=True) if cost > (1 + TOLERANCE) * whole.mean()
    ]
    cut = [length for length, owner in zip(lengths, shares.owners, strict=True) if owner == CUT]
    assert all(length in cut for length in longer if length > BLOCK)


@pytest.mark.parametrize(("unit", "outputs"), [("vision", (10, 50, 10)), ("painter", (40, 200, 40))])
def test_loads_of_ranks_add_up_to_the_microbatch(unit: str, outputs: tuple[int, ...]) -> None:
    items = [ItemLengths(unit, length, length // 4 if unit == "vision" else 0) for length in (40, 200, 40)]
    dealer = ItemDealer(ITEM_GRAPH, unit, 2, BLOCK)
    loads = item_loads(ITEM_GRAPH.unit(unit), items)
    assert loads == [UnitLoad(item.num_tokens, item.num_tokens**2, out, 1) for item, out in zip(items, outputs, strict=True)]
    ranks = dealer.rank_loads(items)
    total = add_loads(part for rank in ranks for part in rank)
    assert total[:2] == add_loads(loads)[:2] and total.num_outputs == sum(outputs)
    assert ranks[0] == RankLoad(UnitLoad(), UnitLoad(*ranks[0].cut))
    assert ranks[1].whole == add_loads(loads[::2]) and ranks[1].cut.num_squared == 200 * ranks[1].cut.num_tokens
    assert dealer.work(ranks[0]) == pytest.approx(dealer.work(ranks[1]), rel=0.1)
