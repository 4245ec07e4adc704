"""A plain simulation of 1F1B, action by action, to hold formulas against."""


def simulate_1f1b(forward, backward, *, num_microbatches):
    """Return the seconds of a step."""
    orders = [_order(len(forward) - 1 - stage, num_microbatches) for stage in range(len(forward))]
    ends, clocks, seconds = {}, [0.0] * len(forward), {"F": forward, "B": backward}
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, microbatch = order[0]
                need = _need(kind, stage, microbatch, last=len(forward) - 1)
                if need is not None and need not in ends:
                    break
                clocks[stage] = max(clocks[stage], ends.get(need, 0.0)) + seconds[kind][stage]
                ends[kind, stage, microbatch] = clocks[stage]
                order.pop(0)
    return max(clocks)


def _need(kind, stage, microbatch, *, last):
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage else None
    return ("F", stage, microbatch) if stage == last else ("B", stage + 1, microbatch)


def _order(behind, count):
    ahead = min(behind, count)
    steady = [each for index in range(count - ahead) for each in (("F", ahead + index), ("B", index))]
    return [("F", index) for index in range(ahead)] + steady + [("B", index) for index in range(count - ahead, count)]
