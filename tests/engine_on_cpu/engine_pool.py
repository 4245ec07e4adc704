"""Rank processes that have Transformer Engine: forked from a process that installs it before megatron-core is imported."""

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class EnginePool:
    """A `RankPool` behind a pipe; functions and their arguments are pickled on the way."""

    def __init__(self, folder: Path, size: int) -> None:
        self._pipe, child = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(child, folder, size))
        self._process.start()
        child.close()

    def run(self, function: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
        """Call a function on every rank, as `RankPool.run` does; raises RankError when a rank raised."""
        from tests.distributed.rank_pool import RankError

        self._pipe.send((function, args, world_size))
        answer: list[Any] | str = self._pipe.recv()
        if isinstance(answer, str):
            raise RankError(answer)
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Any, folder: Path, size: int) -> None:
    from tests.engine_on_cpu.install import install

    install(folder)
    from megatron.runtime import platform

    platform.install()  # before anything else imports megatron-core, and the compiler with it
    import tests.distributed.test_transformer_engine  # noqa: F401 - before ranks are forked: each would import it by itself
    from tests.distributed.rank_pool import RankError, RankPool

    pool: RankPool | None = None
    while True:
        try:
            function, args, world_size = pipe.recv()  # which imports the function's module: here, once, before ranks are forked
            pool = pool or RankPool(size)
            pipe.send(pool.run(function, *args, world_size=world_size))
        except EOFError:
            break
        except Exception as problem:
            pipe.send(str(problem) if isinstance(problem, RankError) else traceback.format_exc())
    if pool is not None:
        pool.close()
