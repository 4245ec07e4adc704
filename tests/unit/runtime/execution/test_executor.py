from types import SimpleNamespace
from typing import Any

import pytest

from megatron.runtime.execution.executor import Executor
from multimodal.values.errors import ConfigError
from multimodal.values.schedule import Place
from multimodal.values.schedule_form import PLAIN, ScheduleForm

SPLIT = ScheduleForm(split=frozenset({Place("llm", 0, 0, 0)}))


def check(form: ScheduleForm, implementation: str) -> None:
    options = SimpleNamespace(transformer_impl=implementation)
    executor: Any = SimpleNamespace(stages={("llm", 0): SimpleNamespace(options=options)})
    step: Any = SimpleNamespace(form=form)
    Executor._check_implementation(executor, step)


def test_transformer_engine_cannot_split_backwards() -> None:
    with pytest.raises(ConfigError, match=r"splits backwards .* use --transformer-impl local, or a --schedule with whole"):
        check(SPLIT, "transformer_engine")


@pytest.mark.parametrize(("form", "implementation"), [(PLAIN, "transformer_engine"), (SPLIT, "local")])
def test_everything_else_runs(form: ScheduleForm, implementation: str) -> None:
    check(form, implementation)
