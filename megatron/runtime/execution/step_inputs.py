"""A step's inputs on this rank's device, and the rows of its routes."""

from collections.abc import Hashable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.runtime.communication.broker import RowShares
from megatron.runtime.step.step import ROUTES, Step
from megatron.runtime.step.token_placement import RouteRows
from multimodal.attention.device_values import Parcel, map_tensors
from multimodal.balance.batch_work import list_items
from multimodal.model.stage_input import PackedInput
from multimodal.values.assignment import MicrobatchPlace, Route
from multimodal.values.model_graph import Role


class StepInputs:
    """Copies every parcel of a packed step once, from the start of the step, on a stream beside the computations.

    A computation's stream waits for the copy of its inputs; the host waits for nothing. A step that is not packed is copied piece
    by piece.
    """

    def __init__(self, step: Step, *, rank: int, device: torch.device) -> None:
        self._step, self._rank, self._device = step, rank, device
        self._opened: dict[Hashable, Any] = {}
        self._coming: dict[Hashable, tuple[Parcel, torch.cuda.Event]] = {}
        if device.type == "cuda" and step.parcels:
            stream = _copy_stream(device)
            with torch.cuda.stream(stream):
                for key, parcel in step.parcels.items():
                    self._coming[key] = parcel._replace(buffer=parcel.buffer.to(device, non_blocking=True)), stream.record_event()

    def of(self, place: MicrobatchPlace) -> tuple[PackedInput, ...]:
        """Return the inputs of a microbatch, one per sample subset."""
        found: tuple[PackedInput, ...] = self._open(place)
        return tuple(self._without_dropped(batch, place) for batch in found) if self._step.dropped else found

    def _without_dropped(self, batch: PackedInput, place: MicrobatchPlace) -> PackedInput:
        """Return an input whose targets of dropped samples weigh nothing."""
        step, role = self._step, self._step.graph.unit(place.unit).role
        if role is Role.ENCODER:
            return batch
        samples: Iterable[int] = step.target_samples.get(place, ())
        if role is Role.GENERATOR:
            images = list_items(step.assignment.atoms(place), unit=place.unit, lengths_by_sample=step.lengths)
            of_tokens = np.repeat([image.sample_id for image in images], batch.lengths)
            of_tokens = of_tokens if batch.share is None else of_tokens[batch.share.positions]
            samples = (of_tokens if batch.target_rows is None else of_tokens[batch.target_rows.cpu().numpy()]).tolist()
        is_kept = torch.tensor([sample not in step.dropped for sample in samples], dtype=torch.float64, device=self._device)
        return replace(batch, target_weights=is_kept if batch.target_weights is None else is_kept * batch.target_weights)

    def output_rows(self, route: Route) -> Tensor:
        """[num_rows]: for each row that this rank sends on a route, its index in the result of the sample subset."""
        rows = self._rows(route).output
        assert rows is not None, f"rank {self._rank} gives nothing to {route.target}"
        return rows

    def row_shares(self, route: Route) -> RowShares | None:
        """Return the rows that ranks send and receive; None if neither end spreads tokens."""
        return self._rows(route).shares

    def _rows(self, route: Route) -> RouteRows:
        return self._open(ROUTES)[route.source, route.target]

    def _open(self, key: Hashable) -> Any:
        if key not in self._opened and self._step.parcels:
            self._opened[key] = self._arrived(key).open()
        elif key not in self._opened:
            value: Any = self._step.route_rows if key == ROUTES else self._step.inputs[key]  # type: ignore[index]
            is_here = self._device.type == "cpu"
            self._opened[key] = value if is_here else map_tensors(value, lambda tensor: tensor.to(self._device))
        return self._opened[key]

    def _arrived(self, key: Hashable) -> Parcel:
        if key not in self._coming:
            parcel = self._step.parcels[key]
            # A buffer of its own, as on a device: the tensors of a microbatch are counted by storages.
            return parcel._replace(buffer=parcel.buffer.clone())
        parcel, copied = self._coming.pop(key)
        computing = torch.cuda.current_stream()
        computing.wait_event(copied)
        parcel.buffer.record_stream(computing)
        return parcel


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
