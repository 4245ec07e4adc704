"""A rank's store between actions: received and outgoing activations and gradients, and autograd graphs of open microbatches."""

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from multimodal.attention.context_parallel import detached


class ActivationStore:
    """Stores values; every entry is taken exactly once, so that it is freed at its last use. Counts bytes and their peak."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[Any, int]] = {}
        self._size_bytes = 0
        self.peak_bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def put(self, key: Hashable, value: Any, *, size_bytes: int) -> None:
        """Keep `value` until it is taken."""
        assert key not in self._entries, f"{key} is stored already"
        self._entries[key] = (value, size_bytes)
        self._size_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self._size_bytes)

    def take(self, key: Hashable) -> Any:
        """Return `value` and forget it."""
        value, size_bytes = self._entries.pop(key)
        self._size_bytes -= size_bytes
        return value

    def check_empty(self) -> None:
        """Check that nothing is stored, as at the end of a step."""
        assert not self._entries, f"left over at the end of a step: {sorted(map(str, self._entries))[:3]}"


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the backward of the code inside, except parameters, by `storage_identity`."""

    def __init__(self, parameter_storages: frozenset[int]) -> None:
        self._seen = set(parameter_storages)
        self.size_bytes = 0
        super().__init__(self._pack, lambda tensor: tensor)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that is kept in addition; a storage counts once."""
        storage = tensor.untyped_storage()
        if (identity := storage_identity(tensor)) not in self._seen:
            self._seen.add(identity)
            self.size_bytes += storage.nbytes()

    def bytes_beside(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of tensors whose storages have not been counted."""
        storages = {storage_identity(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(size_bytes for identity, size_bytes in storages.items() if identity not in self._seen)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        return detached(tensor)


def storage_identity(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, constant as long as it exists, with or without memory."""
    return tensor.untyped_storage()._cdata


def size_of(tensor: Tensor | None) -> int:
    """Bytes of a tensor's elements."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
