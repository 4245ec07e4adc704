"""The most bytes that new tensors take at one time."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operations return inside, as long as any such tensor lives."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[int, int]] = {}
        """Storage -> (tensors, bytes)."""
        self._old: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in (each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)):
            if (storage := tensor.untyped_storage()._cdata) not in self._live:
                self._old.add(storage)
        result = function(*args, **(kwargs or {}))
        for tensor in (each for each in tree_leaves(result) if isinstance(each, Tensor)):
            self._note(tensor)
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._old:
            return
        count, size = self._live.get(storage._cdata, (0, storage.nbytes()))
        self._live[storage._cdata] = count + 1, size
        weakref.finalize(tensor, self._forget, storage._cdata)

    def _forget(self, storage: int) -> None:
        count, size = self._live.pop(storage, (1, 0))
        if count > 1:
            self._live[storage] = count - 1, size
