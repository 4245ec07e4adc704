"""The segments of a stage: its layers' parts in one line, and where each segment begins in it, forward and backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from multimodal.model.layers.layer_kind import Exchange, HeadOutput, LayerPart, StagePass, State
from multimodal.model.layers.registry import kind_of
from multimodal.model.unit_stage import UnitStage
from multimodal.values.errors import ConfigError


@dataclass(frozen=True)
class StageSegments:
    """A stage's layers taken apart.

    A forward that ends with a segment stops right behind its collective, which is then under way; what is light behind it runs
    with the next segment. A backward does the same from the other side, so its bounds differ from a forward's.
    """

    parts: tuple[LayerPart, ...]
    layers: tuple[int, ...]
    """[num_parts] the layer of each part, by its index in the unit."""
    forward_starts: tuple[int, ...]
    """[num_segments + 1] the first part that a forward of each segment runs; at last, the number of parts."""
    backward_starts: tuple[int, ...]
    """[num_segments + 1] the first part, which comes last, whose backward that of each segment runs."""

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return len(self.forward_starts) - 1


def stage_segments(stage: UnitStage) -> StageSegments:
    """Return the segments of a stage; raises ConfigError where its layers cannot be cut."""
    check_can_be_cut(stage)
    parts: list[LayerPart] = []
    layers: list[int] = []
    starts: list[int] = []
    for index in stage.layer_range:
        kind = kind_of(stage.unit, index)
        segments = kind.segments(stage.layers[str(index)]) if kind.num_segments > 1 else ((_whole_layer(stage, index),),)
        for segment in segments:
            starts.append(len(parts))
            parts += segment
            layers += [index] * len(segment)
    forward = [_after_exchange(parts, start) if start else 0 for start in starts]
    backward = [_past_light(parts, start) if start else 0 for start in starts]
    return StageSegments(tuple(parts), tuple(layers), (*forward, len(parts)), (*backward, len(parts)))


def num_stage_segments(stage: UnitStage) -> int:
    """Return the number of segments of a stage."""
    return sum(kind_of(stage.unit, index).num_segments for index in stage.layer_range)


def check_can_be_cut(stage: UnitStage) -> None:
    """Raise ConfigError where a stage's layers must run whole."""
    where = f"unit '{stage.unit.name}', layers {stage.layer_range.start} to {stage.layer_range.stop - 1}"
    if stage.options.transformer_impl != "local":
        raise ConfigError(
            f"{where}: the schedule runs segments of a layer on their own, which layers of Transformer Engine cannot do, as they "
            "fuse norms with products; use --transformer-impl local, or a --schedule that runs whole stages"
        )
    if stage.guard is not None:
        raise ConfigError(
            f"{where}: the schedule runs segments of a layer on their own, but the stage's weights are sharded over its replicas "
            "and are there only while a whole layer computes; leave out --data-parallel-sharding-strategy optim_grads_params, or "
            "use a --schedule that runs whole stages"
        )


def _whole_layer(stage: UnitStage, index: int) -> LayerPart:
    def run(state: State, given: StagePass) -> State:
        output = stage.run_layer(index, cast(Tensor, state[0] if state else None), given)
        return cast(State, output) if isinstance(output, HeadOutput) else (output,)

    return LayerPart(run)


def _after_exchange(parts: Sequence[LayerPart], start: int) -> int:
    while start and parts[start - 1].is_light and parts[start - 1].exchange is Exchange.NONE:
        start -= 1
    return start


def _past_light(parts: Sequence[LayerPart], start: int) -> int:
    while parts[start].is_light:
        start += 1
    return start
