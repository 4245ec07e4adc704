"""Write docs/flags.md from the configuration dataclasses: `python -m megatron.runtime.flags_page docs/flags.md`."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.runtime.configuration import GROUPS
from megatron.runtime.cross_checks import EXCLUSIVE_FLAGS, IGNORED_FLAGS, shown_flag
from megatron.runtime.field_flags import FieldFlag, field_docstrings, field_flags
from megatron.runtime.unit_flags import MICRO_BATCH_HELP, SIZE_SPELLINGS, plain_endings
from multimodal.plan.unit_sizes import UnitSizes

INTRODUCTION = """\
# The flags of pretrain_mllm.py

This page is generated from `megatron/runtime/configuration.py` by `python -m megatron.runtime.flags_page docs/flags.md`.

    torchrun --nproc-per-node 5 pretrain_mllm.py --config examples/digits/config.yaml --vision-dp 2 --llm-pp 3

- Names are Megatron's wherever Megatron has the thing. There are no abbreviations other than those listed.
- **`--config FILE.yaml`** holds any of these flags as keys, with dashes or underscores, with or without leading dashes, full or
  short names (`llm-pp: 2`). Switches are `true` or `false`; flags with several values are lists.
- **The command line wins.** It also wins over what excludes it: `--plan p.yaml` on the command line sets aside the sizes
  in the file, `--eval-iters 0` its `eval-interval`, `--colocate-units` its data parallel sizes. Every switch has an opposite for
  this purpose: `--no-sequence-parallel`, `--load-optim`.
- **Paths of inputs** in a configuration file (`model`, `plan`, `data-path`, `tokenizer-model`) are looked up beside that
  file first.
- **A flag that would be ignored is an error that says why**, and so are a misspelt flag and two flags that set the same thing to
  different values.
- `--help` lists all flags; with `--model` or `--config` it also lists those of the model's units.
"""

UNITS = """\
### The sizes of a unit

Every unit of the model has these flags, with the unit's name in place of `UNIT` (underscores as dashes). The LLM also answers to
`llm`, whatever the model file calls it, and to Megatron's flags without a name.
"""

PLACEMENT = """\
### Which ranks a unit gets

- By default every unit has ranks of its own (*disaggregated*): the encoders first, in the order of the model file, then the LLM.
  The units' ranks, `tp x cp x pp x dp` each, must add up to the number of processes. One unit's data parallel size may be left
  out; it then follows.
- With `--colocate-units` every unit spans all ranks, and its data parallel size is `processes / (tp x cp x pp)`. This is also
  what happens, without the flag, with one process and no size above 1.
- With `--plan FILE.yaml` the plan says everything.

Inside a unit ranks are ordered as in Megatron: tensor parallel fastest, then context, then data, then pipeline parallel:
`rank = first + ((pp_index x dp + dp_index) x cp + cp_index) x tp + tp_index`.
"""


def render_flags_page() -> str:
    """Render the whole page as Markdown."""
    return "\n".join(_sections()).rstrip() + "\n"


def _sections() -> Iterator[str]:
    yield INTRODUCTION
    for name, group in GROUPS.items():
        yield f"## {name.capitalize()}\n\n{(group.__doc__ or '').strip()}\n"
        yield _table(("flag", "default", "meaning"), (_row(flag) for flag in field_flags(group)))
        if name == "parallelism":
            yield UNITS
            yield _table(("flag", "also", "LLM, as in Megatron", "meaning"), _unit_rows())
            yield PLACEMENT
    yield "## Flags that need another\n\nGiven where they have no effect, these are errors:\n"
    yield _table(("flag", "error"), ((f"`{shown_flag(row.name)}`", row.reason) for row in IGNORED_FLAGS))
    yield "These exclude each other:\n"
    pairs = [
        *EXCLUSIVE_FLAGS,
        ("plan", "UNIT.tensor_parallel_size", "a plan already has every unit's sizes (likewise -pp, -cp, -dp)"),
    ]
    yield _table(("flags", "because"), ((f"`{shown_flag(a)}`, `{shown_flag(b)}`", reason) for a, b, reason in pairs))


def _row(flag: FieldFlag) -> tuple[str, str, str]:
    spelling = f"`{flag.flag}{' ' + flag.metavar if flag.metavar else ''}{' ...' if flag.is_list else ''}`"
    if flag.shorthand is not None:
        spelling += f"; `--{flag.shorthand[0].replace('_', '-')}` for `{flag.shorthand[1]}`"
    default = "required" if flag.is_required else "" if flag.default in (None, ()) or flag.opposite else f"`{flag.default}`"
    bounds = f" Must be {flag.bounds()}." if flag.bounds() else ""
    return spelling, default, flag.help + bounds


def _unit_rows() -> Iterator[tuple[str, str, str, str]]:
    for name, spelling in SIZE_SPELLINGS.items():
        shorter = ", ".join(f"`--UNIT-{ending}`" for ending in spelling.endings[1:])
        plain = ", ".join(f"`--{ending}`" for ending in plain_endings(name))
        yield f"`--UNIT-{spelling.long} N`", shorter, plain, field_docstrings(UnitSizes)[name]
    yield "`--UNIT-micro-batch-size N`", "", "", MICRO_BATCH_HELP.replace("this encoder", "this unit, an encoder")


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_flags_page())
