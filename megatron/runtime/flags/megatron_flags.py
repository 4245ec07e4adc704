"""Answers to Megatron-LM's flags that Braid does not have, for error messages; the tables are in megatron_flags.yaml."""

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from multimodal.values.file_form import read_table

ANSWERS = {
    "in_model_file": "it belongs in the model file, as '{}' of a unit",
    "called": "use {} here",
    "known_elsewhere": "use {} here",
    "always_on": "leave it out: always, {}",
    "not_available": "not available: {}",
    "multimodal": "{}",
}
"""Table -> what its answers say of a flag."""

FREEZES = {
    "--freeze-LM": ("--freeze", "backbone"),
    "--freeze-ViT": ("--freeze", "image"),
    "--freeze-vision-projection": ("--freeze-projector", "image"),
}
"""Megatron's switches that work here -> flag, and whose: the backbone's, or all encoders' of images."""


@cache
def megatron_flags() -> dict[str, dict[str, str]]:
    """Return the tables: name -> answer -> flags, without dashes in front; `*` stands for any beginning or end of a name."""
    return read_table(Path(__file__).with_suffix(".yaml"))


def explain_megatron_flag(name: str) -> str:
    """Explain a flag of Megatron (or another program), given without dashes in front; empty for a flag in no table."""
    for table, answer in ANSWERS.items():
        for key, names in megatron_flags()[table].items():
            if any(fnmatchcase(name, pattern) for pattern in names.split()):
                return answer.format(key)
    return ""


def megatron_flag_names() -> set[str]:
    """Return every name of Megatron's that the tables list in full."""
    tables = (table for name, table in megatron_flags().items() if name != "known_elsewhere")
    return {name for table in tables for names in table.values() for name in names.split() if "*" not in name}
