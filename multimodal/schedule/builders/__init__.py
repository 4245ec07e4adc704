"""Schedules: builders from a step to the compute dialect, one file per algorithm, and a row of facts about each."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import NamedTuple

from multimodal.cost.memoize import memoized
from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.builders.breadth_first import build_breadth_first, build_gpipe
from multimodal.schedule.builders.dip import build_dip
from multimodal.schedule.builders.encoders_colocated import build_encoders_colocated
from multimodal.schedule.builders.interleaved_1f1b import build_interleaved_1f1b, build_interleaved_zb, interleaves
from multimodal.schedule.builders.nested import build_nested
from multimodal.schedule.builders.one_f_one_b import build_in_memory, build_one_f_one_b, build_zb_h1
from multimodal.schedule.builders.optimus import build_optimus
from multimodal.schedule.builders.zb_v import build_zb_v, is_v_shaped
from multimodal.schedule.execute_lanes import UnitCosts
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.typed_reader import split_options

Builder = Callable[[StepShape], Schedule]
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

    is_met: Callable[[ModelGraph, Plan], bool]
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

    build: Callable[..., Schedule]
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

    def __call__(self, shape: StepShape) -> Schedule:
        """Build the schedule, so that a row is a `Builder`. One that needs costs takes unit costs; see `with_costs`."""
        return self.with_costs(UnitCosts(shape))(shape)

    def with_costs(self, costs: StepCosts) -> Builder:
        """Return the builder for a step with these costs."""
        return partial(self.build, costs=costs) if self.needs_costs else self.build

    @property
    def takes_fed_encoders(self) -> bool:
        """False if it is only for models in which no encoder feeds another one, as it runs all of them as one."""
        return self.fewest_encoders < 2

    def is_for(self, graph: ModelGraph, *, has_virtual_stages: bool) -> bool:
        """Return True if the schedule is meant for such a model, with or without several layer ranges per stage."""
        unmeant = VirtualStages.NO_USE if has_virtual_stages else VirtualStages.EXPECTED
        takes_all = self.takes_fed_encoders or not fed_encoders(graph)
        return self.virtual_stages is not unmeant and takes_all and len(graph.encoders) >= self.fewest_encoders


def fed_encoders(graph: ModelGraph) -> list[str]:
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
        build, source = partial(build_in_memory, splits_backwards=row.splits_backwards), row.source
        row = replace(row, meaning=meaning, source=f"{_EAGER}; {source}" if row.splits_backwards else _EAGER)
        return replace(row, build=build, is_tried_first=False, fills_memory=True, needs_costs=True, needs_messages=True)
    if row.splits_backwards:
        raise ValueError(value)
    factor, meaning = _factor(value), "1F1B whose forwards run ahead where memory allows"
    build = partial(build_one_f_one_b, memory_factor=factor)
    return replace(row, build=build, meaning=meaning, source=_EAGER, in_flight=factor, needs_messages=True)


def _run_in_rounds(row: ScheduleRow, value: str) -> ScheduleRow:
    num_rounds = int(value)
    if num_rounds < 1:
        raise ValueError(value)
    build, fewest = partial(build_dip, num_rounds=num_rounds), 0 if num_rounds > 1 else 1
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


_DEALT = Layout(interleaves, "a unit whose stages hold several layer ranges each, dealt in turn")
_V_SHAPED = Layout(
    lambda graph, plan: any(map(is_v_shaped, plan.units.values())),
    "a unit whose stages hold two layer ranges each in the shape of a V, the first stage the first and the last",
)
_ZERO_BUBBLE, _EAGER = "Qi et al., Zero Bubble Pipeline Parallelism", "Entrain 4.5.3"

BUILDERS = ScheduleTable(
    {
        "gpipe": ScheduleRow(
            build=build_gpipe, meaning="all forwards, then all backwards", source="Huang et al., GPipe", in_flight=math.inf
        ),
        "breadth-first": ScheduleRow(
            build=build_breadth_first,
            meaning="all microbatches through one layer range before the next",
            source="Lamy-Poirier, Breadth-First Pipeline Parallelism",
            in_flight=math.inf,
            virtual_stages=VirtualStages.EXPECTED,
            otherwise="gpipe",
        ),
        "1f1b": ScheduleRow(
            build=build_one_f_one_b,
            meaning="one forward, one backward in turn after the warm-up",
            source="Narayanan et al., PipeDream-flush",
            parameters={"ahead": Parameter(f"a factor of at least 1 or {IN_MEMORY}", _run_ahead)},
        ),
        "eager-1f1b": "1f1b:ahead=2",
        "eager-1f1b-memory": f"1f1b:ahead={IN_MEMORY}",
        "interleaved-1f1b": ScheduleRow(
            build=build_interleaved_1f1b,
            meaning="1F1B over layer ranges dealt to the stages in turn",
            source="Narayanan et al., Megatron-LM 2.2",
            virtual_stages=VirtualStages.EXPECTED,
            layout=_DEALT,
        ),
        "interleaved-zb": ScheduleRow(
            build=build_interleaved_zb,
            meaning="interleaved 1F1B with weight gradients where a lane would be idle",
            source=_ZERO_BUBBLE,
            splits_backwards=True,
            virtual_stages=VirtualStages.EXPECTED,
            layout=_DEALT,
            fills_memory=True,
            needs_costs=True,
            needs_messages=True,
        ),
        "zb-h1": ScheduleRow(
            build=build_zb_h1,
            meaning="1F1B with weight gradients where a lane would be idle",
            source=_ZERO_BUBBLE,
            splits_backwards=True,
            virtual_stages=VirtualStages.OPTIONAL,
            is_tried_first=True,
            parameters={"ahead": Parameter(IN_MEMORY, _run_ahead)},
        ),
        "zb-v": ScheduleRow(
            build=build_zb_v,
            meaning="no bubble on stages that hold the layers in the shape of a V",
            source=_ZERO_BUBBLE,
            splits_backwards=True,
            virtual_stages=VirtualStages.EXPECTED,
            is_folded=True,
            layout=_V_SHAPED,
            otherwise="zb-h1",
        ),
        "zb-memory": f"zb-h1:ahead={IN_MEMORY}",
        "dip": ScheduleRow(
            build=build_dip,
            meaning="encoders, then the LLM, then encoders, on the same ranks",
            source="DIP",
            in_flight=math.inf,
            num_rounds=1,
            fewest_encoders=1,
            parameters={"rounds": Parameter("a whole number of at least 1", _run_in_rounds)},
        ),
        **{f"dip-{rounds}": f"dip:rounds={rounds}" for rounds in (2, 4, 8, 16)},
        "optimus": ScheduleRow(
            build=build_optimus,
            meaning="encoder work in the bubbles of the LLM's pipeline",
            source="Optimus, Algorithm 2",
            in_flight=math.inf,
            only_encoders_keep_more=True,
            virtual_stages=VirtualStages.OPTIONAL,
            fewest_encoders=1,
            runs_segments=True,
            needs_costs=True,
            needs_messages=True,
            parameters={"keep": Parameter("a factor of at least 1", _keep_fewer), "split": Parameter("", _split_backwards)},
        ),
        "optimus-lean": "optimus:keep=2",
        "optimus-zb": "optimus:split",
        "nested": ScheduleRow(
            build=build_nested,
            meaning="encoders and generators in pauses of the LLM's pipeline",
            source="BigMac",
            only_encoders_keep_more=True,
            virtual_stages=VirtualStages.OPTIONAL,
            fewest_encoders=1,
            needs_costs=True,
            needs_messages=True,
        ),
        "encoders-colocated": ScheduleRow(
            build=build_encoders_colocated,
            meaning="several encoders run as one in the same stages",
            source="Cornstarch 2",
            fewest_encoders=2,
        ),
    }
)
"""Every schedule by the name that selects it, and aliases of schedules with parameters that searches try as well."""
