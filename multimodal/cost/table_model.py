"""Builds the step that a cost table describes."""

from collections import defaultdict
from collections.abc import Mapping

from multimodal.cost.cost_table import CostTable, UnitSeconds
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.checks.validate_plan import validate_plan
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan, split_layers
from multimodal.values.shape import StepShape


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
    plan = Plan({unit.name: _build_unit_plan(unit, table.units[unit.name].ranks) for unit in units})
    validate_plan(plan, graph=graph, world_size=plan.num_ranks)
    assignment = _build_assignment(graph, num_microbatches=table.num_microbatches)
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
    return Unit(
        name,
        role,
        Transformer(num_layers=num_stages, hidden_size=4, num_attention_heads=1, ffn_hidden_size=4),
        freeze_module=freeze_all or projector_only,
        freeze_projector=freeze_all,
    )


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


def _build_unit_plan(unit: Unit, ranks: tuple[int, ...]) -> UnitPlan:
    ranges = split_layers(unit.layers, num_stages=len(ranks))
    ranges_of_rank: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, layers in zip(ranks, ranges, strict=True):
        ranges_of_rank[rank].append(layers)
    return UnitPlan((Replica(tuple(Stage((rank,), tuple(layers)) for rank, layers in ranges_of_rank.items())),))


def _build_assignment(graph: ModelGraph, *, num_microbatches: int) -> Assignment:
    items = {unit.name: index for index, unit in enumerate(graph.encoders)}
    return Assignment(
        {name: (tuple((Atom(sample, items.get(name, -1)),) for sample in range(num_microbatches)),) for name in graph.unit_names}
    )
