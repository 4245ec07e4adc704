"""The secret of a run is read from a file, or refused."""

from pathlib import Path

import pytest

from megatron.runtime.launch.shared_token import read_token
from multimodal.values.errors import ConfigError

TOKEN = b"0123456789abcdef"


def test_a_token_is_read_without_space(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    assert read_token(tmp_path / "token", flag="--token") == TOKEN


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"123", "--token FILE: the token has 3 bytes, expected at least 16, none zero; make one"),
        (TOKEN + b"\0" + TOKEN, "--token FILE: the token has 33 bytes, expected at least 16, none zero; make one"),
        (None, "--token FILE: the run's token cannot be read (No such file or directory); make one"),
    ],
)
def test_an_unusable_token_is_refused(tmp_path: Path, content: bytes | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError) as problem:
        read_token(tmp_path / "token", flag="--token")
    assert str(problem.value).replace(str(tmp_path / "token"), "FILE").startswith(expected)
