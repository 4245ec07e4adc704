"""Tables of docs pages that say what rows of registries say: `python -m tests.sanity.registry_tables` writes them anew."""

import math
import re
from collections.abc import Callable, Iterable, Iterator

from benchmarks.baselines import COMPARED
from multimodal.balance import BALANCERS
from multimodal.cost.engine_limits import ENGINE_LIMITS
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.schedule.builders import BUILDERS, ScheduleRow
from multimodal.schedule.passes import PASSES
from tests.sanity.repository import ROOT


def schedule_table() -> str:
    """What flags and planners read of each schedule."""
    header = ("schedule", "does", "keeps", "backwards", "virtual stages", "needs", "source")
    return _table(
        header,
        (
            (
                f"`{name}` is `{row.alias_of}`" if row.alias_of else f"`{name}`",
                row.meaning,
                _kept(row),
                "in two" if row.splits_backwards else "whole",
                "two, in a V" if row.is_folded else row.virtual_stages.value,
                ", ".join(_needs(row)),
                row.source,
            )
            for name, row in BUILDERS.items()
        ),
    )


def _kept(row: ScheduleRow) -> str:
    if math.isinf(row.in_flight):
        return "all of a round" if row.num_rounds > 1 else "all"
    if row.fills_memory:
        return "as memory allows"
    return "as 1F1B" if row.in_flight == 1 else f"{row.in_flight:g} x 1F1B"


def parameter_table() -> str:
    """What may follow a schedule's name."""
    return _table(
        ("schedule", "key", "values"),
        (
            (f"`{name}`", f"`{key}`", parameter.values or "none: `NAME:KEY` alone")
            for name, row in BUILDERS.items()
            if not row.alias_of
            for key, parameter in row.parameters.items()
        ),
    )


def _needs(row: ScheduleRow) -> Iterator[str]:
    if row.layout is not None:
        yield "stages of its shape"
    if row.fewest_encoders:
        yield f"{row.fewest_encoders} encoder{'s' if row.fewest_encoders > 1 else ''} or more"
    if row.needs_messages:
        yield "ranks that wait for each other"
    if row.needs_costs:
        yield "durations"


def pass_table() -> str:
    """What flags and planners read of each pass."""
    header = ("pass", "does", "changes nothing without", "backwards in two", "sharded weights", "source")
    return _table(
        header,
        (
            (
                f"`{name}`",
                row.meaning,
                row.need.value,
                _yes(row.splits_backwards),
                "works" if row.works_with_sharded_weights else "refused",
                row.source,
            )
            for name, row in PASSES.items()
        ),
    )


def balancer_table() -> str:
    """What flags, `auto` and planners read of each balancer."""
    header = ("balancer", "keeps samples whole", "places items", "needs costs", "tried at once on", "source")
    return _table(
        header,
        (
            (
                f"`{name}`",
                _yes(row.keeps_samples_whole),
                _yes(row.places_items),
                _yes(row.needs_costs),
                "; ".join(sorted(placement.value for placement in row.tried_first_on)),
                row.source,
            )
            for name, row in BALANCERS.items()
        ),
    )


def planner_table() -> str:
    return _table(
        ("planner", "what it does", "source"), ((f"`{row.name}`", row.meaning, row.source) for row in COMPARED.values())
    )


def layer_table() -> str:
    """Where each kind of layer may stand, and what it is."""
    return _table(
        ("layer kind", "is", "in"),
        (
            (f"`{name}`", (kind.__doc__ or "").partition("\n")[0], ", ".join(role.value for role in kind.roles))
            for name, kind in LAYER_KINDS.items()
        ),
    )


def engine_table() -> str:
    """What layers of Transformer Engine leave to others."""
    return _table(
        ("where", "instead", "who asks for both is told"),
        (
            (limit.use, limit.instead.value, re.sub(r"\{c\.\w+\.(\w+)\}", lambda found: found[1].upper(), limit.message))
            for limit in ENGINE_LIMITS
        ),
    )


TABLES: tuple[tuple[str, Callable[[], str]], ...] = (
    ("schedule.md", schedule_table),
    ("schedule.md", parameter_table),
    ("passes.md", pass_table),
    ("balance.md", balancer_table),
    ("planning.md", planner_table),
    ("registries.md", layer_table),
    ("gpu.md", engine_table),
)
"""Pages and their tables."""


def _yes(fact: bool) -> str:
    return "yes" if fact else ""


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(header), *map(tuple, rows)]
    written = [" ".join(["|", " | ".join(cells), "|"]).replace("|  |", "| |").replace("|  |", "| |") for cells in lines]
    return "\n".join([written[0], "|" + "---|" * len(lines[0]), *written[1:]])


def main() -> None:
    """Put each table in the place of the one that begins as it does."""
    for name, render in TABLES:
        path, table = ROOT / "docs" / name, render()
        first = re.escape(table.split("\n", 1)[0])
        text = path.read_text()
        path.write_text(re.sub(rf"^{first}\n(\|.*\n)+", lambda _, table=table: table + "\n", text, flags=re.MULTILINE))


if __name__ == "__main__":
    main()
