"""Writes the lengths of the samples that a run trains on first, as --lengths of plan.py, simulate.py and balance.py take them.

python tools/lengths.py --output L.csv.gz [--png H.png] [--num-samples N] <flags of pretrain_mllm.py, as with --plan auto>

Nothing is decoded. Whatever --data-path names is indexed once, and the index is kept beside it for the run.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal.data.length_table import MOST_SAMPLES, write_length_table
from multimodal.values.errors import ConfigError, require_package
from tools.command_line import Parser, count, parser_beside_a_run, program, read_run_flags

BAR_WIDTH = 50
"""Characters of the longest bar of a histogram."""


def build_parser() -> Parser:
    """Return the parser of the tool's own flags."""
    parser = parser_beside_a_run("lengths.py", __doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="L.csv.gz", help="Where the table goes (.csv or .csv.gz).")
    parser.add_argument("--png", type=Path, metavar="H.png", help="Draw the histograms, too; needs matplotlib.")
    parser.add_argument("--num-samples", type=count, default=MOST_SAMPLES, metavar="N", help=f"At most so many ({MOST_SAMPLES}).")
    return parser


@program("lengths.py")
def main(argv: Sequence[str]) -> None:
    """Read the lengths that the run would read, and write them; raises BraidError."""
    given, config, graph = read_run_flags(build_parser(), argv)
    from megatron.runtime.feed.data_sets import build_data_sets  # behind the flags, as torch takes seconds
    from megatron.runtime.orchestrator.orchestrate import first_lengths

    data = build_data_sets(config, graph)
    lengths = list(first_lengths(config, data, most=given.num_samples))
    write_length_table(given.output, lengths)
    print(f"{given.output}: the lengths of {len(lengths)} of {len(data.train.source)} training samples")
    tokens = {"text": [sample.num_text_tokens for sample in lengths]}
    for unit in dict.fromkeys(item.unit for sample in lengths for item in sample.items):
        tokens[unit] = [sum(item.num_tokens for item in each.items if item.unit == unit) for each in lengths]
    print("\n".join(_histograms(tokens)))
    if given.png is not None:
        _draw(tokens, given.png)
        print(f"{given.png}: the same, drawn")


def _draw(tokens: Mapping[str, Sequence[int]], path: Path) -> None:
    """Draw histograms with a logarithmic axis of tokens, one above the other; raises ConfigError."""
    require_package("matplotlib", extra="plots", needed_by="--png", error=ConfigError)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.2 * len(tokens)), dpi=110, layout="constrained")
    for axes, (name, numbers) in zip(figure.subplots(len(tokens), squeeze=False)[:, 0], tokens.items(), strict=True):
        axes.hist(numbers, bins=[0, *(2 ** (step / 4) for step in range(4 * max(numbers).bit_length() + 1))])
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_title(f"{name}: tokens a sample", fontsize=9)
        axes.set_ylabel("samples")
    try:
        figure.savefig(path, format="png")
    except OSError as problem:
        raise ConfigError(f"--png {path}: cannot be written ({problem.strerror}); give another file") from problem


def _histograms(tokens: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yield lines of bars: for the text and every unit, how many samples have how many tokens, in ranges of powers of two."""
    for name, numbers in tokens.items():
        yield f"{name}: {sum(numbers) / len(numbers):,.0f} tokens a sample, {min(numbers):,} to {max(numbers):,}"
        counts = Counter(number.bit_length() for number in numbers)
        for bits in range(min(counts), max(counts) + 1):
            bar = "#" * -(-counts[bits] * BAR_WIDTH // max(counts.values()))
            yield f"  {2**bits // 2:>9,} to {max(0, 2**bits - 1):<9,} {counts[bits]:>9,}  {bar}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
