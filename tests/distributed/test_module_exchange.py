"""Balance in loops that are not Braid's: examples train as they do unbalanced, rows arrive where they belong, errors say why."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples.balance import megatron_mimo, torch_ddp  # before ranks are forked: each would import it by itself
from multimodal.balance.exchange.module_exchange import DrawnItems, plan_exchange
from multimodal.balance.length_cost import LengthCost
from multimodal.values.errors import AssignmentError
from tests.distributed.rank_pool import RankPool

EXAMPLES: dict[str, Any] = {"torch_ddp": torch_ddp, "megatron_mimo": megatron_mimo}
WORLD = 4


def train_example(name: str, variant: object) -> tuple[list[float], dict[str, np.ndarray], list[float]]:
    example = EXAMPLES[name]
    if example is megatron_mimo:
        megatron_mimo.prepare()
    losses, gradients, shares, _ = example.train(variant, dtype=torch.float64)
    return losses, {key: gradient.numpy() for key, gradient in gradients.items()}, shares


@pytest.mark.deep(when=lambda example: example == "megatron_mimo")
@pytest.mark.parametrize(
    ("example", "as_drawn", "variants"), [("torch_ddp", (), [("vision",), ("vision", "llm")]), ("megatron_mimo", False, [True])]
)
def test_examples_train_as_unbalanced(ranks: RankPool, example: str, as_drawn: object, variants: list[object]) -> None:
    expected = ranks.run(train_example, example, as_drawn, world_size=WORLD)
    for variant in variants:
        found = ranks.run(train_example, example, variant, world_size=WORLD)
        for (losses, gradients, shares), (expected_losses, expected_gradients, unbalanced) in zip(found, expected, strict=True):
            assert losses == pytest.approx(expected_losses, rel=0, abs=1e-9)
            assert sum(shares) < 0.75 * sum(unbalanced)
            assert gradients.keys() == expected_gradients.keys()
            for name, gradient in expected_gradients.items():
                np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-9, err_msg=name)
                assert np.abs(gradient).max() > 1e-6, f"{name} has no gradient to compare"


def follow_rows(seed: int) -> int:
    """Send tagged rows along audio -> adapter -> llm and back, and check where they arrive; returns the items that moved."""
    random = np.random.default_rng((seed, dist.get_rank()))
    names = ["audio", "adapter", "llm"]
    sizes = {name: random.integers(6, size=random.integers(name != "audio", 8)) for name in names}
    takers = {name: random.integers(len(sizes[taker]), size=len(sizes[name])) for name, taker in pairwise(names)}
    drawn = {
        name: DrawnItems(
            lengths=lengths,
            rows={"outputs": lengths // 2},
            consumer=dict(pairwise(names)).get(name),
            consumed_by=takers.get(name, ()),
            cost=LengthCost.from_text("linear+quadratic:0.5"),
        )
        for name, lengths in sizes.items()
    }
    plans = plan_exchange(drawn, group=dist.group.WORLD, ranks_per_node=2)

    def tags(name: str, counts: np.ndarray) -> Tensor:
        """[num_rows, 4]: rank, the consumer's item, item and row of everything drawn here."""
        items = zip(takers.get(name, [0] * len(counts)), counts, strict=True)
        told = [(dist.get_rank(), taker, item, row) for item, (taker, count) in enumerate(items) for row in range(count)]
        return torch.tensor(told, dtype=torch.float64).view(-1, 4)

    moved, here = 0, {}
    for name, plan in plans.items():
        here[name] = plan.send_inputs(
            torch.tensor([(dist.get_rank(), item) for item in range(len(sizes[name]))]).view(-1, 2), "items"
        )
    here = {name: [tuple(item) for item in pending.wait().tolist()] for name, pending in here.items()}
    for name, plan in plans.items():
        moved += sum(rank != dist.get_rank() for rank, _ in here[name])
        rows = [
            (rank, item, row) for (rank, item), count in zip(here[name], plan.rows_here(), strict=True) for row in range(count)
        ]
        arrived = plan.send_inputs(tags(name, sizes[name])).wait()
        assert [(rank, item, row) for rank, _, item, row in arrived.tolist()] == rows, "in the order of the items"
        own = tags(name, sizes[name] // 2)
        outputs = plan.send_outputs(plan.send_inputs(own, "outputs").wait(), "outputs")
        outputs.pow(2).sum().backward()  # through an exchange on every rank, also where nothing arrived
        if name in takers:
            keys = [tuple(key) for key in outputs.tolist()]
            places = [(here[drawn[name].consumer].index(key[:2]), *key[2:]) for key in keys]
            assert places == sorted(places), "where the consumer's items are, in their order"
        else:
            assert torch.equal(outputs, own), "back, as drawn"
        before, after = plan.costs
        assert sum(before) == pytest.approx(sum(after)) and max(after) <= max(before)
    return moved


def test_rows_go_along_a_chain_of_modules(ranks: RankPool) -> None:
    assert sum(sum(ranks.run(follow_rows, seed, world_size=WORLD)) for seed in range(4)) > 20


def refusal(case: str) -> str:
    is_first, lengths = dist.get_rank() == 0, [4, 2]
    wrong = {
        "modules": {"vision" if is_first else "audio": DrawnItems(lengths=lengths)},
        "rows": {"vision": DrawnItems(lengths=lengths, rows={"features": [1] if is_first else [1, 1]})},
        "names": {"vision": DrawnItems(lengths=lengths, rows={"a" if is_first else "b": [1, 1]})},
        "counts": {"vision": DrawnItems(lengths=[4, 2][: 1 if is_first else 2])},
        "negative": {"vision": DrawnItems(lengths=[4, -2])},
        "consumer": {"vision": DrawnItems(lengths=lengths, consumer="llm", consumed_by=[0, 0])},
        "index": {"vision": DrawnItems(lengths=lengths, consumer="llm", consumed_by=[0, 2]), "llm": DrawnItems(lengths=lengths)},
    }
    try:
        drawn = wrong.get(case, {"vision": DrawnItems(lengths=lengths)})
        plan = plan_exchange(drawn, group=dist.group.WORLD, keeps_counts=case == "counts")["vision"]
        plan.send_inputs(torch.zeros(5, 1), "features" if case == "unknown" else "lengths")
    except AssignmentError as problem:
        return str(problem)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "modules",
            "rank 1 of the group: modules are ['audio'], but ['vision'] on the first rank; name all modules on all ranks",
        ),
        ("rows", "module 'vision' has rows of unlike numbers of items"),
        ("names", "rank 1 of the group: module 'vision' has another consumer, cost or names of rows"),
        ("counts", "keeps_counts=True, but rank 1 of the group drew {'vision': 2} items, and rank 0 {'vision': 1}"),
        ("negative", "has an item with a negative number of rows"),
        ("consumer", "the consumer 'llm' of module 'vision' is not listed; list it"),
        ("index", "give each item the index of one of the 2 items of 'llm' on this rank"),
        ("unknown", "module 'vision' has no rows 'features'; give DrawnItems(rows=...)"),
        ("size", "a tensor has 5 rows, but the 'lengths' of its items on rank 0 add up to 6"),
    ],
)
def test_wrong_uses_are_refused_on_every_rank(ranks: RankPool, case: str, message: str) -> None:
    found = ranks.run(refusal, case, world_size=2)
    assert message in found[0] and "nothing" not in found
