from megatron.runtime.execution.lane_run import HANDLERS
from multimodal.values.action import ACTION_TABLE, ActionKind


def test_every_kind_of_action_has_a_handler_and_a_row() -> None:
    assert set(HANDLERS) == set(ActionKind) == set(ACTION_TABLE)
