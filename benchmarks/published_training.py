"""Claim: simulation predicts the papers' published training figures within 10 %, calibrated on one point per paper.

Every paper's set-up is planned and simulated as the paper describes it; what it leaves open is stated in the files of
`benchmarks/published_setups`, one for each paper. The cluster's computing speed is set once per paper on the row marked
"calibrated" (Entrain and OrchMLLM publish nothing that could be, and use the cluster files as they are). The error is the
distance to the published figure, or to the nearer end of a published range; an "up to" is not counted, only its largest case, nor
is a figure that others of its paper contradict or whose data is not at hand (its error stands in brackets, the reason below).
See docs/published.md for what disagrees, and why.

Run `python benchmarks/published_training.py [--json] [--only PAPER] [--lengths DIR]`; about 40 s of one core in all. Entrain and
OrchMLLM need a folder of lengths files.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.published_setups import cornstarch, disttrain, entrain, oobleck, optimus, orchmllm
from benchmarks.published_setups.length_files import is_complete
from benchmarks.published_setups.rows import Row

LENGTHS = Path(__file__).resolve().parents[2] / "shared" / "data" / "lengths"
AIM = 0.10
PAPERS = ("optimus", "disttrain", "cornstarch", "oobleck", "entrain", "orchmllm")


def paper_rows(folder: Path) -> Mapping[str, Callable[[], Iterator[Row]]]:
    """Paper -> what computes its rows; those without data are left out."""
    found: dict[str, Callable[[], Iterator[Row]]] = {
        "optimus": optimus.rows,
        "disttrain": disttrain.rows,
        "cornstarch": cornstarch.rows,
        "oobleck": oobleck.rows,
    }
    if is_complete(folder):
        found |= {"entrain": lambda: entrain.rows(folder), "orchmllm": lambda: orchmllm.rows(folder)}
    return found


def print_table(rows: Sequence[Row]) -> None:
    """Print a row per published figure."""
    table = Table("paper", "figure", "published", "simulated", "error", "source", box=None)
    for row in rows:
        error = "inside" if row.is_bound and not row.error else f"{row.error:+.1%}"
        if row.calibrated_speed is not None:
            error = f"calibrated: {row.calibrated_speed:.2f} x"
        if row.not_counted:
            error = f"({error})"
        style = "dim" if row.is_calibrated or row.not_counted else "red" if abs(row.error) > AIM else "green"
        table.add_row(row.paper, row.what, _published(row), _number(row.simulated, row.unit), error, row.source, style=style)
    Console(width=150, highlight=False).print(table)


def _published(row: Row) -> str:
    low, high = row.published
    if row.is_bound:
        return f"up to {_number(high, row.unit)}"
    return _number(low, row.unit) if low == high else f"{_number(low, row.unit)} to {_number(high, row.unit)}"


def _number(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "share" else f"{value:.4g} {unit}"


def main(argv: Sequence[str]) -> int:
    """Predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--only", choices=PAPERS, help="one paper")
    parser.add_argument("--lengths", type=Path, default=LENGTHS, metavar="DIR", help="folder of lengths files")
    given = parser.parse_args(argv)
    papers = {name: rows for name, rows in paper_rows(given.lengths).items() if given.only in (None, name)}
    rows = [row for of_paper in papers.values() for row in of_paper()]
    compared = [row for row in rows if row.is_compared]
    num_within = sum(abs(row.error) <= AIM for row in compared)
    left_out = [name for name in PAPERS if name not in papers and given.only in (None, name)]
    if given.json:
        found = {"rows": [row.to_dict() for row in rows], "compared": len(compared), "within_aim": num_within, "aim": AIM}
        print(json.dumps({**found, "left_out": left_out}))
        return 0
    print_table(rows)
    print(f"{num_within} of {len(compared)} compared figures within {AIM:.0%}")
    for row in rows:
        if row.not_counted:
            print(f"not counted: {row.paper}, {row.what}: {row.not_counted}")
    for name in left_out:
        print(f"{name}: left out, since {given.lengths} lacks lengths files; give another folder with --lengths")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
