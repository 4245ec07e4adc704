"""Fixtures of the whole test session: a pool of rank processes for each of pytest's processes, and launches for all of them."""

import fcntl
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.runtime import platform

platform.install()  # before anything else imports megatron-core, and the compiler with it

from tests.distributed.launch import fork_server
from tests.distributed.rank_pool import RankPool

Once = Callable[[Callable[[Path], Any]], Any]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Now, when all test modules are imported and no test has changed anything."""
    fork_server()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Returns what a function of a new folder returns, called once per session: pytest's other processes wait for it and read it.

    What it leaves in the folder is for reading, as several tests do so at a time.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def call_once(make: Callable[[Path], Any]) -> Any:
        folder = shared / "once" / f"{make.__module__}.{make.__qualname__}"
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / "made"
        with (folder / "lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # of this process alone: ranks that are forked meanwhile do not hold it
            if not made.exists():
                made.write_bytes(pickle.dumps(make(Path(tempfile.mkdtemp(dir=folder)))))
            return pickle.loads(made.read_bytes())

    return call_once
