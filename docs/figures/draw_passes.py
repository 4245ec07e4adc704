"""Draws the figures of docs/passes.md: a schedule before and after each pass.

Run `python docs/figures/draw_passes.py [FOLDER]`; the folder is docs/figures by default.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.figures.figure_folder import figure_folder
from multimodal.cost.cost_table import CostTable, TableCosts, build_table_step
from multimodal.cost.step_costs import ComputeCost, StepCosts
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.draw import draw_timelines
from multimodal.schedule.passes import PASSES
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.action import Action, LayerRange
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.schedule import Schedule
from multimodal.values.shape import StepShape
from multimodal.values.timeline import Timeline

NUM_MICROBATCHES = 8


class Figure(NamedTuple):
    """One pass and the example on which it is drawn."""

    builder: str
    before: str
    after: str
    is_deferred: bool = False
    """True if every other sample runs in the LLM's next microbatch."""
    encoder_seconds: float = 1.0
    llm_seconds: float = 1.0
    """Seconds of the LLM's first stage; its second takes 1 s."""
    reduction_seconds: float = 0.0
    """Seconds to reduce a stage's gradients; the layer that a backward passes last takes a quarter of them."""


FIGURES = {
    "split-backward": Figure(
        "eager-1f1b",
        "Eager 1F1B, deferred samples: whole backwards wait",
        "split-backward: the others' backwards run first",
        is_deferred=True,
    ),
    "delay-forward": Figure("eager-1f1b", "Eager 1F1B", "delay-forward: the LLM needs its inputs later, at no cost"),
    "defer-receives": Figure(
        "1f1b", "1F1B, uneven units", "defer-receives: what is ready runs while a message is awaited", llm_seconds=1.5
    ),
    "fill": Figure("1f1b", "1F1B: whole backwards", "fill: weight gradients while a message is awaited", llm_seconds=1.5),
    "reduce-by-layer": Figure(
        "1f1b",
        "1F1B: a stage's gradients are reduced once all are complete",
        "reduce-by-layer: layers in the last backward",
        reduction_seconds=4.0,
    ),
}


@dataclass(frozen=True)
class _ExampleCosts(TableCosts):
    """Costs from a table, with sample subsets that are half of their microbatch and with gradient reductions."""

    reduction_seconds: float = 0.0

    def compute(self, action: Action) -> ComputeCost:
        """Return the cost of one computation."""
        whole = super().compute(action)
        return ComputeCost(whole.seconds / 2) if action.subset >= 0 else whole

    def collective_seconds(self, action: Action) -> float:
        """Return the seconds of a reduction."""
        share = 1.0 if action.covers is None else 0.25 if action.covers == LayerRange(0, 1) else 0.75
        return self.reduction_seconds * share


def build_example(figure: Figure) -> tuple[StepShape, StepCosts]:
    """Return an encoder of two stages that feeds an LLM of two."""
    units = {
        "vision": {"upstream": [], "stages": [_stage(figure.encoder_seconds)] * 2},
        "llm": {"upstream": ["vision"], "stages": [_stage(figure.llm_seconds), _stage(1.0)]},
    }
    table = CostTable.from_dict({"num_microbatches": NUM_MICROBATCHES, "units": units})
    shape, _ = build_table_step(table)
    if figure.is_deferred:
        shape = _deferred().shape(shape.graph, shape.plan)
    return shape, _ExampleCosts(table, reduction_seconds=figure.reduction_seconds)


def _stage(seconds: float) -> dict[str, float]:
    return {"forward": seconds, "input_gradient": seconds, "weight_gradient": seconds}


def _deferred() -> Assignment:
    """Return two samples per encoder microbatch; the second one of every even microbatch moves to the LLM's next microbatch."""
    encoder = [[2 * index, 2 * index + 1] for index in range(NUM_MICROBATCHES)]
    llm = [list(samples) for samples in encoder]
    for index in range(0, NUM_MICROBATCHES - 1, 2):
        llm[index + 1].insert(0, llm[index].pop())
    return Assignment(
        {
            "vision": (tuple(tuple(Atom(sample, 0) for sample in samples) for samples in encoder),),
            "llm": (tuple(tuple(Atom(sample) for sample in samples) for samples in llm),),
        }
    )


def _simulate(schedule: Schedule, costs: StepCosts) -> Timeline:
    return simulate_schedule(insert_communication(schedule), costs).timeline


def main() -> None:
    """Build, rewrite, simulate and draw."""
    folder = figure_folder(__doc__)
    for name, figure in FIGURES.items():
        shape, costs = build_example(figure)
        before = BUILDERS[figure.builder](shape)
        timelines = {figure.before: _simulate(before, costs), figure.after: _simulate(PASSES[name](before), costs)}
        draw_timelines(timelines, folder / f"pass-{name}.png")
        print(name, [round(timeline.duration_seconds, 2) for timeline in timelines.values()])


if __name__ == "__main__":
    main()
