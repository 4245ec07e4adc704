"""Seconds per stage as a paper publishes them, to be simulated without a model, a cluster or a plan, and the step behind them."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from multimodal.cost.cluster import TransferCost
from multimodal.cost.step_costs import ActionCosts, ComputeCost
from multimodal.values.action import Action, ActionKind, Place, SegmentRange, action_to_text
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.errors import ConfigError
from multimodal.values.file_form import FromFile
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import MOST_RANKS, Plan, Replica, Stage, UnitPlan, split_layers
from multimodal.values.shape import StepShape
from multimodal.values.typed_reader import Plain
from multimodal.values.validate import validate_plan

_TABLE_KEYS = ("num_microbatches", "send_seconds", "units")
_UNIT_KEYS = ("upstream", "stages", "ranks")
_MOST_MICROBATCHES = 100_000
_BACKWARD_KEYS = ("backward", "input_gradient", "weight_gradient")


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one stage, one value per microbatch."""

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    has_backward: bool
    """False if the table lists no backward; the gradients then take no time."""


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """One unit of a table."""

    upstream: tuple[str, ...]
    stages: tuple[StageSeconds, ...]
    ranks: tuple[int, ...]
    """The rank of each stage; a rank that appears twice holds two virtual stages."""


@dataclass(frozen=True, slots=True)
class CostTable(FromFile):
    """One replica per unit, one lane per stage unless ranks say otherwise; units come in a topological order."""

    num_microbatches: int
    send_seconds: float
    """Seconds from the end of a computation to its result's arrival in another lane; occupies nothing."""
    units: Mapping[str, UnitSeconds]

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "CostTable":
        """Build from the file's form; raises ConfigError naming the offending place.

        If a stage lists only `backward`, half of it counts as the input gradient and half as the weight gradient, as for the
        matrix products of a layer whose weights are trained; schedules that do not split backwards are not affected.
        """
        top = Plain(value, "cost table", ConfigError).mapping(known=_TABLE_KEYS, required=("num_microbatches", "units"))
        count = top["num_microbatches"].read(int, minimum=1, maximum=_MOST_MICROBATCHES)
        named = top["units"].mapping(at_least=1, expected="each unit's name with its upstream and stages")
        expected = "a mapping with upstream and stages"
        found = {
            name: replace(entry, where=f"unit '{name}'").mapping(known=_UNIT_KEYS, required=("stages",), expected=expected)
            for name, entry in named.items()
        }
        upstream = {name: _upstream(keys, names=tuple(named)) for name, keys in found.items()}
        units: dict[str, UnitSeconds] = {}
        next_rank = 0
        for name in _topological_order(upstream):
            keys, expected = found[name], "a list with at least one stage"
            entries = keys["stages"].entries(at_least=1, called=f"unit '{name}', stage", expected=expected)
            stages = tuple(_read_stage(stage, num_microbatches=count) for stage in entries)
            ranks = tuple(range(next_rank, next_rank + len(stages)))
            if "ranks" in keys:
                ranks = keys["ranks"].read(tuple[int, ...], minimum=0, maximum=MOST_RANKS - 1)
                if len(ranks) != len(stages):
                    keys["ranks"].fail(f"{len(stages)} stages but {len(ranks)} ranks; give one rank per stage")
            units[name] = UnitSeconds(upstream[name], stages, ranks)
            next_rank = max(next_rank, 1 + max(ranks))
        used = {rank for unit in units.values() for rank in unit.ranks}
        if used != set(range(len(used))):
            raise ConfigError(
                f"cost table: ranks {sorted(used)} leave gaps; number them from 0 to {len(used) - 1} over all units",
                place=("units",),
            )
        return cls(count, _seconds(top["send_seconds"]) if "send_seconds" in top else 0.0, units)


def _upstream(keys: Mapping[str, Plain], *, names: tuple[str, ...]) -> tuple[str, ...]:
    if "upstream" not in keys or keys["upstream"].value is None:
        return ()
    sources: list[str] = []
    for source in keys["upstream"].entries(expected="a list of unit names"):
        name = source.read(str)
        if name not in names:
            source.fail(f"names '{name}', which is no unit of the table ({', '.join(names)})")
        if name in sources:
            source.fail(f"names '{name}' again; keep one")
        sources.append(name)
    return tuple(sources)


def _topological_order(upstream: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Order units so that each comes after its upstream units; otherwise keep the given order."""
    order: list[str] = []
    while len(order) < len(upstream):
        ready = [name for name, sources in upstream.items() if name not in order and set(sources) <= set(order)]
        if not ready:
            circle = [name for name in upstream if name not in order]
            raise ConfigError(
                f"cost table: units {', '.join(circle)} wait for each other in a circle; correct their 'upstream'",
                place=("units", circle[0]),
            )
        order.append(ready[0])
    return tuple(order)


def _read_stage(stage: Plain, *, num_microbatches: int) -> StageSeconds:
    keys = stage.mapping(
        known=("forward", *_BACKWARD_KEYS), required=("forward",), expected="a mapping such as {forward: 0.1, backward: 0.2}"
    )
    given = {key: _per_microbatch(value, num_microbatches) for key, value in keys.items()}
    backward, input_gradient, weight_gradient = (given.get(key) for key in _BACKWARD_KEYS)
    if backward is not None and (input_gradient is not None or weight_gradient is not None):
        stage.fail("give either backward, or input_gradient and weight_gradient, not both")
    if (input_gradient is None) != (weight_gradient is None):
        missing = "input_gradient" if input_gradient is None else "weight_gradient"
        stage.fail(f"{missing} is missing beside its other half; give both (0.0 where there is none)")
    if backward is not None:
        half = tuple(seconds / 2 for seconds in backward)
        return StageSeconds(given["forward"], half, half, has_backward=True)
    nothing = (0.0,) * num_microbatches
    return StageSeconds(
        given["forward"], input_gradient or nothing, weight_gradient or nothing, has_backward=input_gradient is not None
    )


def _per_microbatch(value: Plain, num_microbatches: int) -> tuple[float, ...]:
    if not isinstance(value.value, (list, tuple)):
        return (_seconds(value),) * num_microbatches
    if len(value.value) != num_microbatches:
        value.fail(f"a list needs one value for each of the {num_microbatches} microbatches, found {len(value.value)} values")
    return tuple(_seconds(entry) for entry in value.entries())


def _seconds(value: Plain) -> float:
    return value.read(float, minimum=0, maximum=1e9)


@dataclass(frozen=True)
class TableCosts(ActionCosts):
    """The seconds of a cost table as `StepCosts`; sizes, FLOPs and reductions, which a table does not have, are 0.

    A backward takes its input gradient's seconds plus its weight gradient's. A message takes `send_seconds` and occupies nothing;
    gradients for a stage without a listed backward arrive at once, since no stage would send them. Behind its last microbatch the
    table begins anew.
    """

    table: CostTable

    def compute(self, action: Action) -> ComputeCost:
        """Seconds of one computation."""
        if isinstance(action.covers, SegmentRange):
            raise ConfigError(
                f"costs of {action_to_text(action)}: a cost table lists seconds of whole stages, not of segments; "
                "describe a cluster instead, or use a --schedule that runs whole stages"
            )
        stage, microbatch = self._stage(action.place), action.microbatch % self.table.num_microbatches
        if action.kind is ActionKind.FORWARD:
            return ComputeCost(stage.forward[microbatch])
        if action.kind is ActionKind.INPUT_GRADIENT:
            return ComputeCost(stage.input_gradient[microbatch])
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            return ComputeCost(stage.weight_gradient[microbatch])
        return ComputeCost(stage.input_gradient[microbatch] + stage.weight_gradient[microbatch])

    def transfer(self, send: Action) -> TransferCost:
        """Seconds of one message."""
        assert send.peer is not None, f"{send} has no peer"
        is_listed = send.kind is ActionKind.SEND_FORWARD or self._stage(send.peer).has_backward
        return TransferCost(self.table.send_seconds if is_listed else 0.0, 0.0)

    def _stage(self, place: Place) -> StageSeconds:
        return self.table.units[place.unit].stages[place.stage]


def build_table_step(table: CostTable) -> tuple[StepShape, Assignment]:
    """Build the step behind a table: one replica per unit, one transformer layer per stage, one sample per microbatch.

    Roles follow from the edges: one unit is the backbone, all others feed it (encoders) or are fed by it (generators). Frozen
    parts follow from the listed backwards: a unit without any is frozen, an encoder with one in its last stage only trains its
    projector, and a unit behind a trained one whose weight gradients take no time is frozen, too. Any other stage without a
    listed backward has one that takes no time, if other stages of its unit list one.

    Raises ConfigError if there is no such backbone, or if a gradient would have to pass a unit without a listed backward.
    """
    backbone = _find_backbone(table)
    trained: dict[str, bool] = {}
    units: list[Unit] = []
    for name, seconds in table.units.items():
        role = Role.BACKBONE if name == backbone else Role.GENERATOR if seconds.upstream else Role.ENCODER
        unit = _build_unit(name, seconds, role=role, is_behind_trained=any(trained[source] for source in seconds.upstream))
        _check_gradient_passes(name, seconds, trained)
        trained[name] = not (unit.freeze_module and unit.freeze_projector) or any(trained[source] for source in seconds.upstream)
        units.append(unit)
    edges = tuple((source, name) for name, seconds in table.units.items() for source in seconds.upstream)
    graph = ModelGraph(tuple(units), edges)
    plans = dict[str, UnitPlan]()
    for unit in units:
        ranges_of_rank, ranks = defaultdict[int, list[tuple[int, int]]](list), table.units[unit.name].ranks
        for rank, layers in zip(ranks, split_layers(unit.layers, num_stages=len(ranks)), strict=True):
            ranges_of_rank[rank].append(layers)
        plans[unit.name] = UnitPlan((Replica(tuple(Stage((rank,), tuple(held)) for rank, held in ranges_of_rank.items())),))
    plan = Plan(plans)
    validate_plan(plan, graph=graph, world_size=plan.num_ranks)
    items = {unit.name: index for index, unit in enumerate(graph.encoders)}
    samples = range(table.num_microbatches)
    placed = {name: (tuple((Atom(sample, items.get(name, -1)),) for sample in samples),) for name in graph.unit_names}
    assignment = Assignment(placed)
    return assignment.shape(graph, plan), assignment


def _find_backbone(table: CostTable) -> str:
    """Return the last unit that can be the backbone: all others are sources that feed it, or units that only it feeds."""
    for name in reversed(tuple(table.units)):
        upstream = set(table.units[name].upstream)
        others = {other: seconds.upstream for other, seconds in table.units.items() if other != name}
        if all((other in upstream and not sources) or sources == (name,) for other, sources in others.items()):
            return name
    chains = ", ".join(f"{name} <- [{', '.join(seconds.upstream)}]" for name, seconds in table.units.items())
    raise ConfigError(
        "cost table: one unit must be the backbone, fed by encoders (no upstream) and feeding generators (upstream: [backbone]); "
        f"found {chains}; change 'upstream'"
    )


def _build_unit(name: str, seconds: UnitSeconds, *, role: Role, is_behind_trained: bool) -> Unit:
    with_backward = [stage.has_backward for stage in seconds.stages]
    num_stages = len(with_backward)
    trains_nothing = not any(any(stage.weight_gradient) for stage in seconds.stages)
    freeze_all = not any(with_backward) or (is_behind_trained and trains_nothing)
    projector_only = role is Role.ENCODER and num_stages > 1 and with_backward == [False] * (num_stages - 1) + [True]
    shape = Transformer(num_layers=num_stages, hidden_size=4, num_attention_heads=1, ffn_hidden_size=4)
    return Unit(name, role, shape, freeze_module=freeze_all or projector_only, freeze_projector=freeze_all)


def _check_gradient_passes(name: str, seconds: UnitSeconds, trained: Mapping[str, bool]) -> None:
    without = [index for index, stage in enumerate(seconds.stages) if not stage.has_backward]
    sources = [source for source in seconds.upstream if trained[source]]
    earlier = [index for index, stage in enumerate(seconds.stages) if stage.has_backward]
    if without and (sources or (earlier and earlier[0] < without[-1])):
        stage = without[0] if sources else without[-1]
        origin = f"unit '{sources[0]}' upstream" if sources else f"stage {earlier[0]}"
        raise ConfigError(
            f"unit '{name}', stage {stage}: lists no backward, but {origin} has one, whose gradient comes through here; "
            "give input_gradient and weight_gradient (0.0 where they cost nothing)"
        )
