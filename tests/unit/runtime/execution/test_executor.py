from types import SimpleNamespace
from typing import Any

import pytest

from megatron.runtime.execution.executor import Executor
from multimodal.values.action import Place
from multimodal.values.errors import ConfigError
from multimodal.values.parts.cuts import UNCUT, Cuts

SPLIT = Cuts(split=frozenset({Place("llm", 0, 0, 0)}))


def check(cuts: Cuts, implementation: str, *, has_inside: bool = False, num_parts: int = 1, is_sharded: bool = False) -> None:
    options = SimpleNamespace(transformer_impl=implementation, num_overlapped_parts=num_parts, delays_weight_gradients=False)
    stages = {("llm", 0): SimpleNamespace(options=options)}
    executor: Any = SimpleNamespace(stages=stages, sharded=stages if is_sharded else {})
    step: Any = SimpleNamespace(cuts=cuts, schedule=SimpleNamespace(has_inside=has_inside))
    Executor._check_implementation(executor, step)


def test_transformer_engine_without_delayed_weight_gradients_cannot_split_backwards() -> None:
    with pytest.raises(ConfigError, match=r"splits backwards .* use --transformer-impl local, or a --schedule with whole"):
        check(SPLIT, "transformer_engine")


def test_overlapped_collectives_leave_no_waits() -> None:
    with pytest.raises(ConfigError, match=r"--tp-comm-overlap leaves no such waits: it cuts .*; leave out one of the two"):
        check(UNCUT, "local", has_inside=True, num_parts=4)


def test_sharded_weights_are_gathered_in_one_order() -> None:
    with pytest.raises(ConfigError, match=r"must all gather them in one order; leave out --data-parallel-sharding-strategy"):
        check(UNCUT, "local", has_inside=True, is_sharded=True)


@pytest.mark.parametrize(
    ("cuts", "implementation", "options"),
    [
        (UNCUT, "transformer_engine", {}),
        (SPLIT, "local", {}),
        (UNCUT, "local", {"has_inside": True}),
        (UNCUT, "local", {"num_parts": 4, "is_sharded": True}),
    ],
)
def test_everything_else_runs(cuts: Cuts, implementation: str, options: dict[str, Any]) -> None:
    check(cuts, implementation, **options)
