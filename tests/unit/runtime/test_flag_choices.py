"""Flags are parsed without importing what they choose from, so their choices are written twice; here they are held together."""

from typing import get_args, get_type_hints

from megatron.runtime.configuration import SCHEDULE_PASSES, TrainingConfig
from multimodal.balance import BALANCERS
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import PASSES


def test_balance_and_schedule_offer_what_is_registered() -> None:
    hints = get_type_hints(TrainingConfig)
    assert set(get_args(hints["balance"])) == set(BALANCERS)
    assert set(get_args(hints["schedule"])) == set(BUILDERS)
    assert set(SCHEDULE_PASSES) == set(PASSES)
