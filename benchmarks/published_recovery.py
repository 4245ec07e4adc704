"""Claim: what Braid loses at a failure is the running step; what Oobleck loses grows with the model instead.

Seconds that one failure costs on Oobleck's Table 2.2 (`published_setups/oobleck.py`: 30 A40, a failure every 10 minutes):
the published figure is 600 s x (1 - throughput over that at a failure every 6 hours). The simulated parts are

- running step: what had been computed of the step that is done again, none where losses are announced (`is_announced`);
- recover: noticing, agreeing, planning, regrouping: `--recovery-seconds` of `benchmarks/elastic.py`, 3 s for every loss and every
  return (`benchmarks/recovery.py` measures 0.55 s on eight processes of one machine, by part);
- copies: layers that nodes lack, over the network, by the bytes of weights and optimizer state.

Run `python benchmarks/published_recovery.py [--json]`; half a minute of one core.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.published_setups.oobleck import EXPERIMENTS, FREQUENT, NUM_FAILURES, Experiment, calibrated_cluster
from benchmarks.simulate_trace import Pauses
from multimodal.cost.cluster import Cluster

EVERY = FREQUENT["10 minutes"]


def measure(experiment: Experiment, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of a step, and those that a failure costs, by part."""
    pauses = Pauses()
    run = experiment.simulate(cluster, every=EVERY, pauses=pauses)
    announced = experiment.simulate(cluster, every=EVERY, pauses=Pauses(is_announced=True))
    again = sum(round(span.num_steps, 6) % 1 * span.step_seconds for span in run.spans if span.step_seconds)
    stopped = [span.end - span.start for span in run.spans if span.state == "recover"]
    copies = sum(each.copy_seconds for each in run.changes)
    parts = {"running step": again, "recover": sum(stopped) - copies, "copies": copies}
    step = experiment.step_seconds(cluster)
    return {
        "step": step,
        "published step": experiment.batch_size / max(experiment.throughput.values()),
        "published": EVERY * (1 - experiment.kept[EVERY]),
        **{name: seconds / NUM_FAILURES for name, seconds in parts.items()},
        "announced": sum(span.end - span.start for span in announced.spans if span.state == "recover") / NUM_FAILURES,
    }


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    cluster, _ = calibrated_cluster()
    rows = {each.name: measure(each, cluster) for each in EXPERIMENTS}
    if arguments.json:
        print(json.dumps(rows))
        return
    table = Table("seconds of a failure", *next(iter(rows.values())), box=None)
    for name, row in rows.items():
        table.add_row(name, *(f"{each:.1f}" for each in row.values()))
    Console(width=130, highlight=False).print(table)


if __name__ == "__main__":
    main()
