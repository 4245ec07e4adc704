"""Flags offer what is registered, and the choices that are written twice are held together."""

from typing import Any, get_args, get_type_hints

import pytest

from megatron.runtime.flags.configuration import ModelConfig, ParallelismConfig, TrainingConfig
from megatron.runtime.flags.field_flags import field_flags
from multimodal.attention.attention_backend import BACKEND_NAMES
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.share_tokens import TokenDistribution
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import Granularity, MicrobatchCount
from multimodal.cost.layers.layer import Implementation, Recompute
from multimodal.plan.planners.planning_request import Sharding
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES


def choices(group: type, name: str) -> set[Any]:
    """What a field may be, None apart."""
    hint = get_type_hints(group)[name]
    return {choice for part in (hint, *get_args(hint)) for choice in get_args(part) if isinstance(choice, str)}


def test_balance_and_schedule_offer_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILDERS, "mine", BUILDERS["1f1b"])
    monkeypatch.setitem(BALANCERS, "mine", BALANCERS["none"])
    monkeypatch.setitem(PASSES, "mine", PASSES["fill"])
    flags = {flag.name: flag for flag in field_flags("training")}
    assert flags["schedule"].choices == tuple(BUILDERS) and "mine" in flags["schedule"].choices
    assert flags["balance"].choices == tuple(BALANCERS)
    assert flags["schedule_passes"].help.endswith(f": {', '.join(PASSES)}.")


def test_other_choices_are_those_of_what_they_choose() -> None:
    assert choices(ModelConfig, "attention_backend") == set(BACKEND_NAMES)
    assert choices(ModelConfig, "attention_mask") == set(MaskMode)
    assert choices(ModelConfig, "transformer_impl") == set(get_args(Implementation))
    assert choices(ParallelismConfig, "context_parallel_distribution") == set(TokenDistribution)
    assert choices(ParallelismConfig, "data_parallel_sharding_strategy") == set(get_args(Sharding))
    assert choices(TrainingConfig, "balance_granularity") == set(Granularity)
    assert choices(TrainingConfig, "balance_num_microbatches") == set(MicrobatchCount)
    assert choices(TrainingConfig, "recompute_granularity") == set(get_args(Recompute))
