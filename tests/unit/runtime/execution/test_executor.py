from contextlib import nullcontext
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


@pytest.mark.parametrize(
    ("cuts", "implementation", "options", "problem"),
    [
        (SPLIT, "transformer_engine", {}, "splits backwards .* use --transformer-impl local, or a --schedule with whole"),
        (
            UNCUT,
            "local",
            {"has_inside": True, "num_parts": 4},
            "--tp-comm-overlap leaves no such waits: it cuts .*; leave out one of the two",
        ),
        (
            UNCUT,
            "local",
            {"has_inside": True, "is_sharded": True},
            "must all gather them in one order; leave out --data-parallel-sharding-strategy",
        ),
        (UNCUT, "transformer_engine", {}, ""),
        (SPLIT, "local", {}, ""),
        (UNCUT, "local", {"has_inside": True}, ""),
        (UNCUT, "local", {"num_parts": 4, "is_sharded": True}, ""),
    ],
)
def test_what_layers_cannot_run_is_refused(cuts: Cuts, implementation: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check(cuts, implementation, **options)
