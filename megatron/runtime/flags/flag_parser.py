"""The argparse parser of all flags, grouped like the configuration; it says what to use in place of an unknown flag."""

import argparse
import difflib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from megatron.runtime.flags.configuration import GROUPS
from megatron.runtime.flags.field_flags import FieldFlag, field_flags, flag_of
from megatron.runtime.flags.megatron_flags import FREEZES, explain_megatron_flag, megatron_flag_names
from megatron.runtime.flags.unit_flags import LLM, MICRO_BATCH_ENDING, names_a_unit, unit_flags
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.typed_reader import split_options

CONFIG_HELP = "A file with any of these flags as keys. The command line wins over it."
UNITS_TITLE = "parallelism of the LLM, and of every other unit"
UNITS_HELP = (
    "Every unit of the model has flags with its name in front, for a unit 'vision': --vision-tensor-model-parallel-size, "
    "--vision-pipeline-model-parallel-size, --vision-context-parallel-size, --vision-data-parallel-size (short: --vision-tp, "
    "-pp, -cp, -dp), --vision-virtual-pipeline-model-parallel-size (--vision-vpp) and --vision-micro-batch-size. Give --model or "
    "--config along with --help to see those of your model."
)


BALANCE_OPTIONS: Mapping[str, tuple[str, str]] = {
    "granularity": ("--balance-granularity", "item or sample"),
    "num-microbatches": ("--balance-num-microbatches", "given, effective or predicted"),
    "merge-encoders": ("--merge-encoders", ""),
    "refine-encoders": ("--refine-encoders", ""),
    "costs": ("--unit-costs", "UNIT=FORM[:W]"),
    "rearrange-nodes": ("--rearrange-nodes", ""),
}
"""Option behind a balancer's name -> the flag that it stands for, and its values in words; empty for a switch."""


def unfold_balance(tokens: Sequence[str]) -> list[str]:
    """Unfold `--balance NAME:key=value,key`, where `costs` may come several times, into flags; raises ConfigError."""
    found: list[str] = []
    costs: list[str] = []
    for before, token in zip(("", *tokens), tokens, strict=False):
        start = "--balance=" if token.startswith("--balance=") else ""
        if not start and before != "--balance":
            found.append(token)
            continue
        name, options = split_options(token.removeprefix(start))
        found.append(start + name)
        for key, value in filter(any, options):
            flag, expected = BALANCE_OPTIONS.get(key, ("", ""))
            if not flag or bool(value) != bool(expected):
                known = ", ".join(f"{each}={values}" if values else each for each, (_, values) in BALANCE_OPTIONS.items())
                raise ConfigError(f"--balance {token.removeprefix(start)}: '{key}' is no such option; known are {known}")
            if key == "costs":
                costs.append(value)
            else:
                found.append(f"{flag}={value}" if value else flag)
    return [*found, "--unit-costs", *costs] if costs else found


def unfold_freezes(tokens: Sequence[str], graph: ModelGraph | None) -> list[str]:
    """Unfold Megatron's switches (`FREEZES`) into --freeze and --freeze-projector; raises ConfigError without such a unit."""
    found = [token for token in tokens if token not in FREEZES]
    for switch in dict.fromkeys(token for token in tokens if token in FREEZES):
        flag, whose = FREEZES[switch]
        if graph is None:
            continue
        units = [graph.backbone] if whose == "backbone" else [unit for unit in graph.encoders if unit.image is not None]
        if not units:
            raise ConfigError(f"{switch}: the model has no encoder of images; leave it out, or name units with {flag}")
        names = [unit.name for unit in units]
        index = found.index(flag) + 1 if flag in found else len(found)
        found[index:index] = names if flag in found else [flag, *names]
    return found


class FlagParser(argparse.ArgumentParser):
    """A parser that raises ConfigError, takes no abbreviations, and never lets one flag silently replace another."""

    def __init__(self, graph: ModelGraph | None) -> None:
        super().__init__(
            prog="pretrain_mllm.py",
            usage="torchrun --nproc-per-node N pretrain_mllm.py --config FILE.yaml [flags]",
            description="Train a multimodal model, each of its units with its own parallelism.",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=34, width=110),
        )
        self._graph = graph
        self.add_argument("--config", action=_StoreOnce, metavar="FILE.yaml", help=CONFIG_HELP)
        for name, group in GROUPS.items():
            arguments = self.add_argument_group(name, (group.__doc__ or "").strip())
            for flag in field_flags(name):
                _add_field(arguments, flag)
            for unit, flags in unit_flags(graph).items() if name == "parallelism" else ():
                title = f"parallelism of unit '{unit}' ({graph.unit(unit).role})" if graph else UNITS_TITLE
                arguments = self.add_argument_group(title, None if graph else UNITS_HELP)
                for flag in flags:
                    _add_field(arguments, flag)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of ending the process."""
        raise ConfigError(message)

    def parse_given(self, tokens: Sequence[str]) -> dict[str, Any]:
        """Return destination -> value of the flags that were given, and of no others. Raises ConfigError for unknown flags."""
        namespace, rest = self.parse_known_args(unfold_freezes(unfold_balance(tokens), self._graph))
        self.reject_unknown(sorted(rest, key=lambda token: not token.startswith("--")))
        return {name: value for name, value in vars(namespace).items() if name != _SPELLED}

    def reject_unknown(self, tokens: Sequence[str]) -> None:
        """Raise ConfigError for all unknown flags, each with the flag to use instead."""
        flags = dict.fromkeys(token.split("=")[0] for token in tokens if token.startswith("-"))
        if self._graph is None:  # Perhaps a unit's flag, or its value; the error to report is the missing --model.
            flags = dict.fromkeys(flag for flag in flags if not names_a_unit(flag))
        elif not flags and tokens:
            raise ConfigError(
                f"unexpected argument '{tokens[0]}'; flags start with --, and one that takes a single value got two"
            )
        answers = {flag: explain_unknown(flag, spellings=self.actions, graph=self._graph) for flag in flags}
        if len(answers) > 1:
            raise ConfigError("unknown flags " + ", ".join(f"{flag} ({answer})" for flag, answer in answers.items()))
        for flag, answer in answers.items():
            raise ConfigError(f"unknown flag {flag}; {answer}")

    @property
    def actions(self) -> Mapping[str, argparse.Action]:
        """Every spelling of every flag, with its action."""
        return self._option_string_actions


_SPELLED = " spelled"
"""Destination of the spelling of each given flag in the namespace, for messages; no flag can have this name."""


class _StoreOnce(argparse.Action):
    """Stores a value; a second, different value of the same flag is an error. A switch's value is in `const`, as a tuple."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        value = self.const[0] if self.const else tuple(values) if isinstance(values, list) else values
        shown = " ".join(map(str, (option_string, *(() if self.const else value if isinstance(value, tuple) else (value,)))))
        earlier: dict[str, str] = getattr(namespace, _SPELLED, {})
        if self.dest in earlier and getattr(namespace, self.dest) != value:
            parser.error(f"{earlier[self.dest]} and {shown} set the same thing to different values; keep one")
        setattr(namespace, self.dest, value)
        setattr(namespace, _SPELLED, {**earlier, self.dest: shown})


def _add_field(arguments: Any, flag: FieldFlag) -> None:
    if flag.shorthand is not None:
        name, value, opposite_value = flag.shorthand
        spellings, const = (flag_of(name), flag_of(f"no_{name}")), (value, opposite_value)
        _add_switch(arguments, spellings=spellings, dest=flag.name, const=const, help_text=f"The same as {flag.flag} {value}.")
    if flag.opposite is not None:
        const = (not flag.default, flag.default)
        _add_switch(arguments, spellings=(flag.flag, flag.opposite), dest=flag.name, const=const, help_text=flag.help)
        return
    default = " (required)" if flag.is_required else "" if flag.default in (None, ()) else f" (default: {flag.default})"
    arguments.add_argument(
        flag.flag,
        *flag.also,
        action=_StoreOnce,
        dest=flag.name,
        type=flag.read,
        choices=(flag.choices or None) if flag.parse is str else None,
        nargs="+" if flag.is_list else None,
        metavar=flag.metavar,
        help=(flag.help + default).replace("%", "%%"),
    )


def _add_switch(arguments: Any, *, spellings: tuple[str, str], dest: str, const: tuple[Any, Any], help_text: str) -> None:
    """Add a switch; its opposite, which overrules a configuration file, is accepted but not listed."""
    shown = help_text.replace("%", "%%")
    arguments.add_argument(spellings[0], action=_StoreOnce, nargs=0, dest=dest, const=(const[0],), help=shown)
    arguments.add_argument(spellings[1], action=_StoreOnce, nargs=0, dest=dest, const=(const[1],), help=argparse.SUPPRESS)


ALIKE = 0.84
"""Ratio of difflib from which on a whole flag counts as misspelt."""
WORDS_ALIKE = 0.65
"""The same ratio for each of its words, so that `--save-optim` is not taken for `--load-optim`."""


def explain_unknown(flag: str, *, spellings: Collection[str], graph: ModelGraph | None) -> str:
    """Return the flag to use instead of an unknown one; spellings: of all flags; graph: None if the model is not known."""
    name = flag.lstrip("-").replace("_", "-")
    if f"--{name}" in spellings:
        return f"it is spelt --{name}"
    if answer := explain_megatron_flag(name):
        return answer
    unit, ending = "", name
    for each in (*graph.unit_names, LLM) if graph else ():
        if name.startswith(prefix := each.replace("_", "-") + "-"):
            unit, ending = each, name.removeprefix(prefix)
            break
    if unit and (answer := explain_megatron_flag(ending)):
        return answer.replace("of a unit", f"of unit '{unit}'")
    if unit and ending == MICRO_BATCH_ENDING:
        return f"'{unit}' is no encoder, and follows --{MICRO_BATCH_ENDING}"
    units = f"the model's units are {', '.join(graph.unit_names)}" if graph and names_a_unit(flag) and not unit else ""
    own = {spelling.lstrip("-") for spelling in spellings}
    likeness, likest = max((_likeness(name, known), known) for known in sorted(own | megatron_flag_names()))
    guess = ""
    if likeness:
        answer = explain_megatron_flag(likest) if likest not in own else ""
        guess = f"did you mean Megatron's --{likest}? {answer[0].upper()}{answer[1:]}" if answer else f"did you mean --{likest}?"
    return "; ".join(part for part in (units, guess) if part) or "--help lists all flags"


def _likeness(name: str, known: str) -> float:
    """Return the similarity of two names: 1 if only their dashes differ, 0 if they must mean different things."""
    words, known_words = name.split("-"), known.split("-")
    if "".join(words) == "".join(known_words):
        return 1.0
    if len(words) != len(known_words):
        return 0.0
    ratios = [difflib.SequenceMatcher(None, *pair).ratio() for pair in zip(words, known_words, strict=True)]
    ratio = difflib.SequenceMatcher(None, f"--{name}", f"--{known}").ratio()
    return ratio if ratio >= ALIKE and min(ratios) >= WORDS_ALIKE else 0.0
