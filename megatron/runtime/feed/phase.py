"""Phases of a training run: the step, and the sample of every data set, at which its batches and learning rate begin."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron.runtime.feed.data_sets import RunData, data_set_name
from multimodal.data.global_batches import DataPart, GlobalBatches

_OF_BATCHES = ("global_batch_size", "data_sets", "seq_length", "packing_seq_length", "chat_template_digest")
_OF_LEARNING_RATE = ("learning_rate", "trained")


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps of one kind: their batches continue where those of the phase before ended."""

    first_step: int = 0
    """Steps done before this phase."""
    first_sample: int = 0
    """Samples consumed before this phase."""
    positions: Mapping[str, int] = field(default_factory=dict)
    """Data set (`data_set_name`) -> its samples consumed before this phase, for all data sets that were ever trained on."""
    learning_rate_first_step: int = 0
    """The step at which the learning rate began its schedule."""

    def go_on(self, batches: GlobalBatches, run_data: RunData) -> GlobalBatches:
        """Return the global batches of a run of this description, with each data set continued from where it was left."""
        if not self.first_step:
            return batches
        names = [name for name, _ in _data_sets(run_data)]
        parts = (replace(part, position=self.positions.get(name, 0)) for name, part in zip(names, batches.parts, strict=True))
        return replace(batches, parts=tuple(parts), first_step=self.first_step, first_sample=self.first_sample)


def find_phase(saved: RunData, current: RunData, *, step: int, may_change: bool) -> Phase:
    """Return the phase after `step` of a checkpoint of `saved`: that one, or a new one if this differs and may change."""
    phase = Phase(**saved.get("phase", {}))
    if not may_change:
        return phase
    if any(name in saved and saved[name] != current[name] for name in _OF_BATCHES):
        size, names = saved["global_batch_size"], [name for name, _ in _data_sets(saved)]
        parts = tuple(DataPart(int(name.rpartition(" ")[2]), weight) for name, weight in _data_sets(saved))
        consumed = phase.go_on(GlobalBatches(parts, size, seed=0), saved).positions(step)
        phase = replace(
            phase,
            first_step=step,
            first_sample=phase.first_sample + (step - phase.first_step) * size,
            positions={**phase.positions, **dict(zip(names, consumed, strict=True))},
        )
    if any(name in saved and saved[name] != current[name] for name in _OF_LEARNING_RATE):
        phase = replace(phase, learning_rate_first_step=step)
    return phase


def _data_sets(run_data: RunData) -> list[tuple[str, float]]:
    """Return the names and weights of a run's data sets; a checkpoint that does not list them has one."""
    if "data_sets" in run_data:
        return [(name, weight) for name, weight in run_data["data_sets"]]
    return [(data_set_name(run_data["data_digest"], run_data["split"], run_data["num_train_samples"]), 1.0)]
