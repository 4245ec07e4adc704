"""The plan changes between two steps of the same processes, and training goes on as if nothing had happened.

Replicas share copies of the optimizer state, which outlive as many losses as there are copies less one.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.gradients import unit_optimizer
from megatron.runtime.state.handover import hold_state, take_over
from megatron.runtime.state.held_tensors import HeldTensor, average_key, model_tensors, optimizer_tensors
from megatron.runtime.training.trainer import Trainer, build_scheduler
from multimodal.cost.stage_layers import StageLayers
from multimodal.values.errors import CheckpointError, PlanError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.parts.state_copies import EVERY_REPLICA
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.rank_pool import RankPool
from tests.distributed.training_case import (
    AVERAGE_DECAY,
    EXPERTS,
    RankParameters,
    Training,
    TrainingCase,
    build_graph,
    build_plan,
    build_unlike_plan,
    join_parameters,
    run,
)

TIED, DRAWING = build_graph(tied=True), build_graph(with_generator=True)
ONE_RANK = {"vision": (1, 1, 1), "llm": (1, 1, 1), "painter": (1, 1, 1), "colocated": True}
WIDE = {"vision": (1, 1, 2), "llm": (2, 1, 2)}
DEEP = {"vision": (2, 1, 1), "llm": (1, 2, 2)}
SPREAD = {"vision": (1, 2, 1), "llm": (1, 1, 2, 2)}
COLOCATED = {"vision": (2, 1, 3), "llm": (1, 3, 2), "colocated": True}
UNLIKE = build_unlike_plan()
DRAWING_WIDE = {"vision": (1, 1, 2), "llm": (2, 1, 1), "painter": (1, 1, 2)}
DRAWING_DEEP = {"vision": (1, 1, 1), "llm": (1, 3, 1), "painter": (2, 1, 1)}
SHARDED = "tied, weights shared: over a pipeline"
SHARING = "experts: of two replicas, of stages, of four, of two that are cut"
EXPERT_SIZES = [
    {"vision": vision, "llm": llm, "experts": experts}
    for vision, llm, experts in (
        ((1, 1, 2), (1, 1, 4), 2),
        ((2, 1, 1), (1, 2, 2), 2),
        ((1, 1, 2), (1, 1, 4), 4),
        ((1, 1, 2), (2, 1, 2), 2),
    )
]
CHANGES: dict[str, tuple[ModelGraph, tuple[dict[str, Any] | Plan, ...]]] = {
    SHARDED: (TIED, (WIDE, DEEP)),
    "tied: context parallel, shared ranks, own ranks": (TIED, (SPREAD, COLOCATED, DEEP)),
    "tied: replicas that differ, and back": (TIED, (WIDE, UNLIKE, DEEP)),
    "with a generator": (DRAWING, (DRAWING_WIDE, DRAWING_DEEP, DRAWING_WIDE)),
    SHARING: (EXPERTS, tuple(EXPERT_SIZES)),
}
STEPS_A_PLAN = 1
SETTINGS = OptimizerSettings(lr=0.01, lr_warmup_iters=5, weight_decay=0.1, clip_grad=1.0)
"""The learning rate is another in every step."""


@dataclass(frozen=True)
class Report:
    losses: list[float]
    norms: list[float]
    """Of the gradients, step by step."""
    balances: list[float]
    """The loss that balances experts, step by step."""
    parameters: RankParameters


def plans_of(graph: ModelGraph, sizes: tuple[dict[str, Any] | Plan, ...]) -> list[Plan]:
    return [each if isinstance(each, Plan) else build_plan(graph, **each) for each in sizes]


def trainer_of(training: Training) -> Trainer:
    scheduler = build_scheduler(SETTINGS, training.session, train_iters=10)
    return Trainer(training.session, scheduler=scheduler, settings=SETTINGS, peak_tflops=1.0)


def train(case: TrainingCase, plans: list[Plan], steps_a_plan: int) -> Report:
    """Train under one plan after another; the case has the first."""
    training = Training(case)
    trainer = trainer_of(training)
    losses, norms, balances = [], [], []
    for index, plan in enumerate(plans):
        if index:
            trainer.session.change_plan(plan)
            trainer.meet()
        for number in range(index * steps_a_plan, (index + 1) * steps_a_plan):
            report, _ = trainer.train_step(training.plan_step(number), number=number)
            losses.append(report.loss)
            norms.append(report.grad_norm)
            balances.append(trainer.last_report()[0].load_balancing_loss)  # as a rank tells it that is left alone
    return Report(losses, norms, balances, training.parameters())


@pytest.mark.deep(when=lambda name: name != SHARDED)  # averages, checkpoints and runs of templates go through the others, too
@pytest.mark.parametrize("name", CHANGES)
def test_training_goes_on_as_if_nothing_had_happened(ranks: RankPool, name: str) -> None:
    """Those that share experts in float32, with sharded optimizers."""
    graph, sizes = CHANGES[name]
    plans, dtype = plans_of(graph, sizes), torch.float32 if name == SHARING else torch.float64
    case = TrainingCase(graph, plans[0], dtype, shards_weights=name == SHARDED)
    reference = replace(case, plan=build_plan(graph, **ONE_RANK), shards_weights=False)
    (expected,) = run(ranks, train, reference, [reference.plan], STEPS_A_PLAN * len(plans))
    found: list[Report] = run(ranks, train, case, plans, STEPS_A_PLAN)
    assert len({tuple(report.losses) for report in found}) == 1
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    assert np.allclose(found[0].losses, expected.losses, rtol=tolerance, atol=0)
    assert np.allclose(found[0].norms, expected.norms, rtol=10 * tolerance, atol=0)
    assert np.allclose(found[0].balances, expected.balances, rtol=tolerance, atol=0)
    assert (min(expected.balances) > 0.9) == (name == SHARING)
    whole = join_parameters(plans[-1], [report.parameters for report in found])
    for key, values in join_parameters(reference.plan, [expected.parameters]).items():
        assert np.allclose(whole[key], values, rtol=tolerance, atol=1e-9 if dtype == torch.float64 else 1e-4), key


def train_counting_twice(case: TrainingCase, plans: list[Plan], steps_a_plan: int) -> Report:
    """The same with gradients of every replica in the norm, by which they are clipped."""
    main = unit_optimizer._main
    with patch.object(unit_optimizer, "_main", lambda piece: main(piece._replace(is_copy=False))):
        return train(case, plans, steps_a_plan)


def test_an_element_that_counts_twice_in_the_norm_is_seen(ranks: RankPool) -> None:
    case = TrainingCase(TIED, UNLIKE, torch.float64)
    found, wrong = (run(ranks, each, case, [UNLIKE], 1)[0].norms for each in (train, train_counting_twice))
    assert wrong[0] > 1.1 * found[0]


def there_and_back(case: TrainingCase, other: Plan) -> tuple[int, bool]:
    """Returns how many values this rank's optimizers keep, and whether they and the weights are the same after two changes."""
    training = Training(case)
    training.train_step(0)
    training.session.complete_parameters()
    before = values_of(training)
    training.session.change_plan(other)
    training.session.change_plan(case.plan)
    after = values_of(training)
    same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    return sum(values.numel() for key, values in before.items() if key.startswith("exp_avg.")), same


def values_of(training: Training) -> dict[str, torch.Tensor]:
    state = training.session.state
    return {
        f"{held.key} {piece.offsets} {held.is_copy}": piece.values.clone()
        for held in (*model_tensors(state), *optimizer_tensors(state))
        for piece in held.pieces
    }


@pytest.mark.deep(when=lambda dtype: dtype == torch.bfloat16)  # a run resumes so
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sharded_optimizer_state_comes_back_bit_for_bit(ranks: RankPool, dtype: torch.dtype) -> None:
    """In bfloat16 with the weights shared, too."""
    plan, other = plans_of(TIED, (WIDE, COLOCATED))
    unsharded = run(ranks, there_and_back, TrainingCase(TIED, plan, torch.float64), other)
    found = run(ranks, there_and_back, TrainingCase(TIED, plan, dtype, shards_weights=dtype == torch.bfloat16), other)
    assert all(same for _, same in found)
    halves = (found[rank][0] < 0.7 * unsharded[rank][0] for rank in plan.units["llm"].ranks)
    assert all(halves), "each of two replicas keeps about half"


Pieces = dict[str, list[tuple[tuple[int, ...], np.ndarray]]]
"""Key of a tensor -> a rank's pieces of it: their offsets and values."""


def train_and_average(case: TrainingCase, plans: list[Plan], folder: Path) -> tuple[list[Pieces], Pieces]:
    """Train a step under each plan, and resume the last; returns the generator's weights before and after each, and averages."""
    training = Training(case)
    weights = [pieces_of(model_tensors(training.session.state))]
    for number, plan in enumerate(plans):
        training.session.change_plan(plan)
        training.train_step(number)
        training.session.complete_parameters()
        weights.append(pieces_of(model_tensors(training.session.state)))
    training.save(folder, step=len(plans))
    training.session.close()
    resumed = Training(replace(case, plan=plans[0]))
    resumed.load(folder)
    return weights, pieces_of(optimizer_tensors(resumed.session.state))


def pieces_of(tensors: list[HeldTensor]) -> Pieces:
    return {
        held.key: [(piece.offsets, piece.values.detach().double().numpy()) for piece in held.pieces]
        for held in tensors
        if held.key.startswith(("model.painter.", "ema."))
    }


@pytest.mark.deep(when=lambda dtype: dtype == torch.float64)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_averages_of_a_generator_s_weights_do_not_know_the_plan(ranks: RankPool, dtype: torch.dtype, tmp_path: Path) -> None:
    """They are those of the formula, through changes of the plan and a checkpoint."""
    plans = plans_of(DRAWING, (DRAWING_WIDE, DRAWING_DEEP))
    alone = build_plan(DRAWING, **ONE_RANK)
    ((weights, _),) = run(ranks, train_and_average, TrainingCase(DRAWING, alone, dtype), [alone] * 2, tmp_path / "alone")
    found = run(ranks, train_and_average, TrainingCase(DRAWING, plans[0], dtype), plans, tmp_path / "plans")
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for key in weights[0]:
        average, *later = (joined(each[key]) for each in weights)
        for now in later:
            average = AVERAGE_DECAY * average + (1 - AVERAGE_DECAY) * now
        kept = joined([piece for _, averages in found for piece in averages.get(average_key(key), [])])
        assert kept.shape == average.shape and np.abs(kept - average).max() < tolerance < np.abs(average - now).max(), key


def joined(pieces: list[tuple[tuple[int, ...], np.ndarray]]) -> np.ndarray:
    ends = [[first + size for first, size in zip(offsets, values.shape, strict=True)] for offsets, values in pieces]
    whole = np.full(np.max(ends, axis=0), np.nan)
    for (offsets, values), stops in zip(pieces, ends, strict=True):
        whole[tuple(map(slice, offsets, stops))] = values
    return whole


def try_wrong_plans(case: TrainingCase, wrong: Plan) -> tuple[str, str, list[float]]:
    """Ask for a plan that does not fit, lose part of the state, and train on."""
    training = Training(case)
    training.train_step(0)
    message = lost = ""
    try:
        training.session.change_plan(wrong)
    except PlanError as problem:
        message = str(problem)
    held = hold_state(training.session.state) if dist.get_rank() else []
    try:
        take_over(held, training.session.state)
    except CheckpointError as problem:
        lost = str(problem)
    return message, lost, [training.train_step(1), training.train_step(2)]


def test_a_wrong_plan_changes_nothing_and_lost_state_is_told(ranks: RankPool) -> None:
    plan, wrong = build_plan(TIED, vision=(1, 1, 1), llm=(1, 2, 1)), build_plan(TIED, **DEEP)
    found = run(ranks, try_wrong_plans, TrainingCase(TIED, plan), wrong)
    reference = run(ranks, plain_losses, TrainingCase(TIED, plan))
    for message, lost, losses in found:
        assert "the plan uses 6 ranks but the run has 3" in message
        assert "rank 0 needs model.vision." in lost and "resume from the last checkpoint" in lost
        assert losses == reference[0]


def plain_losses(case: TrainingCase) -> list[float]:
    training = Training(case)
    return [training.train_step(number) for number in range(3)][1:]


def build_cut_plan() -> Plan:
    """Three replicas of both units on shared ranks: two with tensor parallel size 1, cut differently, and one with 2."""
    vision = tuple(Replica((Stage(ranks, ((0, 4),), len(ranks)),)) for ranks in ((0,), (1,), (3, 4)))
    llm = (
        Replica((Stage((0,), ((0, 5),)),)),
        Replica((Stage((1,), ((0, 1), (2, 3))), Stage((2,), ((1, 2), (3, 5))))),
        Replica((Stage((3, 4), ((0, 5),), 2),)),
    )
    return Plan({"vision": UnitPlan(vision), "llm": UnitPlan(llm, microbatch_shares=(2, 2, 2))})


ALIKE = build_plan(TIED, vision=(1, 1, 5), llm=(1, 1, 5), colocated=True)
CUT = build_cut_plan()


def train_by_copies(case: TrainingCase) -> tuple[list[float], dict, int]:
    """Return losses, parameters, and how many weights this rank steps; weights are gathered as late as can be."""
    training = Training(case)
    trainer = trainer_of(training)
    trainer.updates_alone = True
    losses = [trainer.train_step(training.plan_step(number), number=number)[0].loss for number in range(2)]
    training.session.complete_parameters()
    stepped = [each for optimizer in training.session.optimizers.values() for each in optimizer.get_parameters()]
    return losses, training.parameters(), sum(each.numel() for each in stepped)


@pytest.mark.deep(when=lambda plan, dtype: plan is ALIKE or dtype == torch.float64)
@pytest.mark.parametrize("plan", [ALIKE, CUT], ids=["alike", "cut"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_shared_copies_train_like_whole_ones(ranks: RankPool, plan: Plan, dtype: torch.dtype) -> None:
    case = TrainingCase(TIED, plan, dtype, num_state_copies=EVERY_REPLICA)
    whole = run(ranks, train_by_copies, case)
    shared = run(ranks, train_by_copies, replace(case, num_state_copies=2 if plan is ALIKE else 1))
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
    layers, found = StageLayers(TIED, plan, vocab_size=36), []
    for copies in (num_copies, EVERY_REPLICA):
        shares = [(stage, each) for stage in layers.of_rank[rank] for each in layers.state_shares(stage, num_copies=copies)]
        found.append(sum(weights / len(ranks) / layers.tensor_size(stage) for stage, (ranks, weights) in shares))
    return found[0] / found[1]


def lose(case: TrainingCase, lost: tuple[tuple[int, ...], ...]) -> list[str]:
    """Lose what some ranks hold right after an update, while weights are not gathered; return what is missing each time."""
    training = Training(case)
    trainer = trainer_of(training)
    trainer.updates_alone = True
    trainer.train_step(training.plan_step(0), number=0)
    held = hold_state(training.session.state)
    training.session.complete_parameters()
    wanted = held_values(training)
    told = []
    for ranks in lost:
        fresh = Training(replace(case, seed=9))
        try:
            take_over([] if dist.get_rank() in ranks else held, fresh.session.state)
            found = held_values(fresh)
            assert all(torch.equal(found[key], values) for key, values in wanted.items())
            told.append("")
        except CheckpointError as problem:
            told.append(str(problem))
    return told


def held_values(training: Training) -> dict[str, torch.Tensor]:
    held = hold_state(training.session.state)
    return {f"{each.key} {piece.offsets}": piece.values.clone() for each in held for piece in each.pieces}


TO_LOSE = {
    "alike": (TrainingCase(TIED, ALIKE, torch.bfloat16, num_state_copies=2), ((0,), (2, 3, 4), (1, 4))),
    "cut": (TrainingCase(TIED, CUT, torch.float64, num_state_copies=1), ((1, 2), (4,), (0, 3))),
}


@pytest.mark.deep(when=lambda plan: plan == "alike")
@pytest.mark.parametrize("plan", TO_LOSE)
def test_state_is_lost_only_with_a_rank_of_every_copy(ranks: RankPool, plan: str) -> None:
    """Copies are those of ranks 0 and 1, and of 2 to 4; where replicas differ, rank 3 has half of what 0 to 2 share."""
    kept, also_kept, missing = run(ranks, lose, *TO_LOSE[plan])[0]
    assert not kept and not also_kept
    assert "which the ranks that are left do not hold" in missing
