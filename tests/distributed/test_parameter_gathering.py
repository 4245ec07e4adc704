"""Schedules that gather what a sharded optimizer updated train like those whose optimizer gathers by itself."""

from pathlib import Path

import numpy as np

from multimodal.schedule.passes.gather_parameters import gather_parameters
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import RankReport, Training, TrainingCase, build_graph, build_plan, join_parameters, run

NUM_STEPS = 3


def train(case: TrainingCase, folder: Path, gathers: bool) -> RankReport:
    """Train, save, and train on, with every step's parameters gathered by the schedule or by the optimizer."""
    training = Training(case, passes=(gather_parameters,) if gathers else ())
    losses = [training.train_step(number) for number in range(NUM_STEPS)]
    is_gathered = [not unit._ungathered for unit in training.session.gradients.values()]
    assert all(is_gathered) is not gathers, "the optimizer must leave gathering to the schedule, and only to it"
    training.save(folder, step=NUM_STEPS)
    at_checkpoint = training.parameters()
    losses += [training.train_step(NUM_STEPS)]
    training.session.complete_parameters()
    return RankReport(losses, at_checkpoint, training.parameters())


def test_gathering_by_the_schedule_changes_no_bit(ranks: RankPool, tmp_path: Path) -> None:
    graph = build_graph(tied=True)
    case = TrainingCase(graph, build_plan(graph, vision=(1, 1, 2), llm=(1, 2, 3)))
    by_optimizer = run(ranks, train, case, tmp_path / "optimizer", False)
    by_schedule = run(ranks, train, case, tmp_path / "schedule", True)
    assert [report.losses for report in by_schedule] == [report.losses for report in by_optimizer]
    for moment in ("parameters_at_checkpoint", "parameters_at_end"):
        expected = join_parameters(case.plan, [getattr(report, moment) for report in by_optimizer])
        found = join_parameters(case.plan, [getattr(report, moment) for report in by_schedule])
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[key], found[key]) for key in expected)
