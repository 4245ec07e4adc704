"""Claim: a run whose nodes are lost and return goes on within 3 s, and logs the losses of a run in which nothing happened.

    PYTHONPATH=. python benchmarks/recovery.py --runs 50

Every run draws from its own seed: 3 to 6 nodes are killed at random moments (any node, that of rank 0, too; some two at once,
some while the run recovers), and two return. Ranks are processes on this machine (gloo, float64, a small model), started by the
supervisor as `scripts/elastic.sh` does. The table has the seconds of each phase, from the kill on, and beside them what it takes
to start all ranks again from a checkpoint of every step: the same kill, with the same supervisor.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the runs are those of the tests, which are not installed

from tests.distributed.elastic_run import ElasticRun, Nodes, read_losses

PHASES = ("detect", "agree", "plan", "meet", "re-form", "copy", "step")
LIMIT_SECONDS, TOLERANCE = 3.0, 1e-9


@dataclass
class Outcome:
    """What one run came to."""

    seed: int
    events: list[str]
    exit_code: int | None
    worst_difference: float
    """Of any logged loss, from that of the uninterrupted run; infinite where a step is missing."""
    recoveries: list[Mapping[str, float]] = field(default_factory=list)
    """Seconds by phase, of those losses that were recovered from before the next one."""

    @property
    def is_right(self) -> bool:
        """True if nothing can be seen of what happened."""
        return self.exit_code == 0 and self.worst_difference <= TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; returns how many runs broke the claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="runs, each from its own seed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=1, help="ranks of a node")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--restarts", type=int, default=3, help="restarts from a checkpoint to measure")
    parser.add_argument("--json", type=Path, help="also write every outcome into this file")
    flags = parser.parse_args(argv)
    nodes = Nodes(flags.nodes, flags.gpus)
    with tempfile.TemporaryDirectory() as top:
        outcomes, restarts = _measure(Path(top), nodes, flags)
    _print_table([each for outcome in outcomes for each in outcome.recoveries], restarts)
    if flags.json:
        flags.json.write_text(json.dumps([vars(each) for each in outcomes], indent=1))
    wrong = [outcome.seed for outcome in outcomes if not outcome.is_right]
    told = f"; wrong: {wrong}" if wrong else ""
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} runs log the losses of the uninterrupted run{told}")
    return len(wrong)


def _measure(top: Path, nodes: Nodes, flags: argparse.Namespace) -> tuple[list[Outcome], list[float]]:
    inputs = top / "inputs"
    folders = [top / str(number) for number in range(flags.runs + flags.restarts)]
    for folder in (inputs, *folders):
        folder.mkdir()
    expected, outcomes = _uninterrupted(inputs, nodes, flags.steps), []
    for seed, folder in enumerate(folders[: flags.runs], flags.seed):
        outcome = _interrupted(folder, inputs, nodes, flags.steps, seed=seed, expected=expected)
        print(f"seed {seed}: {'; '.join(outcome.events)}: exit {outcome.exit_code}, ", end="")
        print(f"losses differ by at most {outcome.worst_difference:.1e}", flush=True)
        outcomes.append(outcome)
    return outcomes, [_restarted(folder, inputs, nodes) for folder in folders[flags.runs :]]


def _uninterrupted(folder: Path, nodes: Nodes, num_steps: int) -> dict[int, float]:
    run = ElasticRun(folder, nodes, num_steps=num_steps)
    try:
        assert run.wait(seconds=600) == 0, run.output
        return run.losses()
    finally:
        run.close()


def _interrupted(
    folder: Path, inputs: Path, nodes: Nodes, num_steps: int, *, seed: int, expected: Mapping[int, float]
) -> Outcome:
    run, outcome = ElasticRun(folder, nodes, num_steps=num_steps, inputs=inputs), Outcome(seed, [], None, float("inf"))
    kills: list[float] = []
    try:
        for action in draw_actions(seed, nodes, num_steps):
            kills += _act(run, action, outcome.events)
            outcome.recoveries = _phases(run, kills)
        run.wait_for_step(num_steps - 1)
        outcome.recoveries = _phases(run, kills)
        outcome.exit_code = run.wait(seconds=300)
    except (AssertionError, TimeoutError) as problem:
        print(problem)
    finally:
        run.close()
    found = read_losses(folder)
    if found.keys() == expected.keys():
        outcome.worst_difference = max(abs(found[step] - expected[step]) for step in expected)
    if not outcome.is_right:
        print(run.output)
    return outcome


@dataclass(frozen=True)
class Action:
    """Something that happens to a run once it has logged a step."""

    step: int
    kill: tuple[int, ...] = ()
    """Nodes, one after the other."""
    pauses: tuple[float, ...] = ()
    """Seconds before each."""
    returning: int | None = None


def draw_actions(seed: int, nodes: Nodes, num_steps: int) -> list[Action]:
    """Draw what happens: 3 to 6 kills, two returns; two nodes are never killed."""
    draw = random.Random(seed)
    spared = draw.sample(range(nodes.count), 2)
    victims = [node for node in range(nodes.count) if node not in spared]
    draw.shuffle(victims)
    left, groups = victims[: draw.randint(3, 6)], []
    while left:
        size = min(len(left), draw.choice((1, 1, 2)))
        groups.append([left.pop() for _ in range(size)])
    steps = sorted(draw.sample(range(1, num_steps - 12, 3), len(groups)))
    actions = []
    for step, group in zip(steps, groups, strict=True):
        together = draw.random() < 0.5
        pauses = [draw.uniform(0, 0.3), *(0.0 if together else draw.uniform(0, 1.0) for _ in group[1:])]
        actions.append(Action(step, tuple(group), tuple(pauses)))
    for node in draw.sample([node for group in groups for node in group], 2):
        lost = next(action.step for action in actions if node in action.kill)
        actions.append(Action(draw.randint(lost + 1, num_steps - 10), returning=node))
    return sorted(actions, key=lambda action: action.step)


def _act(run: ElasticRun, action: Action, events: list[str]) -> list[float]:
    run.wait_for_step(action.step)
    if action.returning is not None:
        run.let_return(action.returning)
        events.append(f"node {action.returning} returns at {action.step}")
        return []
    times = []
    for node, pause in zip(action.kill, action.pauses, strict=True):
        time.sleep(pause)
        times.append(run.kill(node, local_rank=node % run.nodes.gpus))
        events.append(f"node {node} dies at {action.step}")
    return times


def _phases(run: ElasticRun, kills: Sequence[float]) -> list[Mapping[str, float]]:
    """Return the seconds of each recovery from one loss; a loss during recovery belongs to the recovery that ends it."""
    found = []
    told = run.recoveries()
    steps = run.step_times()
    for each in told:
        own = [
            kill for kill in kills if kill <= each["left"] and not any(kill < other["copied"] < each["copied"] for other in told)
        ]
        after = [(when, seconds) for when, seconds in steps if when > each["copied"]]
        if own and after and "lost" in each:
            times = [
                max(own),
                each["left"],
                each["agreed"],
                each["planned"],
                each["met"],
                each["formed"],
                each["copied"],
                after[0][0] - after[0][1],
            ]
            found.append(dict(zip(PHASES, (second - first for first, second in pairwise(times)), strict=True)))
    return found


def _restarted(folder: Path, inputs: Path, nodes: Nodes) -> float:
    """Return the seconds from a kill to the next finished step, less that step, where all ranks are started again."""
    flags = ("--save", folder / "saved", "--load", folder / "saved", "--save-interval", 1)
    run = ElasticRun(folder, nodes, num_steps=1000, inputs=inputs, flags=flags)
    try:
        run.wait_for_step(5)
        start = time.time()
    finally:
        run.close()
    again = ElasticRun(folder, nodes, num_steps=1000, inputs=inputs, flags=flags)
    try:
        again.wait_until(lambda: any(when > start for when, _ in again.step_times()), "a step")
        when, seconds = next((when, seconds) for when, seconds in again.step_times() if when > start)
        return when - seconds - start
    finally:
        again.close()


def _print_table(recoveries: Sequence[Mapping[str, float]], restarts: Sequence[float]) -> None:
    print(f"\nseconds, median (90 %) of {len(recoveries)} losses")
    for phase in PHASES:
        print(f"{phase:>10}  {_shown([each[phase] for each in recoveries])}")
    print(f"{'all':>10}  {_shown([sum(each.values()) for each in recoveries])}")
    print(f"{'restart':>10}  {_shown(restarts)}  all ranks again, from a checkpoint of the last step ({len(restarts)})")


def _shown(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    ordered: list[Any] = sorted(seconds)
    return f"{statistics.median(ordered):7.3f} ({ordered[min(len(ordered) - 1, round(0.9 * len(ordered)))]:.3f})"


if __name__ == "__main__":
    sys.exit(min(main(), 1))
