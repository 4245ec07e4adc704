"""Values that hold tensors, and their copies to a device: derived where data is loaded, copied once, then only read.

In a training step the host must not wait for the device, nor the device for the host. So everything that follows from lengths
alone (masks, work lists, rows) is derived on the CPU ahead of the step, and its tensors are copied together (`Parcel`).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")

CPU = torch.device("cpu")

_ALIGNMENT = 64
"""Bytes to which the tensors of a parcel are aligned."""


class Slot(NamedTuple):
    """The place of a tensor in a parcel."""

    start: int
    shape: torch.Size
    dtype: torch.dtype


class HoldsTensors:
    """Base of dataclasses with tensors in their fields."""

    __slots__ = ()

    def map_tensors(self, change: Callable[[Any], Any]) -> Self:
        """Return the same values with every tensor changed, such as copied to a device."""
        changed = {each.name: map_tensors(getattr(self, each.name), change) for each in fields(self)}  # type: ignore[arg-type]
        return replace(self, **changed)  # type: ignore[type-var]


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with every tensor (or `Slot`) changed in tuples, mappings and objects that have a method `map_tensors`."""
    if isinstance(value, Tensor | Slot):
        return change(value)
    if hasattr(value, "map_tensors"):
        return value.map_tensors(change)
    if isinstance(value, tuple):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Mapping):
        return {key: map_tensors(part, change) for key, part in value.items()}
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    yield from found


@dataclass
class DerivedValues(HoldsTensors):
    """Values by name, each derived once and then kept on the device that last asked for it."""

    _values: dict[Hashable, Any] = field(default_factory=dict)

    def on(self, device: torch.device, name: Hashable, derive: Callable[[], Value]) -> Value:
        """Return a value on a device; derived on the CPU if it is not here yet."""
        value = self._values[name] if name in self._values else derive()
        if any(tensor.device != device for tensor in tensors_of(value)):
            value = map_tensors(value, lambda tensor: tensor.to(device))
        self._values[name] = value
        return value

    def keep(self, name: Hashable, build: Callable[[], Value]) -> Value:
        """Return the value that was built under this name, or build it now: for values that move their tensors themselves."""
        if name not in self._values:
            self._values[name] = build()
        value: Value = self._values[name]
        return value


class Parcel(NamedTuple):
    """A value whose tensors are in one buffer, so that a single copy moves it."""

    contents: Any
    """The value, with slots in place of tensors."""
    buffer: Tensor
    """uint8."""

    def open(self) -> Any:
        """Return the value; its tensors are views of the buffer."""
        return map_tensors(self.contents, lambda slot: _view(self.buffer, slot))


class Parcels(Mapping[Hashable, Parcel]):
    """Parcels by key whose buffers are parts of one buffer, so that they take one shared file between processes."""

    def __init__(self, contents: Mapping[Hashable, Any], starts: Sequence[int], buffer: Tensor) -> None:
        """starts: of each parcel in the buffer, and its end."""
        self._contents, self._starts, self._buffer = contents, starts, buffer
        self._parts = {key: slice(*ends) for key, ends in zip(contents, pairwise(starts), strict=True)}

    @classmethod
    def pack(cls, values: Mapping[Hashable, Any]) -> "Parcels":
        """Copy the tensors of values, all on the CPU, into a buffer."""
        slots = [dict(_slots(value)) for value in values.values()]
        starts = [0, *accumulate(max((_end(slot) for _, slot in each.values()), default=0) for each in slots)]
        buffer = torch.empty(starts[-1], dtype=torch.uint8)
        contents = {}
        for (key, value), each, start in zip(values.items(), slots, starts, strict=False):
            places = {name: slot for name, (_, slot) in each.items()}
            contents[key] = map_tensors(value, lambda tensor, places=places: places[id(tensor)])  # type: ignore[misc]
            for tensor, slot in each.values():
                _view(buffer[start:], slot).copy_(tensor)
        return cls(contents, starts, buffer)

    def pin_memory(self) -> "Parcels":
        """Return the parcels in pinned memory, from which a device copies while the host continues."""
        return Parcels(self._contents, self._starts, self._buffer.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        return Parcels, (self._contents, self._starts, self._buffer)

    def __getitem__(self, key: Hashable) -> Parcel:
        return Parcel(self._contents[key], self._buffer[self._parts[key]])

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)


def _slots(value: Any) -> Iterator[tuple[int, tuple[Tensor, Slot]]]:
    """Yield each tensor of a value once, with its identity and its place in the buffer."""
    seen, start = set(), 0
    for tensor in tensors_of(value):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            slot = Slot(start, tensor.shape, tensor.dtype)
            start = _end(slot)
            yield id(tensor), (tensor, slot)


def _end(slot: Slot) -> int:
    return slot.start - (-slot.shape.numel() * slot.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _view(buffer: Tensor, slot: Slot) -> Tensor:
    size_bytes = slot.shape.numel() * slot.dtype.itemsize
    return buffer[slot.start : slot.start + size_bytes].view(slot.dtype).view(slot.shape)
