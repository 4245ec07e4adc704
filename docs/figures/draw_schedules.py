"""Draws the figures of docs/schedule.md: every builder on one small example, in the layout that the builder is meant for.

Run `python docs/figures/draw_schedules.py [FOLDER]`; the folder is docs/figures by default.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.figures.figure_folder import figure_folder
from multimodal.schedule.build_schedule import build_schedule
from multimodal.schedule.builders import BUILDERS, ScheduleRow, VirtualStages
from multimodal.schedule.draw import draw_timelines
from multimodal.schedule.simulate import timeline_of_unit_costs
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.shape import StepShape

NUM_MICROBATCHES = 8
Layers = list[list[int]]
STAGES: list[Layers] = [[[0, 3]], [[3, 6]]]
"""Layers of the LLM on its two stages: embedding, four transformer layers, head."""
INTERLEAVED: list[Layers] = [[[0, 2], [3, 4]], [[2, 3], [4, 6]]]
V_SHAPED: list[Layers] = [[[0, 2], [4, 6]], [[2, 3], [3, 4]]]


class Figure(NamedTuple):
    """The example on which one builder is drawn."""

    title: str
    llm_stages: list[Layers] = STAGES
    encoder_ranks: tuple[tuple[int, ...], ...] = ((0,), (1,))
    """Ranks of the stages of each encoder; the LLM's are 2 and 3."""


def figure_of(name: str, row: ScheduleRow) -> Figure:
    """Choose stages and ranks that suit the schedule of a registry row."""
    title = f"{name}: {row.meaning}"
    if row.virtual_stages is VirtualStages.EXPECTED:
        return Figure(title, llm_stages=V_SHAPED if row.is_folded else INTERLEAVED)
    if row.num_rounds or (row.needs_costs and not row.fills_memory):
        return Figure(title, encoder_ranks=((2, 3), (2, 3)))
    return Figure(title, encoder_ranks=((0, 1), (0, 1))) if row.fewest_encoders > 1 else Figure(title)


def build_example(figure: Figure) -> StepShape:
    """Return a vision and an audio encoder that feed an LLM of two stages: eight samples with one item for each encoder."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
    encoders = ("vision", "audio")
    units = {name: {"role": "encoder", "num_layers": 2, **shape} for name in encoders}
    graph = ModelGraph.from_dict({"units": units | {"llm": {"role": "backbone", "num_layers": 4, **shape}}})
    stages = {name: _encoder_stages(ranks) for name, ranks in zip(encoders, figure.encoder_ranks, strict=True)}
    stages["llm"] = [{"ranks": [rank], "layers": layers} for rank, layers in zip((2, 3), figure.llm_stages, strict=True)]
    all_stages = [stage for of_unit in stages.values() for stage in of_unit]
    first_rank = min(stage["ranks"][0] for stage in all_stages)
    for stage in all_stages:
        stage["ranks"] = [rank - first_rank for rank in stage["ranks"]]
    plan = Plan.from_dict({"units": {name: {"replicas": [{"stages": of_unit}]} for name, of_unit in stages.items()}})
    items = {"vision": 0, "audio": 1, "llm": -1}
    placed = {name: (tuple((Atom(sample, item),) for sample in range(NUM_MICROBATCHES)),) for name, item in items.items()}
    return Assignment(placed).shape(graph, plan)


def _encoder_stages(ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the stages of an encoder of four layers (embedding, two transformer layers, projector) on one or two ranks."""
    layers = [[[0, 4]]] if len(ranks) == 1 else [[[0, 2]], [[2, 4]]]
    return [{"ranks": [rank], "layers": stage_layers} for rank, stage_layers in zip(ranks, layers, strict=True)]


def main() -> None:
    """Build, lower, validate and draw."""
    folder = figure_folder(__doc__)
    for name, row in BUILDERS.items():
        if row.num_rounds > 1:
            continue  # repeats the schedule of one round
        figure = figure_of(name, row)
        timeline = timeline_of_unit_costs(build_schedule(row, build_example(figure)))
        draw_timelines({figure.title: timeline}, folder / f"{name}.png")


if __name__ == "__main__":
    main()
