"""Mutations of flags: each of them with every kind of wrong value, and with its own choices."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from megatron.runtime.flags.field_flags import FieldFlag, all_flags
from tests.distributed.mutations.mutation import Inputs, Mutation, short

FLAG_TEXTS = ("-1", "0", "3", "1.5", "nan", "1e400", "text", "", "9" * 12, "9" * 400)
"""What a mutation gives a flag that takes a number."""
PATHS = ("no/such/place", "/dev/null", "/proc/1/none", ".", "")
"""What a mutation gives a flag that takes a path."""


def flag_mutations() -> Iterator[Mutation]:
    """Give each flag of the configuration, and of the units, every text of its type."""
    for flag in all_flags():
        for text in _texts(flag):
            apply = partial(set_flag, flag=flag.flag, value=text)
            names = () if flag.name == "colocate_units" else (flag.flag,)  # the sizes that it does not go with are named
            yield Mutation(f"flag: {flag.flag} {short(text)}", apply, names)
    for name in ("--vision-dp", "--llm-dp", "--llm-tp", "--llm-pp", "--llm-vpp", "--vision-cp", "--vision-micro-batch-size"):
        for text in FLAG_TEXTS:
            yield Mutation(f"flag: {name} {short(text)}", partial(set_flag, flag=name, value=text))


def _texts(flag: FieldFlag) -> tuple[str | None, ...]:
    if flag.parse is None:
        return (None,)
    if flag.choices:
        return (*flag.choices, "no-such-choice", "")
    if flag.parse is Path or flag.is_input_path:
        return PATHS
    return FLAG_TEXTS


def set_flag(inputs: Inputs, *, flag: str, value: object) -> None:
    """Give a flag of all ranks a value."""
    inputs.flags[flag] = value
