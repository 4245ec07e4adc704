"""A training loop written against Megatron, on its own pipeline functions and on Braid schedules: equal losses and gradients."""

import re
from typing import Any

import numpy as np
import pytest

from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan, split_layers
from tests.distributed.drop_in_training import NUM_STEPS, LoopCase, LoopResult, train_on_schedule
from tests.distributed.rank_pool import RankError, RankPool

INTERLEAVED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
"""What Megatron's own interleaved function needs on two stages."""
VARIABLE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
"""Microbatches of different lengths."""


def assert_same_training(case: LoopCase, ranks: RankPool, *, schedule: str, under: tuple[Any, ...] = ()) -> list[LoopResult]:
    expected: list[LoopResult] = ranks.run(train_on_schedule, case, None, world_size=4)
    found: list[LoopResult] = ranks.run(train_on_schedule, case, schedule, *under, world_size=4)
    for mine, theirs in zip(found, expected, strict=True):
        assert np.array(mine.losses) == pytest.approx(np.array(theirs.losses), rel=0, abs=1e-9)
        assert mine.gradients.keys() == theirs.gradients.keys()
        for name, gradient in theirs.gradients.items():
            np.testing.assert_allclose(mine.gradients[name], gradient, rtol=0, atol=1e-9, err_msg=name)
            assert case.forward_only or np.abs(gradient).max() > 1e-6, f"{name} has no gradient to compare"
        assert mine.num_synchronizations == theirs.num_synchronizations
        assert mine.forwards == theirs.forwards
        assert (mine.num_deferred > 0) == (schedule in ("zb-h1", "interleaved-zb")) and not theirs.num_deferred
    assert np.array(found[-1].losses).shape == (NUM_STEPS, case.num_microbatches)
    return found


def is_like_others(schedule: str, case: LoopCase) -> bool:
    return schedule == "gpipe" or case.per_token_loss or (schedule == "interleaved-zb" and not case.launches_sync)


@pytest.mark.deep(when=is_like_others)
@pytest.mark.parametrize(
    ("schedule", "case"),
    [
        ("gpipe", LoopCase(2, num_microbatches=5, launches_sync=True)),
        ("gpipe", LoopCase(2, num_chunks=2, launches_sync=True, options=INTERLEAVED)),
        ("1f1b", LoopCase(4, per_token_loss=True, options=VARIABLE | {"deallocate_pipeline_outputs": True})),
        ("1f1b", LoopCase(4, num_microbatches=2, options={"num_microbatches_with_partial_activation_checkpoints": 1})),
        ("zb-h1", LoopCase(2, tensor_parallel_size=2)),
        ("zb-h1", LoopCase(2, has_images=True)),
        ("interleaved-zb", LoopCase(2, num_chunks=2, launches_sync=True, options=INTERLEAVED)),
        ("interleaved-zb", LoopCase(2, num_chunks=2, options=INTERLEAVED | VARIABLE)),
        ("interleaved-1f1b", LoopCase(4, num_chunks=2, num_microbatches=8, options=INTERLEAVED | VARIABLE)),
    ],
)
def test_training_equals_that_on_megatrons_own_function(ranks, schedule, case):
    assert_same_training(case, ranks, schedule=schedule)


def test_training_under_a_plan_equals_that_under_megatrons_groups(ranks):
    """Ranks as Megatron numbers them, so that each has what it has there."""
    model = _graph(4)
    first, last = split_layers(model.backbone.layers, num_stages=2)
    replica = Replica((Stage((0, 1), (first,)), Stage((2, 3), (last,))))
    plan = Plan({"llm": UnitPlan((replica,), tensor_parallel_size=2)})
    assert_same_training(LoopCase(2, tensor_parallel_size=2), ranks, schedule="1f1b", under=(model, plan))


@pytest.mark.deep(when=lambda encoders: encoders == [[0]])
@pytest.mark.parametrize(
    ("encoders", "options", "num_chunks"),
    [([[0], [1]], {}, 1), ([[0]], {}, 1), ([[2]], VARIABLE, 1), ([[2]], INTERLEAVED | VARIABLE, 2)],
    ids=["first stage", "one replica", "own ranks", "interleaved, own ranks"],
)
def test_encoders_fill_bubbles_of_a_loops_llm(ranks, encoders, options, num_chunks):
    """LLaVAModel's encoder, with the LLM's first stage or on ranks of its own, as a unit whose work goes where lanes wait."""
    case = LoopCase(2, num_chunks=num_chunks, has_images=True, options=options)
    width = len(encoders)
    model = _graph(2 * num_chunks, has_images=True)
    cuts = split_layers(model.backbone.layers, num_stages=2 * num_chunks)
    llm = tuple(Replica((Stage((d,), cuts[::2]), Stage((d + width,), cuts[1::2]))) for d in range(width))
    vision = tuple(Replica((Stage(tuple(each), ((0, len(model.unit("vision").layers)),)),)) for each in encoders)
    plan = Plan({"vision": UnitPlan(vision), "llm": UnitPlan(llm)})
    expected: list[LoopResult] = ranks.run(train_on_schedule, case, None, world_size=2 * width)
    found: list[LoopResult] = ranks.run(train_on_schedule, case, "optimus", model, plan, world_size=plan.num_ranks)
    for mine, theirs in zip(found, expected, strict=False):
        assert np.array(mine.losses) == pytest.approx(np.array(theirs.losses), rel=0, abs=1e-9)
    for rank, theirs in enumerate(expected):
        for name, gradient in theirs.gradients.items():
            holder = found[encoders[rank][0] if ".vision_" in name else rank]
            np.testing.assert_allclose(holder.gradients[name], gradient, rtol=0, atol=1e-9, err_msg=name)


def _graph(num_layers: int, *, has_images: bool = False) -> ModelGraph:
    llm = {"role": "backbone", "num_layers": num_layers, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
    units: dict[str, Any] = {"llm": llm}
    if has_images:
        units = {"vision": llm | {"role": "encoder", "num_layers": 1, "image": {"patch_size": 2}}} | units
    return ModelGraph.from_dict({"units": units})


@pytest.mark.deep(when=lambda per_token: per_token)  # a divisor beside the same gradients
@pytest.mark.parametrize("per_token", [False, True])
def test_replicas_that_are_not_alike_train_as_alike_ones(ranks, per_token):
    """One stage on rank 0 and two on the others, with tied embeddings: the second step's losses follow from all gradients."""
    tolerance = 1e-7 if per_token else 1e-9  # Megatron divides by tokens in float32, here by those of a replica first
    case = LoopCase(1, num_layers=2, per_token_loss=per_token)
    expected: list[LoopResult] = ranks.run(train_on_schedule, case, None, world_size=2)
    found: list[LoopResult] = ranks.run(train_on_schedule, case, "1f1b", *_unlike_plan(2), world_size=3)
    for mine, theirs in zip((found[0], found[2]), expected, strict=True):
        assert np.array(mine.losses) == pytest.approx(np.array(theirs.losses), rel=0, abs=1e-9)
    for name, gradient in expected[0].gradients.items():
        np.testing.assert_allclose(found[0].gradients[name], gradient, rtol=0, atol=tolerance, err_msg=name)
        np.testing.assert_allclose(_of_stages(found[1:], name), gradient, rtol=0, atol=tolerance, err_msg=name)


def test_layers_elsewhere_than_in_unlike_replicas_are_refused(ranks):
    with pytest.raises(RankError) as refused:
        ranks.run(train_on_schedule, LoopCase(1, num_layers=2), "1f1b", *_unlike_plan(1), world_size=3)
    for rank in range(3):
        assert re.search(rf"rank {rank}: (?s:.)*not alike: rank 1 has layers \[1\], .*; cut the model", str(refused.value))


def _unlike_plan(cut: int) -> tuple[ModelGraph, Plan]:
    """Return a model of two layers, on rank 0 whole, and on ranks 1 and 2 cut before a layer of the plan."""
    model = _graph(2)
    end = len(model.backbone.layers)
    replicas = Replica((Stage((0,), ((0, end),)),)), Replica((Stage((1,), ((0, cut),)), Stage((2,), ((cut, end),))))
    return model, Plan({"llm": UnitPlan(replicas)})


def _of_stages(found: list[LoopResult], name: str) -> np.ndarray:
    """Return a gradient that one of two stages has, of a model that has all layers on one."""
    first, last = (each.gradients for each in found)
    return last[name.replace("layers.1.", "layers.0.")] if "layers.1." in name or name not in first else first[name]


def test_balanced_microbatches_train_the_same(ranks):
    """Gradients and the sum of losses stay; replicas of unlike numbers of tokens get alike ones."""
    case = LoopCase(2, options=VARIABLE)
    expected: list[LoopResult] = ranks.run(train_on_schedule, case, None, world_size=4)
    found: list[LoopResult] = ranks.run(train_on_schedule, case, "1f1b", None, None, "whole-sample", world_size=4)
    for mine, theirs in zip(found, expected, strict=True):
        for name, gradient in theirs.gradients.items():
            np.testing.assert_allclose(mine.gradients[name], gradient, rtol=0, atol=1e-9, err_msg=name)
    losses = [sum(sum(map(sum, rank.losses)) for rank in each) for each in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-9)
    tokens = [[sum(count for _, count in rank.forwards) for rank in each] for each in (found, expected)]
    assert len({*tokens[0]}) == 1 < len({*tokens[1]})


@pytest.mark.deep(when=lambda case: case.num_chunks == 2)  # training has such chunks
@pytest.mark.parametrize("case", [LoopCase(4, forward_only=True), LoopCase(2, 2, forward_only=True, options=INTERLEAVED)])
def test_evaluation_equals_that_on_megatrons_own_function(ranks, case):
    found = assert_same_training(case, ranks, schedule="1f1b")
    assert all(not gradient.any() for rank in found for gradient in rank.gradients.values())
