"""A rank that certainly has too little memory is told so, with the flags that help, before anything is built."""

import pytest

from megatron.runtime.flags.arguments import build_plan
from megatron.runtime.orchestrator import machine
from megatron.runtime.training import memory_check
from megatron.runtime.training.memory_check import LeastMemory, check_memory, estimate
from multimodal.cost.layers.registry import describe_layer
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from tests.unit.runtime.training.conftest import open_example


def estimates(example: str, line: str, *, num_ranks: int) -> tuple[ModelGraph, list[LeastMemory]]:
    """Estimate every rank of an example."""
    config, inputs = open_example(line, example=example, num_ranks=num_ranks)
    plan = build_plan(config, inputs.graph, num_ranks)
    return inputs.graph, [estimate(config, inputs, plan, rank=rank, num_copies=None) for rank in range(num_ranks)]


@pytest.mark.parametrize("example", ["digits", "digits_generator"])
@pytest.mark.parametrize("more", ["", "--lengths-from decode"])
def test_an_example_needs_its_weights_and_little_more(example: str, more: str) -> None:
    graph, needed = estimates(example, f"--dtype float32 {more}", num_ranks=4)
    num_weights = sum(
        describe_layer(graph, unit, kind, vocab_size=384).num_held_weights for unit in graph.units for kind in unit.layers
    )
    least = num_weights * (4 + 4 + 8)  # weights, gradients and two moments, each on one rank at least
    assert least <= sum(each.state_bytes for each in needed) < 3 * least
    assert all(each.total_bytes < 1e9 for each in needed)
    assert more or all(each.activation_bytes > 0.05 * each.state_bytes for each in needed)


@pytest.mark.parametrize(
    ("line", "free", "says"),
    [
        ("", 1e6, "raise the parallel sizes (such as --llm-tensor-model-parallel-size"),
        ("--micro-batch-size 32 --vision-dp 1 --llm-pp 3", 1e7, "add --recompute-granularity full, or lower --micro-batch-size"),
        ("--vision-dp 1 --llm-pp 1", 1e6, "add --data-parallel-sharding-strategy optim_grads_params"),
    ],
)
def test_a_rank_without_memory_is_refused(line: str, free: float, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, inputs = open_example(line, num_ranks=4)
    plan = build_plan(config, inputs.graph, 4)
    check_memory(config, inputs, plan, rank=3, num_copies=None)
    monkeypatch.setattr(memory_check, "free_memory_bytes", lambda: free)
    with pytest.raises(ConfigError, match=r"rank 3 needs at least .* GB are free; .*--allow-low-memory") as problem:
        check_memory(config, inputs, plan, rank=3, num_copies=None)
    assert says in str(problem.value)


def test_ranks_of_a_node_share_what_it_has_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_node_bytes", lambda: 8_000)
    found = []
    for num_ranks in (1, 4):
        monkeypatch.setattr(machine, "ranks_on_node", lambda count=num_ranks: count)
        found.append(machine.free_memory_bytes())
    assert found == [8_000, 2_000]
