"""Decisions of the kernels on random batches, held against those of an earlier build: their searches have no reference."""

from functools import partial
from hashlib import sha256
from random import Random

import numpy as np
import pytest

from multimodal.balance.algorithms.entrain_assignment import assign_entrain
from multimodal.balance.algorithms.post_balance import post_balance
from multimodal.balance.length_cost import CostForm, LengthCost
from multimodal.balance.rearrange_nodes import rearrange_nodes
from multimodal.kernels import kernels


def lengths_of(draw: Random) -> list[int]:
    """Long-tailed lengths of up to 400 items."""
    return [1 + int(50 / (1.001 - draw.random())) for _ in range(1 + int(draw.random() * 400 * draw.random()))]


def post_balanced(draw: Random, form: CostForm) -> object:
    return post_balance(lengths_of(draw), num_bins=2 + int(30 * draw.random()), cost=LengthCost(form, 0.01)).tolist()


def assigned(draw: Random) -> object:
    llm = lengths_of(draw)
    encoders = [[length * (draw.random() < 0.7) for length in llm] for _ in range(int(3 * draw.random()))]
    loads = np.array(encoders).reshape(-1, len(llm))
    return assign_entrain(llm, encoder_loads=loads, num_replicas=min(len(llm), 12), num_microbatches=4)


def rearranged(draw: Random) -> object:
    volume = [[int(30 * draw.random()) for _ in range(24)] for _ in range(24)]
    return rearrange_nodes(volume, ranks_per_node=4).permutation.tolist()


DIGESTS = {
    "linear": (partial(post_balanced, form=CostForm.LINEAR), "2e226fad04f742f0"),
    "linear+quadratic": (partial(post_balanced, form=CostForm.LINEAR_QUADRATIC), "e41c14e1365ebfb1"),
    "padded": (partial(post_balanced, form=CostForm.PADDED), "503b35ef2a56c507"),
    "padded-attention": (partial(post_balanced, form=CostForm.PADDED_ATTENTION), "d56882e6c2cdb841"),
    "entrain": (assigned, "8332773769c6f55a"),
    "nodes": (rearranged, "92533259b4140324"),
}


@pytest.mark.skipif(kernels is None, reason="without kernels nothing is searched")
@pytest.mark.parametrize("name", DIGESTS)
def test_kernels_decide_as_before(name: str) -> None:
    decide, digest = DIGESTS[name]
    draw = Random(0)
    assert sha256(repr([decide(draw) for _ in range(60)]).encode()).hexdigest()[:16] == digest
