"""Runs over data in a bucket, and on a web server that fails meanwhile."""

import os
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.distributed.small_run import losses, train, working_flags, write_working_files
from tests.distributed.test_producers import producer
from tests.unit.data.remote_servers import BUCKET, s3_client, serve_folder, serve_s3, upload


def test_a_bucket_trains_as_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from what is kept of it, by producers, and resumed; a file that is gone from it is a bad sample."""
    write_working_files(tmp_path)
    constant = {"--lr-decay-style": "constant"}
    expected = losses(tmp_path, {"--train-iters": 4, **constant})
    with serve_s3(monkeypatch) as bucket:
        upload(tmp_path / "data")
        said = {"environment": {name: value for name, value in os.environ.items() if name.startswith("AWS_")}}
        flags = {"--data-path": bucket, "--data-cache-path": tmp_path / "kept", "--num-workers": 1, **constant}
        saved = {**flags, "--save": tmp_path / "saved"}
        resumed = {**saved, "--load": tmp_path / "saved", "--train-iters": 4}
        assert losses(tmp_path, saved, **said) + losses(tmp_path, resumed, **said) == expected
        assert len([*(tmp_path / "kept" / "remote").glob("*/*")]) > 4
        (tmp_path / "token").write_text("a secret of these tests")
        with producer(tmp_path, **said) as found:
            by_producer = {"--producers": found.address, "--producer-token": tmp_path / "token"}
            assert losses(tmp_path, {**flags, **by_producer}, **said) == expected[:2]
        s3_client().delete_object(Bucket=BUCKET, Key="1.png")
        skipped = {"--data-path": bucket, "--bad-sample": "skip", "--bad-samples-per-thousand": 9}
        _, done = train(tmp_path, skipped, **said)
        assert f"left out a sample that cannot be read: {bucket}/manifest.jsonl, line 2" in done.output
        assert f"{bucket}/1.png does not exist" in done.output


@pytest.mark.deep(when=lambda bad_sample: bad_sample == "error")
@pytest.mark.parametrize("bad_sample", ["error", "skip"])
def test_a_server_that_fails_ends_all_ranks(bad_sample: str, tmp_path: Path) -> None:
    """Whichever rank reads the file; a server that does not answer later on is nothing to leave out."""
    write_working_files(tmp_path)
    with serve_folder(tmp_path / "data") as server:
        flags = {**working_flags(tmp_path), "--data-path": server.address, "--data-cache-path": tmp_path / "kept"}
        flags |= {"--data-retries": 1, "--bad-sample": bad_sample, "--num-workers": 1, "--train-iters": 4}
        server.overloaded = "1.png"
        done = launch(flags, num_ranks=2)
    message = f"{server.address}/1.png: cannot be read, tried 2 times (503"
    assert all(done.exit_codes) and message in done.output and "Traceback" not in done.output, done.output
