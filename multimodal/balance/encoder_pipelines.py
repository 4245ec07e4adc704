"""Deals an encoder's microbatches to its pipelines on the ranks of one LLM replica, by their idle time."""

from dataclasses import replace

import numpy as np

from multimodal.balance.placement import needed_at
from multimodal.cost.model_costs import ModelCosts
from multimodal.values.arrays.rows import Floats, Integers, row_numbers, row_starts, take_rows
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan


def deal_by_idle_time(costs: ModelCosts, *, fills_waits: bool, largest_first: bool) -> Assignment | None:
    """Return a step's assignment with encoders' microbatches dealt anew over the pipelines beside each LLM replica (Optimus 4.1).

    The share of a pipeline is the time in which its busiest rank computes nothing else, up to a level that all of them reach. In
    the order in which the LLM needs them, every microbatch goes to the pipeline that has received the smallest part of its share;
    with largest_first, the largest microbatch goes to the pipeline with the least work, which comes closer to the level. Encoders
    elsewhere, or with one pipeline beside an LLM replica, stay as they are. Returns None if all encoders do. fills_waits: True if
    encoders run while the LLM waits for tensor parallel collectives. O(microbatches x pipelines).
    """
    graph, plan = costs.shape.graph, costs.shape.plan
    found = {unit.name: pipelines_beside(plan, unit.name, llm=graph.backbone.name) for unit in graph.encoders}
    beside = {name: each for name, each in found.items() if each is not None and each.shape[1] > 1}
    if not beside:
        return None
    placed, busy = dict(costs.assignment.placed), np.zeros(len(plan.lanes))
    for name in placed:
        if name not in beside:
            computing, waiting = costs.computations.of_both(name)
            seconds = computing - waiting if fills_waits else computing
            busy += lane_seconds(plan, name, seconds, placed[name].replica_of_microbatch)
    for name, pipelines in beside.items():
        seconds, _ = costs.computations.of_both(name)
        # In the order in which their consumers' first microbatches need them.
        keys = costs.assignment.placed[name].index_in_replica, needed_at(costs.assignment, graph, name)
        needed = np.lexsort((placed[name].replica_of_microbatch, *keys))
        owners = np.argsort(pipelines.ravel())[placed[name].replica_of_microbatch] // pipelines.shape[1]
        on_busiest = _on_busiest_rank(plan, name, seconds)
        turns = _turns(owners, np.argsort(-on_busiest, kind="stable") if largest_first else needed, len(pipelines))
        others = _busiest(plan, name, busy)[pipelines]
        parts = None
        if not largest_first:  # [num_owners, m] each pipeline's part of an LLM replica's total
            totals = np.bincount(owners, on_busiest, len(others))[:, None] + np.cumsum(np.sort(others, axis=1), axis=1)
            levels = totals / np.arange(1, others.shape[1] + 1)
            parts = np.maximum(0.0, levels.min(axis=1, keepdims=True) - others)
        replicas = _deal(on_busiest, turns, pipelines, others, parts)
        # Each replica has its microbatches in the order in which they are needed.
        order = needed[np.argsort(replicas[needed], kind="stable")]
        placed[name] = placed[name].rearranged(order, row_starts(np.bincount(replicas, minlength=pipelines.size)))
        busy += lane_seconds(plan, name, seconds, replicas)
    return Assignment(placed)


def lane_seconds(plan: Plan, unit: str, seconds: Floats, replicas: Integers) -> Floats:
    """Return the seconds of a unit's microbatches in each lane; seconds: [num_stages, num_microbatches]; replicas: of each."""
    num_replicas, table = plan.units[unit].data_parallel_size, plan.stage_tables[unit]
    of_stages = np.stack([np.bincount(replicas, row, num_replicas) for row in seconds])
    by_replica = np.arange(of_stages.size).reshape(of_stages.shape).T.ravel()
    starts, lanes = take_rows(table.lane_starts, table.lanes, by_replica)
    return np.bincount(lanes, of_stages.T.ravel()[row_numbers(starts)], len(plan.lanes)).astype(np.float64)


def pipelines_beside(plan: Plan, unit: str, *, llm: str) -> Integers | None:
    """Return the encoder's replicas on the ranks of each LLM replica, [num_llm_replicas, m]; None unless all are, and alike."""
    if plan.units[unit].is_unlike:
        return None
    owner_of_rank = {rank: index for index, replica in enumerate(plan.units[llm].replicas) for rank in replica.ranks}
    found = [{owner_of_rank.get(rank, -1) for rank in replica.ranks} for replica in plan.units[unit].replicas]
    if any(len(each) > 1 or -1 in each for each in found):
        return None
    owners = [each.pop() for each in found]
    counts = np.bincount(owners, minlength=plan.units[llm].data_parallel_size)
    return np.argsort(owners, kind="stable").reshape(len(counts), -1) if counts.min() == counts.max() else None


def keep_beside_llm(plan: Plan, graph: ModelGraph) -> Plan:
    """Number other units' replicas so that microbatches dealt in turn stay on the ranks of the LLM replica with their samples.

    Replica k of a unit then lies inside replica k mod dp of the LLM, so pipelines of the LLM do not depend on each other. A unit
    whose replicas do not lie inside is left as it is.
    """
    units = dict(plan.units)
    for unit in (unit for unit in graph.units if unit is not graph.backbone):
        if (rows := pipelines_beside(plan, unit.name, llm=graph.backbone.name)) is not None:
            replicas = [units[unit.name].replicas[index] for index in rows.T.ravel().tolist()]
            units[unit.name] = replace(units[unit.name], replicas=tuple(replicas))
    return Plan(units)


def _on_busiest_rank(plan: Plan, unit: str, seconds: Floats) -> Floats:
    """[num_microbatches] the seconds of each on the busiest ranks of a pipeline: over all their layer ranges."""
    stages = [stage.stage_index for stage in plan.units[unit].replicas[0].virtual_stages]
    found = np.zeros((max(stages) + 1, seconds.shape[1]))
    np.add.at(found, stages, seconds)
    return found.max(axis=0)


def _busiest(plan: Plan, unit: str, busy: Floats) -> Floats:
    """[num_replicas] the seconds of the busiest lane of each of a unit's replicas."""
    table, num_replicas = plan.stage_tables[unit], plan.units[unit].data_parallel_size
    found = np.zeros(num_replicas)
    np.maximum.at(found, row_numbers(table.lane_starts) % num_replicas, busy[table.lanes])
    return found


def _deal(seconds: Floats, turns: Integers, pipelines: Integers, busy: Floats, parts: Floats | None) -> Integers:
    """Return the replica for each microbatch: the one with the smallest part of its share, or with the least work.

    seconds: of each microbatch; turns: a result of `_turns`; pipelines, busy, parts: [num_owners, m] replicas, the seconds of
    their other work, and their shares in seconds (None: use the least work).
    """
    given, found = np.zeros(busy.shape), np.zeros(len(seconds), np.int64)
    for row in turns:
        here = np.flatnonzero(row >= 0)
        taken = seconds[row[here]]
        if parts is None:
            chosen = (busy[here] + given[here]).argmin(axis=1)
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                shares = np.where(parts[here] > 0, (given[here] + taken[:, None]) / parts[here], np.inf)
            chosen = shares.argmin(axis=1)
        given[here, chosen] += taken
        found[row[here]] = pipelines[here, chosen]
    return found


def _turns(owners: Integers, order: Integers, num_owners: int) -> Integers:
    """[most microbatches of an LLM replica, num_owners] the microbatches of each in this order, side by side; -1: none."""
    ordered = order[np.argsort(owners[order], kind="stable")]
    counts = np.bincount(owners, minlength=num_owners)
    found = np.full((int(counts.max(initial=0)), num_owners), -1)
    found[np.arange(len(ordered)) - np.repeat(row_starts(counts)[:-1], counts), owners[ordered]] = ordered
    return found
