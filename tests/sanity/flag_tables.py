"""What docs/flags.md takes from the configuration; `python -m tests.sanity.flag_tables` writes its tables anew."""

from collections.abc import Callable, Iterable, Iterator

from megatron.runtime.flags.configuration import GROUPS, UNIT_RATES
from megatron.runtime.flags.field_flags import FieldFlag, all_flags, field_docstrings, field_flags
from megatron.runtime.flags.ignored_flags import ENCODER_FLAGS, EXCLUSIVE_FLAGS, EXCLUSIVE_SIZES, IGNORED_FLAGS
from megatron.runtime.flags.unit_flags import MICRO_BATCH_HELP, SIZE_SPELLINGS, plain_endings, shown_flag
from multimodal.plan.plans_of_sizes import UnitSizes
from multimodal.schedule.builders import BUILDERS, ScheduleRow, VirtualStages
from multimodal.schedule.passes import PASSES, Need
from tests.sanity.repository import ROOT

PAGE = ROOT / "docs" / "flags.md"


def with_tables(text: str) -> str:
    """Put each table in the place of the first one after its line."""
    for line, table in tables():
        before, _, rest = text.partition(f"\n{line}\n")
        start = rest.index("\n| ") + 1
        end = f"{rest}\n".index("\n\n", start) + 1
        text = f"{before}\n{line}\n{rest[:start]}{table}{rest[end:]}"
    return text


def tables() -> Iterator[tuple[str, str]]:
    """Yield the tables, each with a line of the page before it."""
    for name in GROUPS:
        yield f"## {name.capitalize()}", _table(("flag", "default", "meaning"), map(_row, field_flags(name)))
    yield "### The sizes of a unit", _table(("flag", "also", "LLM, as in Megatron", "meaning"), _unit_rows())
    rates = (
        (f"`--UNIT-{name.replace('_', '-')} {'N' if name.endswith('iters') else 'X'}`", meaning)
        for name, meaning in UNIT_RATES.items()
    )
    yield "### The rates of a unit", _table(("flag", "meaning"), rates)
    errors = ((f"`{shown_flag(row.name)}`", row.reason) for row in IGNORED_FLAGS)
    yield "## Flags that need another", _table(("flag", "error"), errors)
    pairs = [
        *EXCLUSIVE_FLAGS,
        *((f"UNIT.{first}", f"UNIT.{second}", reason) for first, second, reason in EXCLUSIVE_SIZES),
        ("plan", "UNIT.tensor_parallel_size", "a plan already has every unit's sizes (likewise all others)"),
    ]
    rows = ((f"`{shown_flag(a)}`, `{shown_flag(b)}`", reason) for a, b, reason in pairs)
    yield "These exclude each other:", _table(("flags", "because"), rows)


def phrases() -> Iterator[str]:
    """Yield the phrases of the page that list flags, schedules and passes."""
    yield f"in a configuration file ({_listed(flag.flag.removeprefix('--') for flag in all_flags() if flag.is_input_path)})"
    virtual, folded = (
        _schedules(lambda row: row.virtual_stages is not VirtualStages.NO_USE),
        _schedules(lambda row: row.is_folded),
    )
    yield f"stages are {virtual}; {folded} wants exactly 2"
    yield f"these are errors: {_schedules(lambda row: row.layout is not None)};"
    yield f"without any encoder in the model {_listed(map(shown_flag, ENCODER_FLAGS))};"
    schedules = {
        "without an encoder": _schedules(lambda row: row.fewest_encoders == 1),
        "with fewer than two encoders": _schedules(lambda row: row.fewest_encoders > 1),
        "where every rank holds the whole model": _schedules(lambda row: row.needs_messages),
    }
    yield f"under another name: {', '.join(f'{names} {where}' for where, names in schedules.items())};"
    passes = {need: _listed(name for name, row in PASSES.items() if row.need is need) for need in Need}
    yield f"could change nothing: {', '.join(f'{names} without {need.value}' for need, names in passes.items() if names)};"
    undone = _listed(f"{later}` after `{name}" for name, row in PASSES.items() for later in row.undone_by)
    yield f"any pass named twice; and {undone}, which it would undo"


def _schedules(is_meant: Callable[[ScheduleRow], bool]) -> str:
    return _listed(name for name, row in BUILDERS.items() if is_meant(row))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(flag: FieldFlag) -> tuple[str, str, str]:
    spelling = f"`{flag.flag}{' ' + flag.metavar if flag.metavar else ''}{' ...' if flag.is_list else ''}`"
    if flag.shorthand is not None:
        spelling += f"; `--{flag.shorthand[0].replace('_', '-')}` for `{flag.shorthand[1]}`"
    default = "required" if flag.is_required else "" if flag.default in (None, ()) or flag.opposite else f"`{flag.default}`"
    return spelling, default, flag.help + (f" Must be {flag.range_in_words(*flag.bounds)}." if flag.bounds else "")


def _unit_rows() -> Iterator[tuple[str, str, str, str]]:
    for name, (long, *others) in SIZE_SPELLINGS.items():
        shorter = ", ".join(f"`--UNIT-{ending}`" for ending in others)
        plain = ", ".join(f"`--{ending}`" for ending in plain_endings(name))
        yield f"`--UNIT-{long} N`", shorter, plain, field_docstrings(UnitSizes)[name]
    yield "`--UNIT-micro-batch-size N`", "", "", MICRO_BATCH_HELP.replace("this encoder", "this unit, an encoder")


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
