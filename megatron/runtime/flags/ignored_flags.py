"""Flags that would have no effect, or set the same thing twice; `cross_checks` and the page of flags read them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.runtime.flags.configuration import RunConfig
from megatron.runtime.flags.field_flags import all_flags, value_of
from multimodal.balance import BALANCERS
from multimodal.schedule.builders import BUILDERS
from multimodal.values.file_form import read_table

_TABLE = read_table(Path(__file__).with_suffix(".yaml"))
ENCODER_FLAGS: Mapping[str, str] = _TABLE["of_encoders"]
EXCLUSIVE_FLAGS: list[tuple[str, str, str]] = _TABLE["exclusive"]
EXCLUSIVE_SIZES: list[tuple[str, str, str]] = _TABLE["exclusive_sizes"]
LEFT_TO_THE_PLAN: list[str] = _TABLE["left_to_the_plan"]

Condition = Callable[[RunConfig], bool]
"""Returns True where flags have no effect, or do not go together."""


class IgnoredFlag(NamedTuple):
    """A flag that has no effect under some condition."""

    name: str
    because_of: tuple[str, ...]
    """Fields that determine this. If one of them is on the command line, the flag in a configuration file is dropped."""
    is_ignored: Condition
    reason: str


_CONDITIONS: Mapping[str, tuple[str, Condition]] = {
    "the balancer places items": ("balance", lambda c: BALANCERS[c.training.balance].places_items),
    "no encoder is balanced by itself": (
        "balance refine_encoders",
        lambda c: not BALANCERS[c.training.balance].places_items and not c.training.refine_encoders,
    ),
    "the balancer does not defer": ("balance", lambda c: not BALANCERS[c.training.balance].defers),
    "the balancer does not weigh units": ("balance", lambda c: not BALANCERS[c.training.balance].weighs_units),
    "nothing goes by durations": (
        "balance balance_num_microbatches schedule plan",
        lambda c: not c.goes_by_durations and not c.parallelism.plans_itself and not c.parallelism.cuts_by_seconds,
    ),
    "no duration is measured": (
        "balance balance_num_microbatches schedule layer_costs emulate plan",
        lambda c: c.training.measure_interval > 0 == c.measuring_interval,
    ),
    "the run does not plan itself": ("plan", lambda c: not c.parallelism.plans_itself),
    "there is a plan": ("plan", lambda c: c.parallelism.plan is not None),
    "the samples are read": ("data_path", lambda c: c.data.sample_program is None),
    "a program makes the samples": ("data_path", lambda c: c.data.sample_program is not None),
    "no data lie elsewhere": (
        "data_path",
        lambda c: (
            not c.data.allow_outside_paths
            and "://" not in " ".join((*c.data.data_path, *c.evaluation.valid_data_path, c.data.media_dir or ""))
        ),
    ),
    "computation is emulated": ("emulate", lambda c: c.training.emulate is not None),
    "computation is emulated without predictions": (
        "emulate",
        lambda c: c.training.emulate is not None and not BALANCERS[c.training.balance].needs_costs,
    ),
    "no unit is cut into stages": (
        "",
        lambda c: all(sizes.pipeline_parallel_size == 1 for sizes in c.parallelism.units.values()),
    ),
    "the model has one unit": ("model", lambda c: len(c.parallelism.units) == 1),
    "a model of one unit masks items": ("model", lambda c: c.model.attention_mask != "causal" and len(c.parallelism.units) == 1),
}
"""Conditions that are more than one field's value: name -> the fields that determine it, and the condition."""


def _condition_of(row: Mapping[str, Any]) -> tuple[tuple[str, ...], Condition]:
    """Return the fields that determine whether the flags of a row are ignored, and the condition."""
    if "when" in row:
        fields, condition = _CONDITIONS[row["when"]]
        return tuple(fields.split()), condition
    if "without" in row:
        return tuple(row["without"]), lambda c: not any(value_of(c, field) for field in row["without"])
    is_equal = "if" in row
    ((field, value),) = row["if" if is_equal else "unless"].items()
    return (field,), lambda c: (value_of(c, field) == value) is is_equal


def _ignored_flags() -> Iterator[IgnoredFlag]:
    """Yield the flags of the table, with the names of balancers and schedules in their reasons."""
    named = {
        feature: " and ".join(name for name, balancer in BALANCERS.items() if getattr(balancer, feature))
        for feature in ("weighs_units", "defers", "places_items")
    }
    named["predicts"] = " and ".join(name for name, balancer in BALANCERS.items() if balancer.needs_costs or balancer.judges)
    named["needs_costs"] = " and ".join(name for name, schedule in BUILDERS.items() if schedule.needs_costs)
    for row in _TABLE["ignored"]:
        for flag in row["flags"]:
            yield IgnoredFlag(flag, *_condition_of(row), row["reason"].format(**named))


IGNORED_FLAGS = tuple(_ignored_flags())


def ignored_flags(config: RunConfig) -> tuple[IgnoredFlag, ...]:
    """List the flags that were given but have no effect; a switch or a 0 that is given as its default asks for none."""
    asking = set()
    for flag in all_flags():
        value = value_of(config, flag.name)
        is_off = value in (None, ()) or (value == flag.default and (flag.parse is None or value == 0))
        if flag.name in config.given and not is_off:
            asking.add(flag.name)
    return tuple(row for row in IGNORED_FLAGS if row.name in asking and row.is_ignored(config))
