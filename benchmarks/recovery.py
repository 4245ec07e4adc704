"""Claim: a run whose nodes are lost and return goes on within 3 s, and logs the losses of a run in which nothing happened.

    PYTHONPATH=. python benchmarks/recovery.py --seeds 0-49 --json recovery.json

Every run draws from its own seed: 3 to 6 nodes are killed at random moments (any node, that of rank 0, too; some two at once,
some while the run recovers), and two return. Ranks are processes on this machine (gloo, float64, a small model), started by the
supervisor as `scripts/elastic.sh` does. The table has the seconds of each phase, from the kill on, and beside them what it takes
to start all ranks again from a checkpoint of every step: the same kill, with the same supervisor. A run that fails is counted,
with the last lines of its output. With `--json` every outcome is kept: the same command goes on where it was ended, and `--seeds`
splits the runs.
"""

import argparse
import json
import random
import shutil
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
TOLERANCE = 1e-9
FIRST_PATIENCE_SECONDS, LEAST_PATIENCE_SECONDS, SILENCE_FACTOR = 1800.0, 300.0, 10.0
"""Seconds without a step in the log after which a run counts as hanging: of the first run, at least, and in longest ones seen."""
FLAGS = ("--elastic-timeout", 120)
"""A machine with other work is slow, and no rank freezes in these runs."""
LAST_LINES = 40
LEAST_NODES, LEAST_STEPS = 5, 29
"""With which 3 nodes can be lost and 2 spared, and 6 losses come at moments of their own."""


@dataclass
class Outcome:
    """The result of one run."""

    seed: int
    events: list[str] = field(default_factory=list)
    exit_code: int | None = None
    worst_difference: float = float("inf")
    """Of any logged loss, from that of the uninterrupted run; infinite where a step is missing."""
    recoveries: list[Mapping[str, float]] = field(default_factory=list)
    """Seconds by phase, of those losses that were recovered from before the next one."""
    problem: str = ""
    """The reason for which the run was given up; empty if it was not."""

    @property
    def is_right(self) -> bool:
        """True if nothing can be seen of what happened."""
        return self.exit_code == 0 and self.worst_difference <= TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; returns how many runs broke the claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=read_seeds, default=range(50), help="a run from each of them: 0-24, or 3,7,10-12 (0-49)")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=1, help="ranks of a node")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--restarts", type=int, default=3, help="restarts from a checkpoint to measure")
    parser.add_argument("--json", type=Path, help="write every outcome into this file, and go on with the runs that it lacks")
    flags = parser.parse_args(argv)
    if flags.nodes < LEAST_NODES or flags.steps < LEAST_STEPS:
        parser.error(f"losses are drawn among at least {LEAST_NODES} nodes and {LEAST_STEPS} steps; raise --nodes or --steps")
    found = Findings(flags.json, {"nodes": flags.nodes, "gpus": flags.gpus, "steps": flags.steps})
    with tempfile.TemporaryDirectory() as top:
        _measure(Path(top), Nodes(flags.nodes, flags.gpus), flags, found)
    outcomes = [found.outcomes[seed] for seed in sorted(found.outcomes)]
    _print_table([each for outcome in outcomes for each in outcome.recoveries], found.restarts)
    wrong = [outcome.seed for outcome in outcomes if not outcome.is_right]
    told = f"; wrong: seeds {wrong}" if wrong else ""
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} runs log the losses of the uninterrupted run{told}")
    return len(wrong)


def read_seeds(text: str) -> list[int]:
    """Return the numbers of `0-24` or `3,7,10-12`."""
    bounds = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in bounds for seed in range(int(first), int(last or first) + 1)]


class Findings:
    """Outcomes and restarts so far, in a file after each of them."""

    def __init__(self, path: Path | None, setting: Mapping[str, int]) -> None:
        self._path, self._setting = path, setting
        self.outcomes: dict[int, Outcome] = {}
        self.restarts: list[float] = []
        if path is not None and path.exists():
            told = json.loads(path.read_text())
            if told["setting"] != setting:
                raise SystemExit(f"{path} has runs with {told['setting']}, this one is to have {setting}; name another file")
            self.outcomes = {each["seed"]: Outcome(**each) for each in told["outcomes"]}
            self.restarts = told["restarts"]

    def add(self, found: Outcome | float) -> None:
        """Keep an outcome, or the seconds of a restart."""
        if isinstance(found, Outcome):
            self.outcomes[found.seed] = found
        else:
            self.restarts.append(found)
        if self._path is not None:
            told = {"setting": self._setting, "outcomes": list(map(vars, self.outcomes.values())), "restarts": self.restarts}
            written = self._path.with_suffix(".tmp")
            written.write_text(json.dumps(told, indent=1))
            written.replace(self._path)


class Patience:
    """The longest time without a logged step: far longer than any run was seen to take on this machine, whatever its load."""

    def __init__(self) -> None:
        self._longest = FIRST_PATIENCE_SECONDS / SILENCE_FACTOR

    @property
    def seconds(self) -> float:
        """After which a run counts as hanging."""
        return max(LEAST_PATIENCE_SECONDS, SILENCE_FACTOR * self._longest)

    def learn(self, run: ElasticRun, *, is_first: bool = False) -> None:
        """Take what a run that has ended well was seen to take."""
        self._longest = run.longest_silence if is_first else max(self._longest, run.longest_silence)


def _measure(top: Path, nodes: Nodes, flags: argparse.Namespace, found: Findings) -> None:
    patience, inputs = Patience(), _folder(top, "inputs")
    expected = _uninterrupted(inputs, nodes, flags.steps, patience)
    for seed in flags.seeds:
        if seed not in found.outcomes:
            folder = _folder(top, f"seed-{seed}")
            found.add(_interrupted(folder, inputs, nodes, flags.steps, seed=seed, expected=expected, patience=patience))
            shutil.rmtree(folder)
    for number in range(len(found.restarts), flags.restarts):
        found.add(_restarted(_folder(top, f"restart-{number}"), inputs, nodes, patience))


def _folder(top: Path, name: str) -> Path:
    (top / name).mkdir()
    return top / name


def _uninterrupted(folder: Path, nodes: Nodes, num_steps: int, patience: Patience) -> dict[int, float]:
    run = ElasticRun(folder, nodes, num_steps=num_steps, flags=FLAGS)
    try:
        run.wait_for_step(num_steps, seconds=patience.seconds)
        assert run.wait(seconds=patience.seconds) == 0, run.output
        patience.learn(run, is_first=True)
        return run.losses()
    finally:
        run.close()


def _interrupted(
    folder: Path,
    inputs: Path,
    nodes: Nodes,
    num_steps: int,
    *,
    seed: int,
    expected: Mapping[int, float],
    patience: Patience,
) -> Outcome:
    outcome = Outcome(seed)
    run, start = ElasticRun(folder, nodes, num_steps=num_steps, inputs=inputs, flags=FLAGS), time.monotonic()
    try:
        _disturb(run, outcome, num_steps, patience)
        found = read_losses(folder)
        assert found.keys() == expected.keys(), f"steps {sorted(found.keys() ^ expected.keys())} are missing or new"
        outcome.worst_difference = max(abs(found[step] - expected[step]) for step in expected)
        patience.learn(run)
    except Exception as problem:  # whatever it is, the other runs are to be made
        outcome.problem = f"{type(problem).__name__}: {str(problem).partition(':' + chr(10))[0]}"
    finally:
        run.close()
    print(f"seed {seed}: {'; '.join(outcome.events)}: exit {outcome.exit_code}, losses differ by at most ", end="")
    print(f"{outcome.worst_difference:.1e}, {time.monotonic() - start:.0f} s", flush=True)
    if not outcome.is_right:
        print(f"seed {seed} is wrong: {outcome.problem}; its last lines:", flush=True)
        print("\n".join(f"    {line}" for line in run.output.splitlines()[-LAST_LINES:]), flush=True)
    return outcome


def _disturb(run: ElasticRun, outcome: Outcome, num_steps: int, patience: Patience) -> None:
    """Let everything happen that the seed draws, and wait for the end."""
    kills: list[float] = []
    for action in draw_actions(outcome.seed, run.nodes, num_steps):
        run.wait_for_step(action.step, seconds=patience.seconds)
        kills += _act(run, action, outcome.events)
        outcome.recoveries = _phases(run, kills)
    run.wait_for_step(num_steps - 1, seconds=patience.seconds)
    outcome.recoveries = _phases(run, kills)
    outcome.exit_code = run.wait(seconds=patience.seconds)


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


def _restarted(folder: Path, inputs: Path, nodes: Nodes, patience: Patience) -> float:
    """Return the seconds from a kill to the next finished step, less that step, where all ranks are started again."""
    flags = (*FLAGS, "--save", folder / "saved", "--load", folder / "saved", "--save-interval", 1)
    run = ElasticRun(folder, nodes, num_steps=1000, inputs=inputs, flags=flags)
    try:
        run.wait_for_step(5, seconds=patience.seconds)
        start = time.time()
    finally:
        run.close()
    again = ElasticRun(folder, nodes, num_steps=1000, inputs=inputs, flags=flags)
    try:
        again.wait_until(lambda: any(when > start for when, _ in again.step_times()), "a step", seconds=patience.seconds)
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
