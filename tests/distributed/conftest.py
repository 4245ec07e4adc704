"""One pool of rank processes for the whole test session."""

from collections.abc import Iterator

import pytest

from tests.distributed.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Eight ranks."""
    pool = RankPool(8)
    yield pool
    pool.close()
