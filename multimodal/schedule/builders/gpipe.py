"""GPipe: every lane runs all its forwards, then all its backwards."""

from multimodal.schedule.list_schedule import Policy, forwards_first, list_schedule
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape


def build_gpipe(shape: StepShape) -> Schedule:
    """Build the GPipe schedule over the unit graph, in the compute dialect.

    The simplest schedule and the baseline of all: it keeps the activations of every microbatch at once.
    `StepShape.forward_only` leaves backwards and reductions out (evaluation).
    """
    return list_schedule(shape, Policy(phase=forwards_first))
