"""Write docs/flags.md from the configuration dataclasses: `python -m megatron.runtime.flags_page docs/flags.md`."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.runtime.configuration import GROUPS, VIRTUAL_STAGE_SCHEDULES
from megatron.runtime.cross_checks import ENCODER_FLAGS, EXCLUSIVE_FLAGS, EXCLUSIVE_SIZES, IGNORED_FLAGS, shown_flag
from megatron.runtime.field_flags import FieldFlag, field_docstrings, field_flags
from megatron.runtime.unit_flags import MICRO_BATCH_HELP, SIZE_SPELLINGS, plain_endings
from multimodal.plan.unit_sizes import UnitSizes

INTRODUCTION = """\
# The flags of pretrain_mllm.py

This page is generated from the configuration's dataclasses and the tables of rules by `python -m megatron.runtime.flags_page
docs/flags.md`.

    torchrun --nproc-per-node 5 pretrain_mllm.py --config examples/digits/config.yaml --vision-dp 2 --llm-pp 3

- Names are Megatron's wherever Megatron has the thing. There are no abbreviations other than those listed.
- **`--config FILE.yaml`** holds any of these flags as keys, with dashes or underscores, with or without leading dashes, full or
  short names (`llm-pp: 2`). Switches are `true` or `false`; flags with several values are lists.
- **The command line wins.** It also wins over what excludes it: `--plan p.yaml` on the command line sets aside the sizes in
  the file, `--eval-iters 0` its `eval-interval`, `--colocate-units` its data parallel sizes. Every switch has an opposite for
  this purpose: `--no-sequence-parallel`, `--load-optim`.
- **Paths of inputs** in a configuration file (INPUT_PATHS) are looked up beside that file
  first.
- **A flag that would be ignored is an error that says why** (the tables at the end), and so are two flags that set the same
  thing to different values.
- **An unknown flag is an error that says what to write instead**: of several hundred of Megatron-LM's flags whether they
  belong in the model file, are always on, are called otherwise here or are not available; of a misspelt one what must have
  been meant.
- `--help` lists all flags; with `--model` or `--config` it also lists those of the model's units.
"""

UNITS = """\
### The sizes of a unit

Every unit of the model has these flags, with the unit's name in place of `UNIT` (underscores as dashes). The LLM also answers
to `llm`, whatever the model file calls it, and to Megatron's flags without a name. Its data parallel size has no such flag.
"""

VIRTUAL_STAGES = """\
### Virtual stages

`--llm-pp 2 --llm-vpp 2` cuts the LLM into 4 layer ranges and gives rank 0 the first and the third, rank 1 the second and the
fourth, as Megatron deals model chunks; the embedding is in the first range, the head in the last. Transformer layers are
divided as evenly as they can be, and microbatches need not come out even with the pipeline size. The schedules that use such
stages are VIRTUAL; `zb-v` wants exactly 2 per rank and folds them: rank 0 has the first and the last, rank 1 the two between.
Without virtual stages `interleaved-1f1b` and `zb-v` are errors, as virtual stages are with any other schedule. A unit with
one pipeline stage has none. Encoders and generators take the same flags. (`interleaved-1f1b` also takes units without virtual
stages that lie on one grid of ranks one after another, `--colocate-units --vision-pp 2 --llm-pp 2`: each is then one chunk of
every rank.)
"""

PLACEMENT = """\
### Which ranks a unit gets

- By default every unit has ranks of its own (*disaggregated*): the encoders first, in the order of the model file, then the
  LLM, then generators. The units' ranks, `tp x cp x pp x dp` each, must add up to the number of processes. One unit's data
  parallel size may be left out; it then follows.
- With `--colocate-units` every unit spans all ranks, and its data parallel size is `processes / (tp x cp x pp)`. This is also
  what happens, without the flag, with one process and no size above 1.
- With `--plan FILE.yaml` the plan says everything.

Inside a unit ranks are ordered as in Megatron: tensor parallel fastest, then context, then data, then pipeline parallel:
`rank = first + ((pp_index x dp + dp_index) x cp + cp_index) x tp + tp_index`.
"""


PLAN_DEPENDENT = """\
Errors are also:

- without any encoder in the model ENCODER_FLAGS;
- `--sequence-parallel` and `--tp-comm-overlap` where every tensor parallel size is 1; `--context-parallel-distribution` and
  `--context-parallel-block-size` where every context parallel size is 1; `--data-parallel-sharding-strategy
  optim_grads_params`, `gather-parameters` and `reduce-by-layer` where no two ranks hold the same weights;
- schedules that would be `1f1b` under another name: `dip` and `encoders-replicated` without an encoder, `encoders-colocated`
  with fewer than two, `encoders-replicated` with an LLM of one stage, `eager-1f1b` where every rank holds the whole model;
- passes that could change nothing: `fill` and `defer-receives` where every rank holds the whole model, `delay-forward` where
  the LLM shares all its ranks with other units, `split-backward` without an encoder, and any pass named twice.

What a step's samples decide is no error: `split-backward` may find no microbatch with several consumers, `dip-16` fewer than
16 microbatches. Nor are `reduce-by-layer` under a schedule that splits all backwards and `gather-parameters` in float64,
whose optimizer is not shared: both run, and find nothing.
"""


def render_flags_page() -> str:
    """Render the whole page as Markdown."""
    return "\n".join(_sections()).rstrip() + "\n"


def _sections() -> Iterator[str]:
    paths = [flag.flag for group in GROUPS.values() for flag in field_flags(group) if flag.is_input_path]
    yield INTRODUCTION.replace("INPUT_PATHS", ", ".join(f"`{path.removeprefix('--')}`" for path in paths))
    for name, group in GROUPS.items():
        yield f"## {name.capitalize()}\n\n{(group.__doc__ or '').strip()}\n"
        yield _table(("flag", "default", "meaning"), (_row(flag) for flag in field_flags(group)))
        if name == "parallelism":
            yield UNITS
            yield _table(("flag", "also", "LLM, as in Megatron", "meaning"), _unit_rows())
            yield VIRTUAL_STAGES.replace("VIRTUAL;", ", ".join(f"`{name}`" for name in VIRTUAL_STAGE_SCHEDULES) + ";")
            yield PLACEMENT
    yield "## Flags that need another\n\nGiven where they have no effect, these are errors:\n"
    yield _table(("flag", "error"), ((f"`{shown_flag(row.name)}`", row.reason) for row in IGNORED_FLAGS))
    yield PLAN_DEPENDENT.replace("ENCODER_FLAGS", ", ".join(f"`{shown_flag(name)}`" for name in ENCODER_FLAGS))
    yield "These exclude each other:\n"
    pairs = [
        *EXCLUSIVE_FLAGS,
        *((f"UNIT.{first}", f"UNIT.{second}", reason) for first, second, reason in EXCLUSIVE_SIZES),
        ("plan", "UNIT.tensor_parallel_size", "a plan already has every unit's sizes (likewise all others)"),
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
