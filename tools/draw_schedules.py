"""Draw the figures of docs/schedule.md: every builder on one small example.

Run `python tools/draw_schedules.py [FOLDER]`; the folder is docs/figures by default.
"""

import sys
from pathlib import Path

from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.draw import draw_timeline
from multimodal.schedule.passes.insert_communication import insert_communication
from multimodal.schedule.unit_cost_timeline import timeline_of_unit_costs
from multimodal.schedule.validate import validate_schedule
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan

NUM_MICROBATCHES = 6
TITLES = {
    "gpipe": "GPipe: all forwards, then all backwards",
    "1f1b": "1F1B: one forward, one backward",
}


def build_example() -> tuple[ModelGraph, Plan, Assignment]:
    """Return a vision encoder on two replicas that feeds an LLM of two stages: six samples of one image each."""
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
    graph = ModelGraph.from_dict({"units": {"vision": {"role": "encoder", **shape}, "llm": {"role": "backbone", **shape}}})
    plan = Plan.from_dict(
        {
            "units": {
                "vision": {"replicas": [{"stages": [{"ranks": [rank], "layers": [[0, 4]]}]} for rank in (0, 1)]},
                "llm": {"replicas": [{"stages": [{"ranks": [2], "layers": [[0, 2]]}, {"ranks": [3], "layers": [[2, 4]]}]}]},
            }
        }
    )
    samples = range(NUM_MICROBATCHES)
    assignment = Assignment(
        {
            "vision": tuple(tuple((Atom(sample, 0),) for sample in samples[replica::2]) for replica in (0, 1)),
            "llm": (tuple((Atom(sample),) for sample in samples),),
        }
    )
    return graph, plan, assignment


def main() -> None:
    """Build, lower, validate and draw."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures")
    folder.mkdir(parents=True, exist_ok=True)
    graph, plan, assignment = build_example()
    for name, build in BUILDERS.items():
        schedule = insert_communication(build(graph, plan, assignment), graph=graph, plan=plan, assignment=assignment)
        validate_schedule(schedule, graph=graph, plan=plan, assignment=assignment, lowered=True)
        timeline = timeline_of_unit_costs(schedule, graph=graph, plan=plan, assignment=assignment, lowered=True)
        draw_timeline(timeline, folder / f"{name}.png", title=TITLES[name])


if __name__ == "__main__":
    main()
