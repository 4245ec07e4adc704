"""What the costs of a step say of single messages."""

import numpy as np

from multimodal.cost.communication import TransferCost
from multimodal.cost.step_costs import StepCosts
from multimodal.values.action import Action
from multimodal.values.shape import StepShape
from multimodal.values.work.step_work import step_work


def transfer(costs: StepCosts, send: Action, *, shape: StepShape) -> TransferCost:
    """Return the cost of the message that a send of the step starts."""
    work = step_work(shape)
    found = costs.of_pieces(work, np.array([work.numbers(lowered=True)[send]]))
    return TransferCost(*(values[0].item() for values in (found.latency_seconds, found.seconds, found.links)))
