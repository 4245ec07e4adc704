"""Tries the balancers on the current batch and takes the assignment with the shortest predicted step."""

from statistics import fmean

from multimodal.balance import BALANCERS, placements_of
from multimodal.balance.balance_options import pick_shortest, unique
from multimodal.balance.batch_work import BatchWork, sum_floats_by
from multimodal.balance.disttrain import order_llm
from multimodal.balance.orchmllm import balance_llm
from multimodal.balance.placement import balance_unlike, follow_llm, has_unequal_shares, place_every_unit
from multimodal.values.assignment import Assignment
from multimodal.values.plan import Plan

MOST_DEALT = 4
"""Most assignments with encoders dealt by idle time that are predicted: those with the least work on the busiest rank."""


def balance_auto(work: BatchWork, *, plan: Plan) -> Assignment:
    """Return the assignment with the shortest predicted step among the candidates; the data's order is one of them.

    Candidates are the results of the balancers that suit, the data's order first, and, where replicas take equal shares, the
    LLM's balanced microbatches in DistTrain's order, with encoders balanced on their own or with the LLM. If several encoder
    pipelines lie beside an LLM replica, each candidate is also tried with encoders' microbatches dealt by the idle time of
    their ranks (`deal_by_idle_time`). `options.predictor` predicts the steps, or `busiest_replicas_work` if there is none. Ties
    go to the first candidate, as does a gain below `Predictor.margin`. Limits apply to the number of candidates and the size of
    simulations, not to their time, so that ranks agree.
    """
    if has_unequal_shares(work.graph, plan):
        whole = (row.balance for row in BALANCERS.values() if row.keeps_samples_whole)
        candidates = [balance_unlike(work, plan=plan, balance=balance) for balance in whole]
    else:
        placements = placements_of(tuple(plan.units.values()))
        candidates = [row.balance(work, plan=plan) for row in BALANCERS.values() if row.suits(placements)]
        reordered = next(order_llm(balance_llm(work, plan=plan), work, plan=plan))
        candidates += [place(reordered, work, plan=plan) for place in (place_every_unit, follow_llm)]
    if work.options.predictor is None:
        return min(candidates, key=lambda assignment: busiest_replicas_work(assignment, work, plan=plan))
    candidates = list(unique(candidates))
    predictor, lengths = work.options.predictor, work.lengths
    predictions = list(predictor.predict_each(candidates, lengths))
    dealt = [each for prediction in predictions for each in prediction.dealt_by_idle_time]
    if others := list(unique((*candidates, *dealt)))[len(candidates) :]:
        predicted = zip(others, predictor.predict_each(others, lengths), strict=True)
        promising = sorted(predicted, key=lambda each: each[1].least_seconds)[:MOST_DEALT]
        candidates = [*candidates, *(assignment for assignment, _ in promising)]
        predictions += [prediction for _, prediction in promising]
    chosen = candidates.index(pick_shortest(candidates, predictions))
    if predictor.margin and predictions[chosen].seconds > (1 - predictor.margin) * predictions[0].seconds:
        return candidates[0]
    return candidates[chosen]


def busiest_replicas_work(assignment: Assignment, work: BatchWork, *, plan: Plan) -> float:
    """Return the sum over units of the work per rank of the unit's busiest replica: a prediction without a schedule.

    The unit is FLOPs; if units declare costs, which are not comparable between units, each unit's is relative to its mean.
    """
    total = 0.0
    for unit, placed in assignment.placed.items():
        num_ranks = [len(replica.ranks) for replica in plan.units[unit].replicas]
        of_microbatches = work.microbatch_work(unit, placed)
        works = (sum_floats_by(placed.replica_of_microbatch, of_microbatches, placed.num_replicas) / num_ranks).tolist()
        mean = fmean(works) if work.options.unit_costs else 1.0
        total += max(works) / mean if mean else 0.0
    return total
