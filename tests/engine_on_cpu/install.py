"""Lets Transformer Engine's real Python run on a CPU, over the stand-in of `compiled.py` for its compiled module.

The package `transformer-engine` (pure Python) lies in a folder of its own, since megatron-core asks for it when it is imported:
only processes that call `install` before that see it. To Transformer Engine the machine has an H100; to everybody else it has no
CUDA.
"""

import contextlib
import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.engine_on_cpu.compiled import FLOAT64, NAME, stand_in


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


FOLDER = "BRAID_TRANSFORMER_ENGINE"
"""Environment variable: a folder with one folder for each version, into which the package was installed."""
_REPLACED = {
    b'torch.device("cuda", torch.cuda.current_device())': b'torch.device("cpu")',
    b'device="cuda"': b'device="cpu"',
    b'torch.device("cuda")': b'torch.device("cpu")',
    b"is_cuda": b"is_cpu",
    b".cuda()": b"",
    b"torch.cuda.": b"torch.engine_cuda.",
    b"torch.version.cuda": b'"12.9"',
    b"\n_load_library()\n": b"\n",  # of 2.3; later versions have `load_framework_extension`
}
_ABSENT = ("transformer_engine.pytorch.onnx_extensions", "onnxscript", "einops")
"""What is imported for exports to ONNX and for inference, which nothing here asks for."""


class _Cuda(types.ModuleType):
    """What Transformer Engine asks of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _cuda() -> types.ModuleType:
    device = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H100")
    module = _Cuda("torch.engine_cuda")
    answers: dict[str, Any] = {"is_available": True, "get_device_properties": device, "get_device_capability": (9, 0)}
    answers |= {"current_device": torch.device("cpu"), "current_stream": None, "synchronize": None}
    answers |= {"is_current_stream_capturing": False, "device": contextlib.nullcontext()}
    for name, value in answers.items():
        setattr(module, name, lambda *args, value=value, **kwargs: value)
    module.nvtx = types.SimpleNamespace(  # type: ignore[attr-defined]
        range_push=lambda *args: None, range_pop=lambda *args: None, range=lambda *args: contextlib.nullcontext()
    )
    return module


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        text = self.get_data(self.path)
        for old, new in _REPLACED.items():
            text = text.replace(old, new)
        return compile(text, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("transformer_engine"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.origin and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: _Absent(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def install(folder: Path) -> None:
    """Make `import transformer_engine` work from the folder; before megatron-core is imported."""
    assert "megatron.core" not in sys.modules, "megatron-core looks for Transformer Engine when it is imported"
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no shared libraries are loaded
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    sys.path.insert(0, str(folder))
    torch.engine_cuda = _cuda()  # type: ignore[attr-defined]
    compiled = stand_in()
    compiled.__spec__, compiled.__file__, compiled.__path__ = importlib.machinery.ModuleSpec(NAME, None), "stand-in", []
    sys.modules[NAME] = compiled
    for name in _ABSENT:
        sys.modules[name] = _Absent(name)
    sys.meta_path.insert(0, _Finder())
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch
    from transformer_engine.pytorch import constants

    constants.TE_DType[torch.float64] = FLOAT64
    constants.TE_DType_To_Torch[FLOAT64] = torch.float64
