"""A model of two encoders and plans for it, as balancers see them."""

import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8}


@pytest.fixture(scope="session")
def graph():
    roles = {"vision": "encoder", "audio": "encoder", "llm": "backbone"}
    return ModelGraph.from_dict({"units": {name: {"role": role, **SHAPE} for name, role in roles.items()}})


@pytest.fixture(scope="session")
def build_plan():
    def build(**data_parallel_sizes):
        units, rank = {}, 0
        for name, size in data_parallel_sizes.items():
            units[name] = UnitPlan(tuple(Replica((Stage((rank + index,), ((0, 3),)),)) for index in range(size)))
            rank += size
        return Plan(units)

    return build


@pytest.fixture(scope="session")
def build_sample():
    def build(sample_id, num_text_tokens, *items):
        lengths = tuple(ItemLengths(unit, num_tokens, -(-num_tokens // 4)) for unit, num_tokens in items)
        return SampleLengths(sample_id, lengths, num_text_tokens, num_text_tokens)

    return build


@pytest.fixture(scope="session")
def place(graph, build_plan):
    """Return a function that balances samples over replicas of one rank each: one per unit if not said otherwise."""

    def placed(name, lengths, *, vision=1, audio=1, llm=1, **options):
        plan = build_plan(vision=vision, audio=audio, llm=llm)
        return BALANCERS[name](lengths, graph=graph, plan=plan, options=BalanceOptions(**options))

    return placed
