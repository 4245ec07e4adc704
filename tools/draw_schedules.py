"""Draw the figures of docs/schedule.md: every builder on one small example, in the layout that it is for.

Run `python tools/draw_schedules.py [FOLDER]`; the folder is docs/figures by default.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.draw import draw_timeline
from multimodal.schedule.unit_cost_timeline import timeline_of_unit_costs
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan

NUM_MICROBATCHES = 8
Layers = list[list[int]]
STAGES: list[Layers] = [[[0, 3]], [[3, 6]]]
"""The LLM's layers on its two stages: embedding, four transformer layers, head."""
INTERLEAVED: list[Layers] = [[[0, 2], [3, 4]], [[2, 3], [4, 6]]]
V_SHAPED: list[Layers] = [[[0, 2], [4, 6]], [[2, 3], [3, 4]]]


class Figure(NamedTuple):
    """What one builder is drawn on."""

    title: str
    llm_stages: list[Layers] = STAGES
    encoder_ranks: tuple[tuple[int, ...], ...] = ((0,), (1,))
    """Per encoder its stages' ranks; the LLM's are 2 and 3."""
    is_replicated: bool = False
    """Whether these are ranks of whole copies instead, of which the first has all microbatches."""


FIGURES = {
    "gpipe": Figure("GPipe: all forwards, then all backwards"),
    "breadth-first": Figure("Breadth-first: all microbatches through one layer range before the next", llm_stages=INTERLEAVED),
    "1f1b": Figure("1F1B: one forward, one backward"),
    "eager-1f1b": Figure("Eager 1F1B: forwards run ahead as far as memory allows"),
    "interleaved-1f1b": Figure("Interleaved 1F1B: two layer ranges per LLM stage", llm_stages=INTERLEAVED),
    "zb-h1": Figure("ZB-H1: weight gradients fill what would be idle"),
    "zb-v": Figure("ZB-V: the LLM's layers go down and up its stages", llm_stages=V_SHAPED),
    "dip": Figure("DIP: encoders, then the LLM, then encoders, on the same ranks", encoder_ranks=((2, 3), (2, 3))),
    "encoders-colocated": Figure("Encoders-colocated: two encoders act as one", encoder_ranks=((0, 1), (0, 1))),
    "encoders-replicated": Figure(
        "Encoders-replicated: every stage of the LLM repeats the encoders", encoder_ranks=((2, 3), (2, 3)), is_replicated=True
    ),
}


def build_example(figure: Figure) -> tuple[ModelGraph, Plan, Assignment]:
    """Return a vision and an audio encoder that feed an LLM of two stages: eight samples with one item for each encoder."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
    encoders = ("vision", "audio")
    units = {name: {"role": "encoder", "num_layers": 2, **shape} for name in encoders}
    graph = ModelGraph.from_dict({"units": units | {"llm": {"role": "backbone", "num_layers": 4, **shape}}})
    replicas = {
        name: [_encoder_stages((rank,)) for rank in ranks] if figure.is_replicated else [_encoder_stages(ranks)]
        for name, ranks in zip(encoders, figure.encoder_ranks, strict=True)
    }
    replicas["llm"] = [[{"ranks": [rank], "layers": layers} for rank, layers in zip((2, 3), figure.llm_stages, strict=True)]]
    held = [stage for each in replicas.values() for stages in each for stage in stages]
    first_rank = min(stage["ranks"][0] for stage in held)
    for stage in held:
        stage["ranks"] = [rank - first_rank for rank in stage["ranks"]]
    plan = Plan.from_dict(
        {"units": {name: {"replicas": [{"stages": each} for each in found]} for name, found in replicas.items()}}
    )
    items = {"vision": 0, "audio": 1, "llm": -1}
    placed = {name: tuple((Atom(sample, item),) for sample in range(NUM_MICROBATCHES)) for name, item in items.items()}
    return graph, plan, Assignment({name: (placed[name], *[()] * (len(found) - 1)) for name, found in replicas.items()})


def _encoder_stages(ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    """An encoder of four layers (embedding, two transformer layers, projector) on one or two ranks."""
    layers = [[[0, 4]]] if len(ranks) == 1 else [[[0, 2]], [[2, 4]]]
    return [{"ranks": [rank], "layers": each} for rank, each in zip(ranks, layers, strict=True)]


def main() -> None:
    """Build, lower, validate and draw."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures")
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in FIGURES.items():
        build, (graph, plan, assignment) = BUILDERS[name], build_example(figure)
        assignment = build.assignment_for(assignment, graph=graph, plan=plan)
        schedule = build_schedule(build, graph, plan, assignment)
        timeline = timeline_of_unit_costs(schedule, graph=graph, plan=plan, assignment=assignment, lowered=True)
        draw_timeline(timeline, folder / f"{name}.png", title=figure.title)


if __name__ == "__main__":
    main()
