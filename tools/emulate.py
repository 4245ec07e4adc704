"""Runs a schedule on this machine with computations as timed waits, and prints its measured beside its simulated seconds.

python tools/emulate.py --costs COSTS.yaml --schedule 1f1b [--schedule-passes fill,...] [--iterations N] [--json]
                        [--report-dir DIR]
python tools/emulate.py --model M.yaml --cluster C.yaml --plan P.yaml --lengths L.csv.gz --schedule 1f1b ...

It runs a table of seconds per stage, or a model on a cluster with the flags of tools/simulate.py (--layer-costs, --balance, ...).
Every lane of a table, every rank of a model's plan becomes a process; messages, broker, gradient reductions and the executor are
the real ones. Waiting costs no core, so 16 ranks fit on two. --report-dir gets measured.json and simulated.json (for
`tools/trace.py diff`) and a picture.
"""

import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal.schedule.builders import BUILDERS, schedule_name
from multimodal.schedule.passes import PASSES, passes_named
from multimodal.schedule.simulate import simulate_schedule
from tools import simulate
from tools.command_line import Parser, count, program
from tools.simulate import build_step_schedule, build_steps, check_flags

if TYPE_CHECKING:
    from megatron.runtime.emulation.emulated_run import EmulatedRun


def build_parser() -> Parser:
    """Return the parser of the tool's own flags; all other flags are those of tools/simulate.py."""
    parser, names = Parser(prog="emulate.py", description=__doc__), ", ".join(BUILDERS.listed())
    parser.add_argument("--schedule", type=schedule_name, metavar="NAME", default="1f1b", help=f"Of {names}.")
    parser.add_argument("--schedule-passes", default="", metavar="A,B", help=f"Of {', '.join(PASSES)}.")
    parser.add_argument("--iterations", type=count, default=5, metavar="N", help="Measured steps, whose median counts (5).")
    parser.add_argument("--report-dir", type=Path, metavar="DIR", help="Folder for timelines and a picture.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    return parser


@program("emulate.py")
def main(argv: Sequence[str]) -> None:
    """Emulate and print; raises BraidError."""
    given, model_flags = build_parser().parse_known_args(argv)
    from megatron.runtime.emulation.emulated_run import emulate  # behind the flags, as torch takes seconds
    from multimodal.schedule.chrome_trace import write_chrome_trace
    from multimodal.schedule.draw import draw_timelines

    emulated = build_run(model_flags, given.schedule, given.schedule_passes, num_iterations=given.iterations)
    simulation = simulate_schedule(emulated.schedule, emulated.costs)
    timelines = emulate(emulated)
    measured = statistics.median(timeline.duration_seconds for timeline in timelines)
    summary = {
        "simulated_seconds": simulation.iteration_seconds,
        "measured_seconds": measured,
        "ratio": measured / simulation.iteration_seconds,
        "num_lanes": simulation.num_lanes,
        "num_microbatches": simulation.num_microbatches,
        "num_iterations": len(timelines),
    }
    if given.report_dir is not None:
        given.report_dir.mkdir(parents=True, exist_ok=True)
        middle = sorted(timelines, key=lambda timeline: timeline.duration_seconds)[len(timelines) // 2]
        write_chrome_trace(middle, given.report_dir / "measured.json")
        write_chrome_trace(simulation.timeline, given.report_dir / "simulated.json")
        draw_timelines({f"{given.schedule}, measured": middle}, given.report_dir / "measured.png")
    if given.json:
        print(json.dumps(summary))
    else:
        print("\n".join(f"{name:>20}  {value}" for name, value in summary.items()))


def build_run(model_flags: Sequence[str], schedule: str, passes: str, *, num_iterations: int) -> "EmulatedRun":
    """Build the run of the first step that the flags of tools/simulate.py describe; raises BraidError."""
    from megatron.runtime.emulation.emulated_run import EmulatedRun

    flags = simulate.build_parser().parse_args([*model_flags, "--schedule", schedule])
    check_flags(flags)
    step = next(iter(build_steps(flags)))
    built = build_step_schedule(step, builder=schedule, passes=passes_named(passes))
    return EmulatedRun(built, step.assignment, step.costs, num_iterations)


if __name__ == "__main__":
    sys.exit(main())
