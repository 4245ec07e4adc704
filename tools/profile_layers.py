"""Times a model's layers on this device, writes them for --layer-costs of simulate.py and plan.py, and prints their errors.

python tools/profile_layers.py --model M.yaml --output costs.yaml [--unit U ...] [--tp 1,2] [--sizes 64,256,1024,4096]
                               [--sequences 1,8] [--dtype float32|bfloat16] [--fit quadratic|interpolate] [--repetitions N]
                               [--vocab-size N] [--picture OUT.png] [--json]

Every kind of layer of every unit runs for real, one layer at a time: its forward, its input gradient and its weight gradient are
timed apart. Costs that are quadratic in tokens and linear in the number of packed sequences are fitted at the given sizes and
compared with measurements at sizes in between. One device is enough for any tensor parallel size: a layer's share is timed with
collectives that send nothing, and their time is taken from the cluster file later.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal.cost.layers.registry import LAYER_KINDS, read_model
from multimodal.cost.seconds.layer_curves import PackedSize
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.values.errors import ConfigError
from multimodal.values.file_form import write_mapping
from multimodal.values.model_graph import ModelGraph, Unit
from tools.command_line import Parser, count, padded_vocab_size, program

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from megatron.runtime.orchestrator.profile_layers import ProfiledLayer

SECONDS_PER_SIZE = 0.2
COLORS = {"forward": "#4c8fd6", "input_gradient": "#e8883a", "weight_gradient": "#3fa66b"}
PANEL_INCHES = (4.2, 3.2)


def build_parser() -> Parser:
    """Return the parser of all flags."""
    parser = Parser(prog="profile_layers.py", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="M.yaml", help="units and their architecture")
    add("--output", type=Path, required=True, metavar="COSTS.yaml", help="where the costs go (.yaml or .json)")
    add("--unit", action="append", metavar="U", help="only this unit; may be given again (all)")
    add("--tp", type=_counts, default=(1,), metavar="1,2", help="tensor parallel sizes (1)")
    add("--sizes", type=_counts, default="64,256,1024,4096", metavar="N,N", help="tokens (%(default)s)")
    add("--sequences", type=_counts, default="1,8", metavar="N,N", help="how many sequences share these tokens (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="what layers compute in (float32 on CPU, bfloat16 on GPU)")
    add("--fit", choices=("quadratic", "interpolate"), default="quadratic", help="form of the curves (quadratic)")
    add("--repetitions", type=count, default=5, metavar="N", help="least number of runs per size, whose median counts (5)")
    add("--vocab-size", type=count, metavar="N", help="padded vocabulary (the model file's, else 50304)")
    add("--transformer-impl", choices=("local", "transformer_engine"), default="local", help="layers (local)")
    counting = "instead: write the model file anew, with the operations and weights of generators' modules of diffusers, counted"
    add("--count-operations", action="store_true", help=counting)
    add("--picture", type=Path, metavar="OUT.png", help="curves and measurements of all transformer layers")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({count(part) for part in text.split(",")}))


@program("profile_layers.py")
def main(argv: Sequence[str]) -> None:
    """Time, write and print according to the flags; raises BraidError."""
    given = build_parser().parse_args(argv)
    graph = read_model(given.model)
    _check(given, graph)
    # Behind the flags, since torch takes seconds.
    import torch
    from rich.console import Console

    from megatron.runtime import platform
    from megatron.runtime.orchestrator.profile_layers import ProfileOptions, join_profile, layers_of, profile_layer
    from multimodal.model.layers.generator_ends import count_operations
    from multimodal.model.transformer_config import BuildOptions

    if given.count_operations:
        counted = {unit.name: count_operations(unit) for unit in graph.generators if unit.module is not None}
        if not counted:
            raise ConfigError(f"--count-operations: no generator in {given.model} has a module; leave it out")
        units = tuple(counted.get(unit.name, unit) for unit in graph.units)
        write_mapping(given.output, replace(graph, units=units).to_dict())
        return
    platform.install()
    dtype = given.dtype or ("bfloat16" if platform.device().type == "cuda" else "float32")
    options = ProfileOptions(
        build=BuildOptions(getattr(torch, dtype), transformer_impl=given.transformer_impl),
        sizes=given.sizes,
        sequences=given.sequences,
        vocab_size=padded_vocab_size(given, graph),
        num_repetitions=given.repetitions,
        seconds_per_size=SECONDS_PER_SIZE,
        is_interpolated=given.fit == "interpolate",
    )
    layers: list[ProfiledLayer] = []
    console = Console(stderr=True)
    for unit in _units(graph, given):
        for key in layers_of(graph, unit, tensor_parallel_sizes=given.tp):
            console.print(f"timing {key[0]}, {key[1]}, tp {key[2]}", highlight=False)
            layers.append(profile_layer(graph, key, options))
    profile = join_profile(graph, layers, options)
    profile.to_file(given.output)
    if given.picture is not None:
        draw_curves(layers, given.picture)
    _report(layers, profile, given)


def _check(given: argparse.Namespace, graph: ModelGraph) -> None:
    for name in given.unit or ():
        graph.unit(name)
    if len(given.sizes) < 3:
        raise ConfigError(f"--sizes {','.join(map(str, given.sizes))}: a quadratic needs at least three sizes")
    for unit in _units(graph, given):
        for size in given.tp:
            if undivided := ", ".join(f"{what} {width}" for what, width in unit.divided_widths.items() if width % size):
                raise ConfigError(
                    f"--tp {size} does not divide unit '{unit.name}' ({undivided}); leave it out, or choose other units with "
                    "--unit"
                )


def _units(graph: ModelGraph, given: argparse.Namespace) -> list[Unit]:
    return [unit for unit in graph.units if given.unit is None or unit.name in given.unit]


def draw_curves(rows: "Sequence[ProfiledLayer]", path: Path) -> None:
    """Write a PNG with one panel per layer that attends: curves, dots that they were fitted to, and rings held out.

    Solid lines are for the fewest sequences that the tokens were packed in, dashed ones for more. Needs matplotlib.
    """
    from matplotlib.figure import Figure

    layers = [row for row in rows if LAYER_KINDS[row.key[1]].attends]
    figure = Figure(figsize=(PANEL_INCHES[0] * len(layers), PANEL_INCHES[1]), layout="constrained")
    for axes, layer in zip(figure.subplots(1, len(layers), squeeze=False)[0], layers, strict=True):
        _draw_layer(axes, layer)
    figure.savefig(path, dpi=110)


def _draw_layer(axes: "Axes", layer: "ProfiledLayer") -> None:
    import numpy as np

    counts = sorted({size.num_sequences for size in layer.fitted})
    for name, color in COLORS.items():
        measured = layer.seconds[name]
        if not any(measured.values()):
            continue
        for num_sequences in counts:
            label = name.replace("_", " ") if num_sequences == counts[0] else None
            sizes = [size.num_tokens for size in measured if size.num_sequences == num_sequences]
            line = [PackedSize(round(tokens), num_sequences) for tokens in np.geomspace(min(sizes), max(sizes), 60)]
            curve = getattr(layer.curves, name)
            milliseconds = [1e3 * curve.at(size.num_tokens, size.num_squared, num_sequences) for size in line]
            style: dict[str, Any] = {"color": color, "linestyle": "-" if label else "--", "linewidth": 1.2, "label": label}
            axes.plot([size.num_tokens for size in line], milliseconds, **style)
        for is_fitted, fill in ((True, color), (False, "none")):
            points = {size: 1e3 * value for size, value in measured.items() if (size in layer.fitted) == is_fitted}
            tokens = [size.num_tokens for size in points]
            axes.scatter(tokens, list(points.values()), s=18, facecolors=fill, edgecolors=color, zorder=3)
    ticks = sorted({size.num_tokens for size in layer.fitted if size.num_sequences == counts[0]})
    unit, kind, tensor_parallel_size, _ = layer.key
    axes.set(title=f"{unit}, {kind}, tp {tensor_parallel_size}", xscale="log", yscale="log")
    axes.set(xlabel="tokens", ylabel="milliseconds")
    axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(frameon=False, fontsize=8)


def _report(rows: "Sequence[ProfiledLayer]", profile: LayerProfile, given: argparse.Namespace) -> None:
    step = profile.step
    assert step is not None
    if given.json:
        layers = [
            {
                "unit": row.key[0],
                "layer": str(row.key[1]),
                "tensor_parallel_size": row.key[2],
                "held_out_error": {name: {"mean": error.mean, "worst": error.worst} for name, error in row.errors.items()},
            }
            for row in rows
        ]
        print(json.dumps({"output": str(given.output), "layers": layers, "step": asdict(step)}))
        return
    from rich.console import Console
    from rich.table import Table

    from megatron.runtime.profiler import LayerTimes

    names = LayerTimes._fields[:3]
    table = Table("unit", "layer", "tp", *names, title="mean (worst) error at held-out sizes", box=None)
    for row in rows:
        errors = (f"{row.errors[name].mean:.1%} ({row.errors[name].worst:.1%})" for name in names)
        table.add_row(row.key[0], str(row.key[1]), str(row.key[2]), *errors)
    console = Console(width=120, highlight=False)
    console.print(table)
    console.print(
        f"beside layers: {1e6 * step.computation_seconds:.0f} us per computation, {1e3 * step.seconds:.2f} ms per step; update: "
        f"{1e3 * step.unit_update_seconds:.2f} ms per unit, {1e9 * step.weight_update_seconds:.2f} ns per weight"
    )
    console.print(f"written to {given.output}")


if __name__ == "__main__":
    sys.exit(main())
