"""Draw a recovery as it happened: a node is lost in a step, the others go on, and it returns.

    PYTHONPATH=. python benchmarks/draw_recovery.py [docs/figures/elastic-recovery.png]

Ranks are processes on this machine, one per node, as in `benchmarks/recovery.py`. The times of phases are those that each node
reported to the keeper; the times of steps are those at which they appeared in the log.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the run is one of the tests, which are not installed

from tests.distributed.elastic_run import ElasticRun, Nodes

COLORS = {
    "step": "#4c8fd6",
    "detect": "#d64550",
    "agree": "#e8883a",
    "plan": "#222222",
    "meet": "#9a6cc4",
    "re-form": "#d9c6ec",
    "copy": "#3fa66b",
    "start": "#9a9a9a",
}
ENDS = {"detect": "left", "agree": "agreed", "plan": "planned", "meet": "met", "re-form": "formed", "copy": "copied"}
"""Phase -> the moment that ends it; each phase begins when the one before ends."""
LOST, STEP = 5, 6


@dataclass(frozen=True)
class Bar:
    """One activity of a node, from start to end."""

    node: int
    what: str
    start: float
    end: float


def main(argv: Sequence[str] | None = None) -> None:
    """Run and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, nargs="?", default=Path("docs/figures/elastic-recovery.png"))
    parser.add_argument("--nodes", type=int, default=8, help=f"at least {LOST + 1}, as node {LOST} is the one that is lost (8)")
    flags = parser.parse_args(argv)
    if flags.nodes <= LOST:
        parser.error(f"--nodes {flags.nodes} has no node {LOST}, which is the one that is lost; take at least {LOST + 1}")
    with tempfile.TemporaryDirectory() as folder:
        bars, killed = record(Path(folder), flags.nodes)
    draw(bars, killed, flags.picture)


def record(folder: Path, num_nodes: int) -> tuple[list[Bar], float]:
    """Return the activities of every node around the loss and the return of one, and the time of the loss."""
    run = ElasticRun(folder, Nodes(num_nodes), num_steps=1000)
    try:
        run.wait_for_step(STEP)
        time.sleep(0.5 * run.step_times()[-1][1])  # to the middle of the next step
        killed = run.kill(LOST)
        run.wait_for_step(STEP + 2)
        returned = time.time()
        run.let_return(LOST)
        run.wait_until(lambda: f"with {num_nodes} nodes" in run.output, "return of the node")
        run.wait_for_step(max(run.losses()) + 3)
        told, steps = run.recoveries_of_nodes(), run.step_times()
    finally:
        run.close()
    recoveries = [bar for each in told for bar in phases(each, since=killed if "lost" in each else returned)]
    absent = [(killed, max(bar.end for bar in recoveries if bar.node == LOST))]
    trained = [
        Bar(node, "step", when - seconds, when)
        for when, seconds in steps
        for node in range(num_nodes)
        if node != LOST or not any(start < when < end for start, end in absent)
    ]
    return recoveries + trained, killed


def phases(told: dict[str, Any], *, since: float) -> list[Bar]:
    """Return the phases of one node's recovery; a new node's first phase begins with its start."""
    is_new = told["left"] == 0
    names = [name for name in ENDS if not (is_new and name in ("detect", "agree"))]
    first = told["agreed"] if is_new else since if "lost" in told else told["left"]
    moments = [first, *(told[ENDS[name]] for name in names)]
    bars = [Bar(told["node"], name, *span) for name, span in zip(names, pairwise(moments), strict=True)]
    return [*([Bar(told["node"], "start", since, first)] if is_new else []), *bars]


def draw(bars: Sequence[Bar], killed: float, path: Path) -> None:
    """Draw a row for each node."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_nodes = 1 + max(bar.node for bar in bars)
    figure = Figure(figsize=(12, 1.2 + 0.36 * num_nodes), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for bar in bars:
        edge = "white" if bar.what == "step" else "none"
        axes.barh(bar.node, bar.end - bar.start, left=bar.start - killed, color=COLORS[bar.what], edgecolor=edge, height=0.8)
    axes.plot([0], [LOST], marker="x", color="black", markersize=10, markeredgewidth=2.5)
    axes.set_yticks(range(num_nodes), [f"node {node}" for node in range(num_nodes)])
    axes.invert_yaxis()
    axes.set_xlim(-1.5, max(bar.end for bar in bars) - killed)
    axes.set_xlabel(f"seconds after node {LOST} is killed")
    drawn = {bar.what for bar in bars}
    handles = [Patch(color=color, label=name) for name, color in COLORS.items() if name in drawn]
    axes.legend(handles=handles, ncols=len(handles), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
