from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.runtime import platform


@pytest.fixture(scope="session", autouse=True)
def cpu_platform() -> None:
    platform.install()


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
