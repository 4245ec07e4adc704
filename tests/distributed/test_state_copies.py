"""Replicas share copies of the optimizer state, which outlive as many losses as there are copies less one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.state.handover import hold_state, take_over
from megatron.runtime.training.trainer import Trainer, build_scheduler
from multimodal.cost.stage_layers import StageLayers
from multimodal.values.errors import CheckpointError
from multimodal.values.parts.state_copies import EVERY_REPLICA
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import Training, TrainingCase, build_graph, build_plan, join_parameters, run

GRAPH = build_graph(tied=True)
SETTINGS = OptimizerSettings(lr=0.01, lr_warmup_iters=5, weight_decay=0.1, clip_grad=1.0)
NUM_STEPS = 2


def build_cut_plan() -> Plan:
    """Three replicas of both units on shared ranks: two with tensor parallel size 1, cut differently, and one with 2."""
    vision = tuple(Replica((Stage(ranks, ((0, 4),), len(ranks)),)) for ranks in ((0,), (1,), (3, 4)))
    llm = (
        Replica((Stage((0,), ((0, 5),)),)),
        Replica((Stage((1,), ((0, 1), (2, 3))), Stage((2,), ((1, 2), (3, 5))))),
        Replica((Stage((3, 4), ((0, 5),), 2),)),
    )
    return Plan({"vision": UnitPlan(vision), "llm": UnitPlan(llm, microbatch_shares=(2, 2, 2))})


ALIKE = build_plan(GRAPH, vision=(1, 1, 5), llm=(1, 1, 5), colocated=True)
CUT = build_cut_plan()


def train(case: TrainingCase) -> tuple[list[float], dict, int]:
    """Return losses, parameters, and how many weights this rank steps; weights are gathered as late as can be."""
    training = Training(case)
    trainer = trainer_of(training)
    losses = [trainer.train_step(training.plan_step(number), number=number)[0].loss for number in range(NUM_STEPS)]
    training.session.complete_parameters()
    stepped = [each for optimizer in training.session.optimizers.values() for each in optimizer.get_parameters()]
    return losses, training.parameters(), sum(each.numel() for each in stepped)


def trainer_of(training: Training) -> Trainer:
    scheduler = build_scheduler(SETTINGS, training.session, train_iters=10)
    trainer = Trainer(training.session, scheduler=scheduler, settings=SETTINGS, peak_tflops=1.0)
    trainer.updates_alone = True
    return trainer


@pytest.mark.deep(when=lambda plan, dtype: plan is ALIKE or dtype == torch.float64)
@pytest.mark.parametrize("plan", [ALIKE, CUT], ids=["alike", "cut"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_shared_copies_train_like_whole_ones(ranks: RankPool, plan: Plan, dtype: torch.dtype) -> None:
    case = TrainingCase(GRAPH, plan, dtype, num_state_copies=EVERY_REPLICA)
    whole = run(ranks, train, case)
    shared = run(ranks, train, replace(case, num_state_copies=2 if plan is ALIKE else 1))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6  # the order in which the norm is summed is another
    assert np.allclose(shared[0][0], whole[0][0], rtol=tolerance, atol=0)
    expected, found = (join_parameters(plan, [parameters for _, parameters, _ in each]) for each in (whole, shared))
    for key in expected:
        assert np.allclose(found[key], expected[key], rtol=0, atol=1e-10 if dtype == torch.float64 else 1e-3), key
    shares = [stepped / all_of_them for (_, _, stepped), (_, _, all_of_them) in zip(shared, whole, strict=True)]
    predicted = [share_of_rank(plan, rank, num_copies=2 if plan is ALIKE else 1) for rank in range(5)]
    assert np.allclose(shares, predicted, rtol=0, atol=0.08), "rank 2 alone has a copy of tied embeddings, which is left out"
    assert max(shares[:2]) < 0.6 and (max(shares) < 0.6 if plan is ALIKE else shares[3:] == [1, 1])


def share_of_rank(plan: Plan, rank: int, *, num_copies: int) -> float:
    """Return what the memory model takes a rank to step, of what it holds."""
    layers, found = StageLayers(GRAPH, plan, vocab_size=36), []
    for copies in (num_copies, EVERY_REPLICA):
        shares = [(stage, each) for stage in layers.of_rank[rank] for each in layers.state_shares(stage, num_copies=copies)]
        found.append(sum(weights / len(ranks) / layers.tensor_size(stage) for stage, (ranks, weights) in shares))
    return found[0] / found[1]


def lose(case: TrainingCase, lost: tuple[tuple[int, ...], ...]) -> list[str]:
    """Lose what some ranks hold right after an update, while weights are not gathered; return what is missing each time."""
    training = Training(case)
    trainer = trainer_of(training)
    trainer.train_step(training.plan_step(0), number=0)
    held = hold_state(training.session.state)
    training.session.complete_parameters()
    wanted = values_of(training)
    told = []
    for ranks in lost:
        fresh = Training(replace(case, seed=9))
        try:
            take_over([] if dist.get_rank() in ranks else held, fresh.session.state)
            found = values_of(fresh)
            assert all(torch.equal(found[key], values) for key, values in wanted.items())
            told.append("")
        except CheckpointError as problem:
            told.append(str(problem))
    return told


def values_of(training: Training) -> dict[str, torch.Tensor]:
    held = hold_state(training.session.state)
    return {f"{each.key} {piece.offsets}": piece.values.clone() for each in held for piece in each.pieces}


TO_LOSE = {
    "alike": (TrainingCase(GRAPH, ALIKE, torch.bfloat16, num_state_copies=2), ((0,), (2, 3, 4), (1, 4))),
    "cut": (TrainingCase(GRAPH, CUT, torch.float64, num_state_copies=1), ((1, 2), (4,), (0, 3))),
}


@pytest.mark.deep(when=lambda plan: plan == "alike")
@pytest.mark.parametrize("plan", TO_LOSE)
def test_state_is_lost_only_with_a_rank_of_every_copy(ranks: RankPool, plan: str) -> None:
    """Copies are those of ranks 0 and 1, and of 2 to 4; where replicas differ, rank 3 has half of what 0 to 2 share."""
    kept, also_kept, missing = run(ranks, lose, *TO_LOSE[plan])[0]
    assert not kept and not also_kept
    assert "which the ranks that are left do not hold" in missing
