"""Runs on GPUs do not go on slowly in silence."""

import pytest
import torch

from megatron.runtime.training import run
from multimodal.values.errors import ConfigError


@pytest.mark.parametrize(("has_gpus", "is_allowed"), [(False, False), (True, True), (True, False)])
def test_on_gpus_python_references_must_be_allowed(monkeypatch: pytest.MonkeyPatch, has_gpus: bool, is_allowed: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    run.check_kernels(is_allowed=is_allowed)
    monkeypatch.setattr(run, "kernels", None)
    if is_allowed or not has_gpus:
        run.check_kernels(is_allowed=is_allowed)
        return
    with pytest.raises(ConfigError, match="without --allow-python-kernels GPUs do not wait for decisions by"):
        run.check_kernels(is_allowed=False)
