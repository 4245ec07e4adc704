"""Schedules: builders from a step to the compute dialect, one file per algorithm, and a row of facts about each."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from multimodal.cost.memoize import memoized
from multimodal.values.deferred import Deferred
from multimodal.values.errors import ScheduleError
from multimodal.values.file_form import read_table
from multimodal.values.typed_reader import split_options

if TYPE_CHECKING:
    from multimodal.cost.step_costs import StepCosts
    from multimodal.values.model_graph import ModelGraph
    from multimodal.values.plan import Plan
    from multimodal.values.schedule import Schedule
    from multimodal.values.shape import StepShape

Builder = Callable[["StepShape"], "Schedule"]
"""Builds a schedule in the compute dialect; raises ScheduleError if the plan's layout does not allow it."""


class VirtualStages(Enum):
    """The use that a schedule makes of stages that hold several layer ranges."""

    NO_USE = "no use"
    """Plans with virtual stages run, and gain nothing."""
    OPTIONAL = "optional"
    """Meant for plans with and without virtual stages."""
    EXPECTED = "expected"
    """Meant for virtual stages; without them it is another schedule."""


class Layout(NamedTuple):
    """A shape that a plan must have."""

    is_met: Callable[["ModelGraph", "Plan"], bool]
    wanted: str
    """The shape in words, for messages."""


class Parameter(NamedTuple):
    """A choice behind a schedule's name and a colon: `name:key=value`, or `name:key` for what is either on or off."""

    values: str
    """The values that it takes, in words; empty if the key stands alone."""
    vary: Callable[["ScheduleRow", str], "ScheduleRow"]
    """From the schedule and a value to the schedule with this value; raises ValueError if it does not take the value."""


@dataclass(frozen=True, kw_only=True)
class ScheduleRow:
    """One schedule: its builder, and all facts that flags, planners, estimates, tools and pages read."""

    build: Callable[..., "Schedule"]
    """A `Builder`; if `needs_costs`, one that takes the `costs` of the step as well."""
    meaning: str
    """Its effect, in one line."""
    source: str = ""
    """The paper that introduced it, or that uses it as a baseline."""
    splits_backwards: bool = False
    """True if every backward is an input gradient and a weight gradient."""
    runs_segments: bool = False
    """True if pieces of layers run by themselves, in bubbles and in waits; not in FP8."""
    in_flight: float = 1.0
    """Microbatches that a stage keeps at most, over those of 1F1B; infinite if the number grows with the step's."""
    only_encoders_keep_more: bool = False
    """True if all other stages keep as many as in 1F1B."""
    virtual_stages: VirtualStages = VirtualStages.NO_USE
    is_folded: bool = False
    """True if a stage's two layer ranges form a V; in all other schedules layer ranges are dealt in turn."""
    layout: Layout | None = None
    """The layout that its builder requires; it raises ScheduleError for other plans."""
    num_rounds: int = 0
    """If units that share ranks run in phases: rounds of such phases in a step. More rounds keep less and wait more."""
    fewest_encoders: int = 0
    """Encoders for which it is meant at least: 1 if it arranges encoders, 2 if it runs all of them as one."""
    needs_costs: bool = False
    """True if the order depends on durations; the schedule is built anew for every step."""
    fills_memory: bool = False
    """True if stages keep as many microbatches beyond `in_flight` as fit into memory."""
    needs_messages: bool = False
    """True if it is equal to another schedule where every rank holds the whole model."""
    otherwise: str = "1f1b"
    """The equivalent schedule if the model or the plan lacks its requirements."""
    is_tried_first: bool = False
    """True if a search tries it on every kind of layout that suits it, not only on the best layouts."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    """Key -> what may be chosen about it."""
    alias_of: str = ""
    """The name with parameters that its name stands for; empty if it stands for itself."""

    def __call__(self, shape: "StepShape") -> "Schedule":
        """Build the schedule, so that a row is a `Builder`. One that needs costs takes unit costs; see `with_costs`."""
        from multimodal.schedule.execute_lanes import UnitCosts  # behind what lists the facts

        return self.with_costs(UnitCosts(shape))(shape)

    def with_costs(self, costs: "StepCosts") -> Builder:
        """Return the builder for a step with these costs."""
        return partial(self.build, costs=costs) if self.needs_costs else self.build

    @property
    def takes_fed_encoders(self) -> bool:
        """False if it is only for models in which no encoder feeds another one, as it runs all of them as one."""
        return self.fewest_encoders < 2

    def is_for(self, graph: "ModelGraph", *, has_virtual_stages: bool) -> bool:
        """Return True if the schedule is meant for such a model, with or without several layer ranges per stage."""
        unmeant = VirtualStages.NO_USE if has_virtual_stages else VirtualStages.EXPECTED
        takes_all = self.takes_fed_encoders or not fed_encoders(graph)
        return self.virtual_stages is not unmeant and takes_all and len(graph.encoders) >= self.fewest_encoders


def fed_encoders(graph: "ModelGraph") -> list[str]:
    """Return the encoders that other encoders feed."""
    return [unit.name for unit in graph.encoders if graph.upstream(unit.name)]


class ScheduleTable(dict[str, ScheduleRow]):
    """Schedules by name; one with parameters (`dip:rounds=6`, `optimus:keep=2,split`) is made when it is asked for.

    Iteration yields the rows and aliases alone, which is what searches try. Rows can be added at any time.
    """

    def __init__(self, rows: Mapping[str, ScheduleRow | str]) -> None:
        """Take rows, and aliases: names with parameters of rows before them."""
        super().__init__()
        for name, row in rows.items():
            self[name] = replace(self[row], alias_of=row) if isinstance(row, str) else row

    def listed(self) -> list[str]:
        """Return all names, those of aliases with what they stand for."""
        return [f"{name} (is {row.alias_of})" if row.alias_of else name for name, row in self.items()]

    @memoized
    def __missing__(self, text: str) -> ScheduleRow:
        """Read a name with parameters; raises ScheduleError, which names those that are known."""
        name, given = split_options(text)
        row = self.get(name)
        if row is None:
            raise ScheduleError(f"there is no schedule '{name}'; choose one of {', '.join(self)}")
        known = ", ".join(f"{key}={each.values}" if each.values else key for key, each in row.parameters.items()) or "none"
        seen = set[str]()
        for key, value in given:
            parameter = row.parameters.get(key)
            if parameter is None or key in seen:
                problem = "is given twice the parameter" if parameter else "has no parameter"
                raise ScheduleError(f"schedule '{text}' {problem} '{key}'; '{name}' has: {known}")
            seen.add(key)
            try:
                row = parameter.vary(row, value)
            except ValueError:
                wanted = parameter.values or "no value"
                raise ScheduleError(f"schedule '{text}': {key} takes {wanted}, found '{value}'") from None
        return row


def schedule_name(text: str) -> str:
    """Return the name of a schedule, with or without parameters, as a flag is given; for argparse, whose error it raises."""
    try:
        BUILDERS[text]
    except ScheduleError as problem:
        raise ArgumentTypeError(str(problem)) from None
    return text


IN_MEMORY = "memory"
"""Value of `ahead` for as far as memory allows."""


def _factor(text: str) -> float:
    """Read a factor of at least 1; raises ValueError."""
    factor = float(text)
    if not 1 <= factor < math.inf:
        raise ValueError(text)
    return factor


def _run_ahead(row: ScheduleRow, value: str) -> ScheduleRow:
    if value == IN_MEMORY:
        meaning = f"{'zb-h1' if row.splits_backwards else '1F1B'} whose forwards run ahead as far as the memory model allows"
        build = partial(Deferred(f"{__name__}.one_f_one_b.build_in_memory"), splits_backwards=row.splits_backwards)
        row = replace(row, meaning=meaning, source=f"{_EAGER}; {row.source}" if row.splits_backwards else _EAGER)
        return replace(row, build=build, is_tried_first=False, fills_memory=True, needs_costs=True, needs_messages=True)
    if row.splits_backwards:
        raise ValueError(value)
    factor, meaning = _factor(value), "1F1B whose forwards run ahead where memory allows"
    build = partial(row.build, memory_factor=factor)
    return replace(row, build=build, meaning=meaning, source=_EAGER, in_flight=factor, needs_messages=True)


def _run_in_rounds(row: ScheduleRow, value: str) -> ScheduleRow:
    num_rounds = int(value)
    if num_rounds < 1:
        raise ValueError(value)
    build, fewest = partial(row.build, num_rounds=num_rounds), 0 if num_rounds > 1 else 1
    meaning = f"the phases of dip in {num_rounds} rounds" if num_rounds > 1 else row.meaning
    return replace(row, build=build, meaning=meaning, num_rounds=num_rounds, fewest_encoders=fewest)


def _keep_fewer(row: ScheduleRow, value: str) -> ScheduleRow:
    factor = _factor(value)
    meaning = "the same with fewer activations of encoders"
    return replace(row, build=partial(row.build, memory_factor=factor), meaning=meaning, in_flight=factor)


def _split_backwards(row: ScheduleRow, value: str) -> ScheduleRow:
    if value:
        raise ValueError(value)
    build, meaning = partial(row.build, splits_backwards=True), "optimus with weight gradients in bubbles as well"
    return replace(row, build=build, meaning=meaning, source=f"{row.source}; Qi et al.", splits_backwards=True)


_EAGER = "Entrain 4.5.3"
_LAYOUTS = {
    "dealt": Layout(
        Deferred(f"{__name__}.interleaved_1f1b.interleaves"), "a unit whose stages hold several layer ranges each, dealt in turn"
    ),
    "v_shaped": Layout(
        lambda graph, plan: any(map(Deferred(f"{__name__}.zb_v.is_v_shaped"), plan.units.values())),
        "a unit whose stages hold two layer ranges each in the shape of a V, the first stage the first and the last",
    ),
}
_PARAMETERS = {
    "1f1b": {"ahead": Parameter(f"a factor of at least 1 or {IN_MEMORY}", _run_ahead)},
    "zb-h1": {"ahead": Parameter(IN_MEMORY, _run_ahead)},
    "dip": {"rounds": Parameter("a whole number of at least 1", _run_in_rounds)},
    "optimus": {"keep": Parameter("a factor of at least 1", _keep_fewer), "split": Parameter("", _split_backwards)},
}


def _read_row(name: str, facts: dict[str, Any] | str) -> ScheduleRow | str:
    if isinstance(facts, str):
        return facts
    build = Deferred(f"{__name__}.{facts.pop('build')}")
    stages, layout = VirtualStages[facts.pop("virtual_stages", "no_use").upper()], _LAYOUTS.get(facts.pop("layout", ""))
    return ScheduleRow(build=build, virtual_stages=stages, layout=layout, parameters=_PARAMETERS.get(name, {}), **facts)


_TABLE = read_table(Path(__file__).with_name("builders.yaml"))
BUILDERS = ScheduleTable({name: _read_row(name, facts) for name, facts in _TABLE.items()})
"""Every schedule by the name that selects it, and aliases of schedules with parameters that searches try as well."""
