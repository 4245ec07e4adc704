"""The end of torchrun's own report when a rank fails."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.runtime.launch.failure import report, tell_launcher
from multimodal.values.errors import ConfigError


def test_torchrun_ends_with_the_message_of_the_rank_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        if rank == 1:
            report(ConfigError("--lr is missing"), rank)
        else:
            tell_launcher("ended because another rank failed", seconds_later=1)
    failures = {rank: ProcessFailure(rank, 7, 2, str(tmp_path / f"{rank}.json")) for rank in (0, 1)}
    before, _, behind = str(ChildFailedError("pretrain_mllm.py", failures)).partition("Root Cause")
    assert "traceback : ended because another rank failed" in before
    assert behind.strip("=\n").endswith("traceback : ConfigError: --lr is missing")
    assert capsys.readouterr().err == "pretrain_mllm.py: error: --lr is missing [ConfigError, rank 1]\n"
