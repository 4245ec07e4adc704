"""Runs on GPUs do not go on slowly in silence."""

import pytest
import torch

from megatron.runtime.training import run
from multimodal.values.errors import ConfigError


@pytest.mark.parametrize(("has_gpus", "is_allowed"), [(False, False), (True, True)])
def test_python_references_decide_where_they_may(monkeypatch: pytest.MonkeyPatch, has_gpus: bool, is_allowed: bool) -> None:
    monkeypatch.setattr(run, "kernels", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    run.check_kernels(is_allowed=is_allowed)


def test_on_gpus_they_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run.check_kernels(is_allowed=False)
    monkeypatch.setattr(run, "kernels", None)
    with pytest.raises(ConfigError, match="without --allow-python-kernels GPUs do not wait for decisions by"):
        run.check_kernels(is_allowed=False)
