"""Writes the lengths of the samples that a run trains on first, as --lengths of plan.py, simulate.py and balance.py take them.

python tools/lengths.py --output L.csv.gz [--num-samples N] <flags of pretrain_mllm.py, as for a run with --plan auto>

Nothing is decoded. Whatever --data-path names is indexed once, and the index is kept beside it for the run.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore", module=r"megatron\.core.*|torch\..*")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.runtime.feed.data_sets import build_data_sets
from megatron.runtime.flags.arguments import choose_trained, parse_arguments
from megatron.runtime.orchestrator.orchestrate import MOST_SAMPLES, first_lengths
from multimodal.cost.layers.registry import read_model
from multimodal.data.length_table import write_length_table
from tools.command_line import Parser, count, run_tool


def build_parser() -> Parser:
    """Return the parser of the tool's own flags; all other flags are those of a run."""
    parser = Parser(prog="lengths.py", description=__doc__, add_help=False)
    parser.add_argument("--help", action="help", default=argparse.SUPPRESS, help="Show this message.")
    parser.add_argument("--output", type=Path, required=True, metavar="L.csv.gz", help="Where the table goes (.csv or .csv.gz).")
    parser.add_argument("--num-samples", type=count, default=MOST_SAMPLES, metavar="N", help=f"At most so many ({MOST_SAMPLES}).")
    return parser


def run(argv: Sequence[str]) -> None:
    """Read the lengths that the run would read, and write them; raises BraidError."""
    given, of_run = build_parser().parse_known_args(argv)
    config = parse_arguments([*of_run, "--plan", "auto"], environ={})
    data = build_data_sets(config, choose_trained(read_model(config.model.model), config.model))
    lengths = list(first_lengths(config, data, most=given.num_samples))
    write_length_table(given.output, lengths)
    print(f"{given.output}: the lengths of {len(lengths)} of {len(data.train)} training samples")


main = partial(run_tool, "lengths.py", run)


if __name__ == "__main__":
    sys.exit(main())
