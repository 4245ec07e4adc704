"""Schedules: builders from a step to the compute dialect, one file each, and a row of facts about each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import NamedTuple

from multimodal.cost.step_costs import StepCosts
from multimodal.schedule.builders.breadth_first import build_breadth_first
from multimodal.schedule.builders.dip import build_dip
from multimodal.schedule.builders.eager_1f1b import build_eager_1f1b, build_eagerest_1f1b
from multimodal.schedule.builders.encoders_colocated import build_encoders_colocated
from multimodal.schedule.builders.gpipe import build_gpipe
from multimodal.schedule.builders.interleaved_1f1b import build_interleaved_1f1b, interleaves
from multimodal.schedule.builders.interleaved_zb import build_interleaved_zb
from multimodal.schedule.builders.nested import build_nested
from multimodal.schedule.builders.one_f_one_b import build_one_f_one_b
from multimodal.schedule.builders.optimus import build_optimus
from multimodal.schedule.builders.zb_h1 import build_eager_zero_bubble, build_zb_h1
from multimodal.schedule.builders.zb_v import build_zb_v, is_v_shaped
from multimodal.schedule.unit_cost import UnitCosts
from multimodal.values.errors import ScheduleError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape

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
    """True if pieces of layers run by themselves, which only `--transformer-impl local` can run."""
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
    role_of_encoders: str = ""
    """A verb and an object, such as `arranges encoders`, for the message that there are too few."""
    takes_fed_encoders: bool = True
    """False if it is only for models in which no encoder feeds another one."""
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

    def __call__(self, shape: StepShape) -> Schedule:
        """Build the schedule, so that a row is a `Builder`. One that needs costs takes unit costs; see `with_costs`."""
        return self.with_costs(UnitCosts(shape))(shape)

    def with_costs(self, costs: StepCosts) -> Builder:
        """Return the builder for a step with these costs."""
        build = partial(self.build, costs=costs) if self.needs_costs else self.build
        return build if self.takes_fed_encoders else partial(self._build_unfed, build)

    def _build_unfed(self, build: Builder, shape: StepShape) -> Schedule:
        if fed := fed_encoders(shape.graph):
            raise ScheduleError(
                f"{', '.join(fed)}: encoders that encoders feed; {self.meaning}: for others only; choose {self.otherwise}"
            )
        return build(shape)

    @property
    def keeps_all(self) -> bool:
        """True if stages keep more activations the more microbatches a step has."""
        return math.isinf(self.in_flight)

    def is_for(self, graph: ModelGraph, *, has_virtual_stages: bool) -> bool:
        """Return True if the schedule is meant for such a model, with or without several layer ranges per stage."""
        unmeant = VirtualStages.NO_USE if has_virtual_stages else VirtualStages.EXPECTED
        takes_all = self.takes_fed_encoders or not fed_encoders(graph)
        return self.virtual_stages is not unmeant and takes_all and len(graph.encoders) >= self.fewest_encoders


def fed_encoders(graph: ModelGraph) -> list[str]:
    """Return the encoders that other encoders feed."""
    return [unit.name for unit in graph.encoders if graph.upstream(unit.name)]


DIP_ROUNDS = (2, 4, 8, 16)
"""Numbers of rounds that `dip-N` offers."""

EAGER_FACTOR = 2.0
"""Microbatches in flight under eager 1F1B, over those of 1F1B."""

LEAN_FACTOR = 2.0
"""Microbatches in flight in encoders under `optimus-lean`, over those of 1F1B."""

_DEALT = Layout(interleaves, "a unit whose stages hold several layer ranges each, dealt in turn")
_V_SHAPED = Layout(
    lambda graph, plan: any(map(is_v_shaped, plan.units.values())),
    "a unit whose stages hold two layer ranges each in the shape of a V, the first stage the first and the last",
)
_ZERO_BUBBLE = "Qi et al., Zero Bubble Pipeline Parallelism"
_OPTIMUS = ScheduleRow(
    build=build_optimus,
    meaning="encoder work in the bubbles of the LLM's pipeline",
    source="Optimus, Algorithm 2",
    in_flight=math.inf,
    only_encoders_keep_more=True,
    virtual_stages=VirtualStages.OPTIONAL,
    fewest_encoders=1,
    role_of_encoders="arranges encoders",
    runs_segments=True,
    needs_costs=True,
    needs_messages=True,
)

BUILDERS: dict[str, ScheduleRow] = {
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
    ),
    "eager-1f1b": ScheduleRow(
        build=partial(build_eager_1f1b, memory_factor=EAGER_FACTOR),
        meaning="1F1B whose forwards run ahead where memory allows",
        source="Entrain 4.5.3",
        in_flight=EAGER_FACTOR,
        needs_messages=True,
    ),
    "eager-1f1b-memory": ScheduleRow(
        build=build_eagerest_1f1b,
        meaning="1F1B whose forwards run ahead as far as the memory model allows",
        source="Entrain 4.5.3",
        fills_memory=True,
        needs_costs=True,
        needs_messages=True,
    ),
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
    "zb-memory": ScheduleRow(
        build=build_eager_zero_bubble,
        meaning="zb-h1 whose forwards run ahead as far as the memory model allows",
        source=f"Entrain 4.5.3; {_ZERO_BUBBLE}",
        splits_backwards=True,
        virtual_stages=VirtualStages.OPTIONAL,
        fills_memory=True,
        needs_costs=True,
        needs_messages=True,
    ),
    "dip": ScheduleRow(
        build=build_dip,
        meaning="encoders, then the LLM, then encoders, on the same ranks",
        source="DIP",
        in_flight=math.inf,
        num_rounds=1,
        fewest_encoders=1,
        role_of_encoders="arranges encoders",
    ),
    **{
        f"dip-{rounds}": ScheduleRow(
            build=partial(build_dip, num_rounds=rounds),
            meaning=f"the phases of dip in {rounds} rounds",
            source="DIP",
            in_flight=math.inf,
            num_rounds=rounds,
        )
        for rounds in DIP_ROUNDS
    },
    "optimus": _OPTIMUS,
    "optimus-lean": replace(
        _OPTIMUS,
        build=partial(build_optimus, memory_factor=LEAN_FACTOR),
        meaning="the same with fewer activations of encoders",
        in_flight=LEAN_FACTOR,
    ),
    "optimus-zb": replace(
        _OPTIMUS,
        build=partial(build_optimus, splits_backwards=True),
        meaning="optimus with weight gradients in bubbles as well",
        source="Optimus, Algorithm 2; Qi et al.",
        splits_backwards=True,
    ),
    "nested": ScheduleRow(
        build=build_nested,
        meaning="encoders and generators in pauses of the LLM's pipeline",
        source="BigMac",
        only_encoders_keep_more=True,
        virtual_stages=VirtualStages.OPTIONAL,
        fewest_encoders=1,
        role_of_encoders="arranges encoders",
        needs_costs=True,
        needs_messages=True,
    ),
    "encoders-colocated": ScheduleRow(
        build=build_encoders_colocated,
        meaning="several encoders run as one in the same stages",
        source="Cornstarch 2",
        fewest_encoders=2,
        role_of_encoders="runs several encoders as one",
        takes_fed_encoders=False,
    ),
}
"""Every schedule by the name that selects it. Rows can be added at any time."""
