"""Claim: a run with one wrong input ends on every rank within 20 s, with one message that names the place and the fix.

A run that accepts the input trains as one process does.

    python benchmarks/mutated_inputs.py                          500 kinds of single mutations, drawn at random
    python benchmarks/mutated_inputs.py --number 0 --area model  all kinds of one area

Prints every mutation that breaks the claim with the output of its run, then a table of all areas. Ranks are forked on this
machine, `--at-once` runs beside each other; seconds are from the start of the first rank to the end of the last.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the mutations are those of the tests, which are not installed

from tests.distributed.launch import forking_context
from tests.distributed.mutations.mutation import Mutation
from tests.distributed.mutations.run import Outcome, run_mutation, save_given
from tests.distributed.mutations.table import draw_mutations, list_mutations

LIMIT_SECONDS = 20.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutations; returns the number of those that broke the claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=500, help="kinds of mutations to draw; 0: all")
    parser.add_argument("--area", nargs="+", help="only kinds of these areas (flag, model, folder, adapter, producer, ...)")
    parser.add_argument("--seed", type=int, default=0, help="which kinds are drawn")
    parser.add_argument("--at-once", type=int, default=2, help="runs beside each other")
    parser.add_argument("--json", type=Path, help="also write every outcome into this file")
    arguments = parser.parse_args(argv)
    mutations = draw_mutations(arguments.number or sys.maxsize, seed=arguments.seed, areas=arguments.area)
    outcomes = _run(mutations, num_at_once=arguments.at_once, seed=arguments.seed)
    _print_table(outcomes)
    if arguments.json:
        rows = [{**outcome._asdict(), "mutation": outcome.mutation.name} for outcome in outcomes]
        arguments.json.write_text(json.dumps(rows, indent=1))
    return sum(bool(outcome.problems) for outcome in outcomes)


def _run(mutations: Sequence[Mutation], *, num_at_once: int, seed: int) -> list[Outcome]:
    """Run mutations in processes, each of which launches from its main thread alone."""
    with tempfile.TemporaryDirectory() as folder:
        given = save_given(Path(folder) / "base")
        run_one = partial(_run_one, folder=Path(folder), given=given, seed=seed)
        outcomes = []
        with ProcessPoolExecutor(num_at_once, multiprocessing.get_context("spawn"), initializer=_start_fork_server) as pool:
            for mutation, found in zip(mutations, pool.map(run_one, [mutation.name for mutation in mutations]), strict=True):
                outcomes.append(outcome := Outcome(mutation, *found))
                if outcome.problems:
                    print(f"-- {mutation.name}: {'; '.join(outcome.problems)}\n{outcome.output}", flush=True)
        return outcomes


def _start_fork_server() -> None:
    """Import what ranks import, which the first run would be charged for."""
    first = forking_context().Process(target=os.getpid)
    first.start()
    first.join()


def _run_one(name: str, *, folder: Path, given: Path, seed: int) -> tuple[Any, ...]:
    """Run one mutation by its name; returns its outcome without the mutation, which cannot travel between processes."""
    mutation = _mutations_by_name()[name]
    own = Path(tempfile.mkdtemp(dir=folder))
    outcome = run_mutation(mutation, folder=own / "run", given=given, seed=seed)
    shutil.rmtree(own, ignore_errors=True)
    return outcome[1:]


@cache
def _mutations_by_name() -> dict[str, Mutation]:
    return {mutation.name: mutation for mutation in list_mutations()}


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
