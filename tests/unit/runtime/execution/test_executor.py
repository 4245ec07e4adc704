from types import SimpleNamespace
from typing import Any

import pytest

from megatron.runtime.execution.executor import Executor
from multimodal.values.action import Place
from multimodal.values.errors import ConfigError
from multimodal.values.step_graph import UNCUT, Cuts

SPLIT = Cuts(split=frozenset({Place("llm", 0, 0, 0)}))


def check(cuts: Cuts, implementation: str) -> None:
    options = SimpleNamespace(transformer_impl=implementation)
    executor: Any = SimpleNamespace(stages={("llm", 0): SimpleNamespace(options=options)})
    step: Any = SimpleNamespace(cuts=cuts, schedule=SimpleNamespace(has_inside=False))
    Executor._check_implementation(executor, step)


def test_transformer_engine_cannot_split_backwards() -> None:
    with pytest.raises(ConfigError, match=r"splits backwards .* use --transformer-impl local, or a --schedule with whole"):
        check(SPLIT, "transformer_engine")


@pytest.mark.parametrize(("cuts", "implementation"), [(UNCUT, "transformer_engine"), (SPLIT, "local")])
def test_everything_else_runs(cuts: Cuts, implementation: str) -> None:
    check(cuts, implementation)
