"""What tells one builder from another: what the list scheduler is asked for beyond the dependencies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from multimodal.values.schedule import Action

StageKey = tuple[str, int, int]
"""(unit, replica, virtual stage)."""


@dataclass(frozen=True)
class Policy:
    """What a builder wants beyond the dependencies."""

    forward_limits: Mapping[StageKey, int] = field(default_factory=dict)
    """Most microbatches in flight per stage, or per group of stages; those that are not named are unlimited."""
    forward_floors: Mapping[StageKey, int] = field(default_factory=dict)
    """Per stage or group: a backward waits for forwards while fewer microbatches are in flight and any is left to start."""
    storage_limits: Mapping[StageKey, int] = field(default_factory=dict)
    """Where backwards are split: most microbatches between forward and weight gradient, per stage or group."""
    group_of: Mapping[StageKey, StageKey] = field(default_factory=dict)
    """Stages that share one limit, named by the stage in whose name it stands; by default every stage is its own group."""
    splits_backwards: bool = False
    """Whether every backward is split into input gradient and weight gradient."""
    phase: Callable[[Action], int] | None = None
    """A lane ends each phase before the next; no action may have a higher phase than one that needs it."""
    orders: Sequence[Sequence[Action]] = ()
    """Actions that run in just this order; together with the dependencies they must not form a circle."""
    forwards_go_first: bool = False
    """Whether forwards inside their limits are more urgent than backwards (tight limits, strictly in turns)."""
    urgent: frozenset[Action] = frozenset()
    """Actions that, once ready, go before all others."""
    rank: Callable[[Action], tuple[int, ...]] | None = None
    """Of equally urgent actions, those of lower rank go first."""
