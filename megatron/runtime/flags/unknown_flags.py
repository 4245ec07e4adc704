"""What to say of a flag that there is none of: what became of Megatron's, or the spelling that must have been meant."""

import difflib
from collections.abc import Collection, Iterable

from megatron.runtime.flags.megatron_flags import explain_megatron_flag, megatron_flag_names
from megatron.runtime.flags.unit_flags import LLM, MICRO_BATCH_ENDING, names_a_unit
from multimodal.values.model_graph import ModelGraph

ALIKE = 0.84
"""Ratio of difflib from which on a whole flag counts as misspelt."""
WORDS_ALIKE = 0.65
"""The same for each of its words, so that `--save-optim` is not taken for `--load-optim`."""


def explain_unknown(flag: str, *, spellings: Collection[str], graph: ModelGraph | None) -> str:
    """Say what to write instead of an unknown flag.

    flag: with its dashes. spellings: of all flags that there are. graph: None where the model is not known.
    """
    name = flag.lstrip("-").replace("_", "-")
    if f"--{name}" in spellings:
        return f"it is spelt --{name}"
    if answer := explain_megatron_flag(name):
        return answer
    unit, ending = _split_unit(name, graph)
    if unit and (answer := explain_megatron_flag(ending)):
        return answer.replace("of a unit", f"of unit '{unit}'")
    if unit and ending == MICRO_BATCH_ENDING:
        return f"'{unit}' is no encoder, and follows --{MICRO_BATCH_ENDING}"
    units = f"the model's units are {', '.join(graph.unit_names)}" if graph and names_a_unit(flag) and not unit else ""
    return "; ".join(part for part in (units, _guess(name, spellings)) if part) or "--help lists all flags"


def _split_unit(name: str, graph: ModelGraph | None) -> tuple[str, str]:
    """The unit that a flag begins with, and the rest; empty where it begins with none."""
    for unit in (*graph.unit_names, LLM) if graph else ():
        prefix = unit.replace("_", "-") + "-"
        if name.startswith(prefix):
            return unit, name.removeprefix(prefix)
    return "", name


def _guess(name: str, spellings: Iterable[str]) -> str:
    """The flag that is spelt almost like this one."""
    own = {spelling.lstrip("-") for spelling in spellings}
    close = max((_likeness(name, known), known) for known in sorted(own | megatron_flag_names()))
    if close[0] == 0.0:
        return ""
    answer = explain_megatron_flag(close[1]) if close[1] not in own else ""
    return f"did you mean Megatron's --{close[1]}? {answer[0].upper()}{answer[1:]}" if answer else f"did you mean --{close[1]}?"


def _likeness(name: str, known: str) -> float:
    """1 for names that differ in dashes only, 0 for such as must mean something else."""
    words, known_words = name.split("-"), known.split("-")
    if "".join(words) == "".join(known_words):
        return 1.0
    if len(words) != len(known_words):
        return 0.0
    ratios = [difflib.SequenceMatcher(None, *pair).ratio() for pair in zip(words, known_words, strict=True)]
    ratio = difflib.SequenceMatcher(None, f"--{name}", f"--{known}").ratio()
    return ratio if ratio >= ALIKE and min(ratios) >= WORDS_ALIKE else 0.0
