"""Claim: a run with one wrong input ends on every rank within 20 s, with one message that names the place and the fix.

A run that accepts the input trains as one process does.

    python benchmarks/mutated_inputs.py                          500 kinds of single mutations, drawn at random
    python benchmarks/mutated_inputs.py --number 0 --area model  all kinds of one area

Prints every mutation that breaks the claim with the output of its run, then a table of all areas. Ranks are forked on this
machine, `--at-once` runs beside each other; seconds are from the start of the first rank to the end of the last.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the mutations are those of the tests, which are not installed

from tests.distributed.mutations.judge import Outcome
from tests.distributed.mutations.mutation import Mutation
from tests.distributed.mutations.run import run_mutation, save_given
from tests.distributed.mutations.table import draw_mutations, list_mutations

LIMIT_SECONDS = 20.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutations; returns the number of those that broke the claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=500, help="kinds of mutations to draw; 0: all")
    parser.add_argument("--area", help="only kinds of this area (flag, model, cluster, folder, adapter, producer, ...)")
    parser.add_argument("--seed", type=int, default=0, help="which kinds are drawn")
    parser.add_argument("--at-once", type=int, default=2, help="runs beside each other")
    parser.add_argument("--json", type=Path, help="also write every outcome into this file")
    arguments = parser.parse_args(argv)
    drawn = list_mutations() if arguments.area or not arguments.number else draw_mutations(arguments.number, seed=arguments.seed)
    mutations = [mutation for mutation in drawn if arguments.area in (None, mutation.area)][: arguments.number or None]
    outcomes = _run(mutations, num_at_once=arguments.at_once, seed=arguments.seed)
    _print_table(outcomes)
    if arguments.json:
        rows = [{**outcome._asdict(), "mutation": outcome.mutation.name} for outcome in outcomes]
        arguments.json.write_text(json.dumps(rows, indent=1))
    return sum(bool(outcome.problems) for outcome in outcomes)


def _run(mutations: Sequence[Mutation], *, num_at_once: int, seed: int) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = save_given(folder / "base")

        def run(index: int) -> Outcome:
            outcome = run_mutation(mutations[index], folder=folder / str(index), given=given, seed=seed)
            if outcome.problems:
                print(f"-- {outcome.mutation.name}: {'; '.join(outcome.problems)}\n{outcome.output}", flush=True)
            return outcome

        with ThreadPoolExecutor(num_at_once) as pool:
            return list(pool.map(run, range(len(mutations))))


def _print_table(outcomes: Sequence[Outcome]) -> None:
    print(f"{'area':<12}{'kinds':>8}{'refused':>10}{'trained':>10}{'over 20 s':>12}{'slowest s':>12}{'broken':>8}")
    for area in [*dict.fromkeys(outcome.mutation.area for outcome in outcomes), "all"]:
        of_area = [outcome for outcome in outcomes if area in (outcome.mutation.area, "all")]
        num_refused = sum(outcome.is_refused for outcome in of_area)
        num_late = sum(outcome.seconds > LIMIT_SECONDS for outcome in of_area)
        num_broken = sum(bool(outcome.problems) for outcome in of_area)
        print(
            f"{area:<12}{len(of_area):>8}{num_refused:>10}{len(of_area) - num_refused:>10}{num_late:>12}"
            f"{max(outcome.seconds for outcome in of_area):>12.1f}{num_broken:>8}"
        )


if __name__ == "__main__":
    sys.exit(bool(main()))
