"""A plain simulation of 1F1B, action by action, and the formula of templates, to hold other formulas and searches against."""


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


def idle_ticks(through, *, behind, forward, backward, num_microbatches):
    """Return the waiting time of a 1F1B stage between its first forward and its last backward; whole numbers in and out.

    through: ticks of one microbatch through the `behind` stages after it, there and back. Before the first microbatch is back,
    the stage runs `behind` more forwards; after the last one has left, as many backwards. The rest of `through` is idle time.
    With too few microbatches for a steady phase both waits are the same, and the longer one counts.
    """
    ahead = min(behind, num_microbatches - 1)
    before, after = max(0, through - ahead * forward), max(0, through - ahead * backward)
    return before + after if behind < num_microbatches - 1 else max(before, after)


def step_ticks(forward, backward, *, num_microbatches):
    """Return the ticks of a step of 1F1B: T1 + T2 + T3 of Oobleck 2.4.1.2, but never less than the slowest stage works.

    The path through stage k takes one microbatch through the stages before it, there and back, all microbatches in stage k
    itself, and its idle time (`idle_ticks`); the longest of these paths counts. If later stages are nearly as slow as stage k
    this is the formula of the paper, sum(t) + (N - S + k - 1) t_k + sum(t_k ...); if they are much faster, that formula counts
    less than the work of stage k. forward, backward: of each stage.
    """
    step = through = 0
    for behind, (ahead, back) in enumerate(zip(reversed(forward), reversed(backward), strict=True)):
        idle = idle_ticks(through, behind=behind, forward=ahead, backward=back, num_microbatches=num_microbatches)
        step = max(step + ahead + back, num_microbatches * (ahead + back) + idle)
        through += ahead + back
    return step
