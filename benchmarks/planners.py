"""Claim: on real lengths and on uniform ones, `braid`'s plan is the best or equal to the best of every planner's.

Every planner plans each case at its own best microbatch size and with its own best balancer, and every plan is judged by the
same simulation of the same batches. The cases: the lengths files (`--lengths-folder`, one model for images and one for speech),
drawn lengths of very unequal images and of long videos, and seven pairs of a published model and a cluster with uniform lengths.
The last columns are the ideal time over the step's (at 64 GPUs and more the goal for `braid` is 0.91) and the floor over the
step's; the floor has no waits for tensor parallel collectives and no recomputation. What is missing is listed by kind.

`--twice` lets `braid` plan every case again: the plans must be equal. `--regret 10` compares its plans with those of a search
with ten times the budget, as the step over the longer search's; the goal is at most 1.03. `--only-braid` leaves the others out.

A case takes a minute or, with all planners, several. `--only` picks some; `--resume FILE` adds each case to a file as soon as it
is measured and shows those that are there already, so that a long run can be ended and taken up again.

Run `python benchmarks/planners.py [--json] [--lengths-folder DIR] [--num-gpus N] [--time-budget S] [--only PART_OF_A_NAME,...]
[--only-braid] [--twice] [--regret FACTOR] [--resume FILE]`.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.baselines import COMPARED
from multimodal.cost.cluster import Cluster
from multimodal.cost.unit_load import sample_load
from multimodal.data.length_table import read_length_table, uniform_lengths
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.plan.planners.search.plan_to_fit import PredictedRun, describe
from multimodal.values.errors import BraidError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import SampleLengths

ROOT = Path(__file__).resolve().parents[1]
TOKENS_PER_GPU, LEAST_SAMPLES, MOST_SAMPLES = 32_768, 16, 512
"""Tokens per GPU in a global batch, and bounds of its samples per GPU. A language model's batch has 2 million tokens on 64 GPUs.
With only 16 short samples each, GPUs would exchange gradients for longer than they compute."""
FILE_GPUS = 64
"""GPUs for the lengths files, unless `--num-gpus` gives another number."""
SPEECH = ("common_voice", "fsdd", "librispeech")
"""Parts of the names of lengths files that hold speech."""


class Case(NamedTuple):
    """One model, cluster and data set."""

    name: str
    request: PlanningRequest


PAIRS = (
    ("mllm-9b", "a800", 96, 128, {"vision": 1024, "llm": 8192, "generator": 64}, ()),
    ("mllm-9b", "a800", 96, 256, {"vision": 1024, "llm": 8192, "generator": 64}, ()),
    ("mllm-72b", "a800", 96, 40, {"vision": 1024, "llm": 8192, "generator": 256}, ()),
    ("vit-22b-gpt-175b", "h100", 512, 256, {"vision": 2048, "llm": 2560}, ()),
    ("cornstarch-vlm-m", "a40", 24, 96, {"vision": 1024, "llm": 2048}, ("vision", "llm")),
    ("orchmllm-10b", "h100", 64, 512, {"vision": 1024, "audio": 1500, "llm": 3072}, ()),
    ("qwen2.5-omni-7b", "h100", 64, 512, {"vision": 1024, "audio": 1500, "llm": 3072}, ()),
)
"""Model, cluster, GPUs, global batch, tokens of each unit, frozen modules."""


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield the requested cases."""
    for path in sorted(arguments.lengths_folder.glob("*.csv.gz")) if arguments.lengths_folder.is_dir() else ():
        model = "qwen2.5-omni-7b" if any(part in path.name for part in SPEECH) else "qwen2.5-vl-7b"
        graph = ModelGraph.from_file(ROOT / "examples" / "models" / f"{model}.yaml")
        lengths = read_length_table(path, graph=graph)
        num_gpus = arguments.num_gpus or FILE_GPUS
        batch = num_gpus * (arguments.samples_per_gpu or samples_per_gpu(graph, lengths))
        yield Case(
            f"{path.name.removesuffix('.csv.gz')}: {model}, {num_gpus} H100, batch {batch}",
            _request(graph, "h100", num_gpus, batch, lengths, arguments),
        )
    for name, draw, model, drawn_gpus, drawn_batch in DRAWN:
        graph = ModelGraph.from_file(ROOT / "examples" / "models" / f"{model}.yaml")
        lengths = drawn_lengths(graph, draw())
        num_gpus = arguments.num_gpus or drawn_gpus
        batch = num_gpus * (arguments.samples_per_gpu or drawn_batch // drawn_gpus)
        yield Case(
            f"{name}: {model}, {num_gpus} H100, batch {batch}", _request(graph, "h100", num_gpus, batch, lengths, arguments)
        )
    for model, cluster, num_gpus, batch, tokens, frozen in PAIRS:
        graph = ModelGraph.from_file(ROOT / "examples" / "models" / f"{model}.yaml")
        graph = replace(graph, units=tuple(replace(unit, freeze_module=unit.name in frozen) for unit in graph.units))
        lengths = uniform_lengths(graph, tokens=tokens, num_samples=1)
        yield Case(
            f"{model}, {num_gpus} {cluster.upper()}, batch {batch}", _request(graph, cluster, num_gpus, batch, lengths, arguments)
        )


def unequal_images() -> Iterator[tuple[str, int]]:
    """Draw one image per sample, of 60 to 6,000 pixels a side, and text: lognormal sizes."""
    draw = random.Random(1)
    for _ in range(4000):
        side = min(6000, max(60, int(math.exp(draw.gauss(6.2, 0.8)))))
        aspect = math.exp(draw.gauss(0, 0.4))
        yield f"{max(56, int(side * aspect))}x{max(56, int(side / aspect))}", max(5, int(math.exp(draw.gauss(4.5, 1.0))))


def long_videos() -> Iterator[tuple[str, int]]:
    """Draw 4 to 96 frames of 448 x 336 pixels per sample, and a caption."""
    draw = random.Random(2)
    for _ in range(2000):
        num_frames = min(96, max(4, int(math.exp(draw.gauss(2.8, 0.7)))))
        yield ";".join(["448x336"] * num_frames), max(20, int(math.exp(draw.gauss(5, 0.6))))


DRAWN = (
    ("unequal images", unequal_images, "qwen2.5-vl-72b", 256, 2048),
    ("long videos", long_videos, "qwen2.5-vl-7b", 128, 2048),
)
"""Name, lengths, model, GPUs, global batch."""


def drawn_lengths(graph: ModelGraph, rows: Iterable[tuple[str, int]]) -> tuple[SampleLengths, ...]:
    """Convert drawn rows of image sizes and text tokens as a lengths file is read."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.csv"
        lines = (f"{index},{sizes},{tokens}" for index, (sizes, tokens) in enumerate(rows))
        path.write_text("\n".join(("sample_id,image_sizes,text_tokens", *lines)))
        return read_length_table(path, graph=graph)


def samples_per_gpu(graph: ModelGraph, lengths: Sequence[SampleLengths]) -> int:
    """Return the power of two for about `TOKENS_PER_GPU` tokens of the unit that has most, within the bounds."""
    totals = (sum(sample_load(unit, sample).num_tokens for sample in lengths) for unit in graph.units)
    wanted = TOKENS_PER_GPU * len(lengths) / max(1, *totals)
    return min(MOST_SAMPLES, max(LEAST_SAMPLES, 2 ** round(math.log2(wanted))))


def _request(
    graph: ModelGraph, cluster: str, num_gpus: int, batch: int, lengths: Any, arguments: argparse.Namespace
) -> PlanningRequest:
    return PlanningRequest(
        graph,
        Cluster.from_file(ROOT / "examples" / "clusters" / f"{cluster}.yaml"),
        num_gpus,
        batch,
        lengths,
        vocab_size=graph.backbone.vocab_size or 50304,
        time_budget_seconds=arguments.time_budget,
    )


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan with every planner, and with `braid` again and with a larger budget if requested."""
    names = ("braid",) if arguments.only_braid else tuple(COMPARED)
    found = {name: describe_plan(name, case.request) for name in names}
    if arguments.twice:
        found["braid"]["is_equal_twice"] = describe_plan("braid", case.request)["plan"] == found["braid"]["plan"]
    if arguments.regret and "error" not in found["braid"]:
        longer = describe_plan("braid", replace(case.request, time_budget_seconds=arguments.regret * arguments.time_budget))
        found["braid"]["regret"] = found["braid"]["iteration_seconds"] / longer["iteration_seconds"]
    return found


def measure_all(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure the requested cases, except those that the file of `--resume` holds."""
    wanted = arguments.only.split(",")
    results: dict[str, dict[str, Any]] = {}
    if arguments.resume and arguments.resume.exists():
        known = (json.loads(line) for line in arguments.resume.read_text().splitlines())
        results = {name: found for name, found in known if any(part in name for part in wanted)}
    for case in cases(arguments):
        if case.name not in results and any(part in case.name for part in wanted):
            results[case.name] = measure(case, arguments)
            if arguments.resume:
                with arguments.resume.open("a") as file:
                    print(json.dumps([case.name, results[case.name]]), file=file)
    return results


def describe_plan(name: str, request: PlanningRequest) -> dict[str, Any]:
    """Plan with one planner, and describe the plan."""
    try:
        run, prediction = COMPARED[name].plan_best(request)
    except BraidError as problem:
        return {"error": str(problem), "plan": None}
    return {
        "iteration_seconds": prediction.iteration_seconds,
        "of_ideal": prediction.ideal_seconds / prediction.iteration_seconds,
        "of_floor": prediction.floor_seconds / prediction.iteration_seconds,
        "above_floor": dict(prediction.above_floor),
        "mfu": prediction.mfu,
        "gpus": run.num_gpus,
        "planning_seconds": run.planning_seconds,
        "plan": run.key,
        "run": describe(PredictedRun(run, prediction)),
    }


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print a table with a row per case and a column per planner, steps relative to braid's; and the parts of each step."""
    others = [name for name in next(iter(results.values()), {}) if name != "braid"]
    table = Table("case", "braid", *others, "ideal/step", "floor/step", "regret", "equal twice")
    for name, found in results.items():
        braid = found["braid"]
        if "error" in braid:
            table.add_row(name, "no plan")
            continue
        ratios = (
            f"{found[other]['iteration_seconds'] / braid['iteration_seconds']:.3f}" if "error" not in found[other] else "-"
            for other in others
        )
        shares = (f"{braid[key]:.3f}" if key in braid else "-" for key in ("of_ideal", "of_floor", "regret"))
        table.add_row(name, f"{braid['iteration_seconds']:.4g} s", *ratios, *shares, str(braid.get("is_equal_twice", "-")))
    console = Console(width=220)
    console.print(table)
    for name, found in results.items():
        console.print(f"{name}: {found['braid'].get('run', found['braid'].get('error'))}", highlight=False)


def main() -> None:
    """Measure and print; also print whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--lengths-folder", type=Path, default=ROOT.parent / "shared" / "data" / "lengths", metavar="DIR")
    parser.add_argument("--num-gpus", type=int, help="for files and drawn lengths (64, and what each drawn case says)")
    parser.add_argument("--samples-per-gpu", type=int, help="of their global batches (by tokens, and what each drawn case says)")
    parser.add_argument("--time-budget", type=float, default=30.0, help="seconds for braid and each case (30)")
    parser.add_argument("--only", default="", help="leave out cases whose name has none of these texts, with commas between")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="add every measured case to this file, and none that it holds"
    )
    parser.add_argument("--only-braid", action="store_true", help="leave the other planners out")
    parser.add_argument("--twice", action="store_true", help="let braid plan again, and compare the plans")
    parser.add_argument("--regret", type=float, metavar="FACTOR", help="compare with a search of so many times the budget")
    arguments = parser.parse_args()
    results = measure_all(arguments)
    planned = [found for found in results.values() if "error" not in found["braid"]]
    is_repeatable = all(found["braid"].get("is_equal_twice", True) for found in planned)
    is_best = len(planned) == len(results) and all(
        found["braid"]["iteration_seconds"] <= each["iteration_seconds"] * (1 + 1e-9)
        for found in planned
        for each in found.values()
        if "error" not in each
    )
    if arguments.json:
        print(json.dumps({"cases": results, "holds": is_best and is_repeatable}))
        return
    show(results)
    print(f"braid is best or equal everywhere: {is_best}" + f"; its plans are equal: {is_repeatable}" * arguments.twice)


if __name__ == "__main__":
    main()
