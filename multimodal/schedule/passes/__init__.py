"""Passes: functions from one schedule to another, one file each, and a row of facts about each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from multimodal.values.deferred import Deferred
from multimodal.values.errors import ConfigError

if TYPE_CHECKING:
    from multimodal.values.schedule import Schedule

Pass = Callable[["Schedule"], "Schedule"]
"""Rewrites a schedule of the compute dialect."""


class Need(Enum):
    """A property of a model or a plan without which a pass changes nothing."""

    COPIES = "ranks that hold the same weights"
    MESSAGES = "ranks that wait for each other's activations"
    OWN_RANKS = "ranks of the LLM that no other unit has"
    ENCODERS = "an encoder"


@dataclass(frozen=True, kw_only=True)
class PassRow:
    """One pass: its function, and all facts that flags, planners and pages read."""

    rewrite: Pass
    meaning: str
    """Its effect, in one line."""
    source: str = ""
    """The paper or the system that it comes from."""
    need: Need
    """The property without which the pass changes nothing."""
    splits_backwards: bool = False
    """True if it splits backwards into input and weight gradients, as some builders do."""
    works_with_sharded_weights: bool = True
    """False if it moves the weights or gradients of a stage once per step; sharded weights move with every layer."""
    reduces_by_layer: bool = False
    """True if ranks must be set up to reduce gradients layer by layer."""
    is_planned: bool = False
    """True if every planned run uses it where it changes anything: it costs nothing where ranks have accelerators."""
    least_zero_stage: int = 0
    """The lowest ZeRO stage at which the pass changes anything."""
    undone_by: Mapping[str, str] = field(default_factory=dict)
    """Later pass -> the way in which it would undo this one, since a schedule does not record the reason for late forwards."""

    def __call__(self, schedule: "Schedule") -> "Schedule":
        """Rewrite the schedule, so that a row is a `Pass`."""
        return self.rewrite(schedule)


PASSES: dict[str, PassRow] = {
    "split-backward": PassRow(
        rewrite=Deferred(f"{__name__}.split_backward.split_backward"),
        meaning="runs an encoder's backward sample subset by sample subset",
        source="Entrain 4.5.3",
        need=Need.ENCODERS,
    ),
    "defer-receives": PassRow(
        rewrite=Deferred(f"{__name__}.move_actions.defer_receives"),
        meaning="runs actions that are ready while a lane waits for a message",
        need=Need.MESSAGES,
    ),
    "delay-forward": PassRow(
        rewrite=Deferred(f"{__name__}.move_actions.delay_forward"),
        meaning="shortens the LLM's warm-up",
        source="Optimus",
        need=Need.OWN_RANKS,
        undone_by={"defer-receives": "would move delayed forwards back into the warm-up, to where a lane waits"},
    ),
    "fill": PassRow(
        rewrite=Deferred(f"{__name__}.move_actions.fill"),
        meaning="lets weight gradients fill waits for messages",
        source="Qi et al., Zero Bubble Pipeline Parallelism",
        need=Need.MESSAGES,
        splits_backwards=True,
    ),
    "gather-parameters": PassRow(
        rewrite=Deferred(f"{__name__}.reduce_by_layer.gather_parameters"),
        meaning="gathers updated weights in the next step, stage by stage",
        source="Megatron-LM's --overlap-param-gather",
        need=Need.COPIES,
        works_with_sharded_weights=False,
        is_planned=True,
        least_zero_stage=1,
    ),
    "reduce-by-layer": PassRow(
        rewrite=Deferred(f"{__name__}.reduce_by_layer.reduce_by_layer"),
        meaning="reduces gradients layer by layer during the last backward",
        source="Megatron-LM's --overlap-grad-reduce",
        need=Need.COPIES,
        works_with_sharded_weights=False,
        reduces_by_layer=True,
        is_planned=True,
    ),
}
"""Every pass that can be chosen by name; lowering always comes last."""


def passes_named(names: str) -> tuple[PassRow, ...]:
    """Look up passes by their names, separated by commas.

    Raises ConfigError for an unknown name, a repeated one, and an order in which a pass undoes an earlier one.
    """
    named = [name for name in names.split(",") if name]
    if unknown := [name for name in named if name not in PASSES]:
        raise ConfigError(f"--schedule-passes: there is no pass '{unknown[0]}'; choose from {', '.join(PASSES)}")
    if twice := [name for name in named if named.count(name) > 1]:
        raise ConfigError(f"--schedule-passes names {twice[0]} twice; leave one out")
    for index, first in enumerate(named):
        for second in (later for later in named[index:] if later in PASSES[first].undone_by):
            raise ConfigError(
                f"--schedule-passes {names}: {second} after {first} {PASSES[first].undone_by[second]}; put {first} after "
                f"{second}, such as --schedule-passes {second},{first}, or leave one out"
            )
    return tuple(PASSES[name] for name in named)
