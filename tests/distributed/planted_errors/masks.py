"""Errors of masks that let items attend in both directions."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage


@contextmanager
def _inputs_changed(change: Callable[[UnitStage, PackedInput], PackedInput]) -> Iterator[None]:
    """What a stage derives its attention mask from."""
    original = UnitStage._position_inputs

    with patch.object(
        UnitStage, "_position_inputs", lambda stage, batch: original(stage, replace(change(stage, batch), packed=None))
    ):
        yield


def _items_forgotten_behind_the_first_stage(stage: UnitStage, batch: PackedInput) -> PackedInput:
    return batch if stage.is_first else replace(batch, items=())


def _items_a_token_late(stage: UnitStage, batch: PackedInput) -> PackedInput:
    return replace(
        batch, items=tuple(item._replace(start=item.start + 1, num_tokens=item.num_tokens - 1) for item in batch.items)
    )


ERRORS_OF_MASKS: Mapping[str, Callable[[], Any]] = {
    "a later stage forgets where items are": lambda: _inputs_changed(_items_forgotten_behind_the_first_stage),
    "an item's first token counts as text": lambda: _inputs_changed(_items_a_token_late),
}
