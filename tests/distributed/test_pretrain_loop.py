"""Megatron's own `pretrain()` on Braid schedules: it logs, evaluates, saves and resumes as on its own functions."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from multimodal.plan.plans_of_sizes import UnitSizes, plan_disaggregated
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan, split_layers
from tests.distributed.rank_pool import RankError

pytest.importorskip(
    "megatron.training",
    reason="the installed megatron-core has no megatron.training; 0.19 has (Python 3.12)",
    exc_type=ImportError,
)

from tests.distributed.pretrain_loop import PretrainResult, first_token, pretrain_model
from tests.distributed.pretrain_mimo import MimoSizes, first_number

MIMO = {"micro-batch-size": 2, "untie-embeddings-and-output-weights": True, "calculate-per-token-loss": True}
MIMO["use-distributed-optimizer"] = True  # which Megatron's program asks for
CHUNKS = {"num-virtual-stages-per-pipeline-rank": 2}


def assert_same_run(found: list[PretrainResult], expected: list[PretrainResult], *, since: int = 0) -> None:
    """Compare what ranks logged, from an entry of the expected run on, and the weights at the end."""
    for mine, theirs in zip(found, expected, strict=True):
        assert [entry.keys() for entry in mine.logged] == [entry.keys() for entry in theirs.logged[since:]]
        for logged, other in zip(mine.logged, theirs.logged[since:], strict=True):
            assert logged == pytest.approx(other, rel=1e-6, abs=1e-6)
        assert mine.weights.keys() == theirs.weights.keys()
        for name, weight in theirs.weights.items():
            np.testing.assert_allclose(mine.weights[name], weight, rtol=0, atol=1e-6, err_msg=name)
    assert len({entry["lm loss"] for entry in found[-1].logged}) == len(found[-1].logged) >= 5, "training changes the loss"


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ({}, "1f1b"),
        ({"pipeline-model-parallel-size": 4, "use-distributed-optimizer": True}, "gpipe"),
        (CHUNKS, "1f1b"),
        ({"tensor-model-parallel-size": 2, "untie-embeddings-and-output-weights": True}, "1f1b"),
    ],
)
def test_pretrain_runs_as_on_megatrons_functions(ranks, flags, schedule):
    expected = ranks.run(pretrain_model, flags, None, world_size=4)
    assert_same_run(ranks.run(pretrain_model, flags, schedule, world_size=4), expected)


def test_pretrain_runs_under_a_plan(ranks):
    """Pipelines of neighbouring ranks, where Megatron's own are two apart, weight gradients in bubbles, and balanced replicas."""
    llm = {"role": "backbone", "num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 64}
    model = ModelGraph.from_dict({"units": {"llm": llm}})
    cuts = split_layers(model.backbone.layers, num_stages=2)
    replicas = tuple(Replica(tuple(Stage((first + s,), (cuts[s],)) for s in range(2))) for first in (0, 2))
    plan = Plan({"llm": UnitPlan(replicas)})
    expected = ranks.run(pretrain_model, {}, None, world_size=4)
    more = {"model": model, "plan": plan, "balance": "whole-sample", "length": first_token}
    found = ranks.run(partial(pretrain_model, **more), {}, "zb-h1", world_size=4)
    assert_same_run([found[rank] for rank in (0, 2, 1, 3)], expected)


@pytest.mark.parametrize(
    ("num_stages", "schedule", "chunks"), [(1, "1f1b", {}), (2, "optimus", {}), (2, "interleaved-1f1b", CHUNKS)]
)
def test_pretrain_runs_with_an_encoder_on_ranks_of_its_own(ranks, tmp_path, num_stages, schedule, chunks):
    """LLaVAModel's, with two replicas; LLM ranks log what they do with the encoder on the first stage, on Megatron's functions.

    All clip by one norm, and go on from a checkpoint of both units.
    """
    width, first = 4 // (num_stages + 1), {"pipeline-model-parallel-size": num_stages, **chunks}
    model, plan = _apart(vision_dp=width, llm_pp=num_stages, llm_dp=width, llm_chunks=2 if chunks else 1)
    expected = ranks.run(partial(pretrain_model, has_images=True), first, None, world_size=width * num_stages)
    run = partial(pretrain_model, has_images=True, model=model, plan=plan)
    saved = {"save": tmp_path, "save-interval": 2, "ckpt-format": "torch_dist"}
    found = ranks.run(run, first | saved, schedule, world_size=plan.num_ranks)
    held = [{name: each.weights[name] for name in mine.weights} for mine, each in zip(found[width:], expected, strict=True)]
    assert_same_run(found[width:], [replace(each, weights=weights) for each, weights in zip(expected, held, strict=True)])
    assert [each.get("norm") for each in found[0].logged] == [each.get("norm") for each in found[-1].logged]
    resumed = ranks.run(run, first | {"load": tmp_path, "ckpt-step": 2}, "gpipe", world_size=plan.num_ranks)
    assert_same_run(resumed, found, since=3)


@pytest.mark.parametrize(
    ("sizes", "schedule", "more", "form"),
    [
        (MimoSizes(1, 2, 1), "eager-1f1b", {}, {}),
        (MimoSizes(2, 1, 1), "zb-h1", {}, {"dist-ckpt-optim-fully-reshardable": True}),
        (MimoSizes(2, 1, 2), "1f1b", {"balance": "whole-sample", "length": first_number}, {}),
    ],
)
def test_pretrain_runs_mimo_as_one_process(ranks, tmp_path, sizes, schedule, more, form):
    """As Megatron's own program runs it: losses and norms are those of all modules in one process.

    All go on from a checkpoint of all modules.
    """
    alone = partial(pretrain_model, mimo=MimoSizes(1, 1, 1, shares_ranks=True))
    (expected,) = ranks.run(alone, MIMO | {"pipeline-model-parallel-size": 1}, None, world_size=1)
    flags = MIMO | {"pipeline-model-parallel-size": sizes.llm_pp, "ckpt-format": "torch_dist", **form}
    if more:
        more = more | dict(zip(("model", "plan"), _apart(sizes.vision_dp, sizes.llm_pp, sizes.llm_dp), strict=True))
    run = partial(pretrain_model, mimo=sizes, **more)
    found = ranks.run(run, flags | {"save": tmp_path, "save-interval": 2}, schedule, world_size=sizes.num_ranks)
    assert_same_run(found[-1:], [replace(expected, weights=found[-1].weights)])
    assert len({each.logged[0]["norm"] for each in found}) == 1
    resumed = ranks.run(run, flags | {"load": tmp_path, "ckpt-step": 2}, "gpipe", world_size=sizes.num_ranks)
    assert_same_run(resumed, found, since=3)


def _apart(vision_dp: int, llm_pp: int, llm_dp: int, llm_chunks: int = 1) -> tuple[ModelGraph, Plan]:
    """Return a model and a plan with the encoder on ranks of its own."""
    shape = {"hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 64}
    units = {"vision": {"role": "encoder", "num_layers": 1, **shape}, "llm": {"role": "backbone", "num_layers": 4, **shape}}
    units["vision"]["image"] = {"patch_size": 2}
    model = ModelGraph.from_dict({"units": units})
    llm = UnitSizes(pipeline_parallel_size=llm_pp, virtual_pipeline_size=llm_chunks, data_parallel_size=llm_dp)
    sizes = {"vision": UnitSizes(data_parallel_size=vision_dp), "llm": llm}
    return model, plan_disaggregated(model, sizes=sizes, world_size=vision_dp + llm_pp * llm_dp)


def test_checkpoints_in_which_units_would_overwrite_each_other_are_refused(ranks, tmp_path):
    model, plan = _apart(vision_dp=1, llm_pp=1, llm_dp=1)
    flags = {"pipeline-model-parallel-size": 1, "save": tmp_path / "run", "ckpt-format": "torch"}
    with pytest.raises(RankError, match="--ckpt-format torch names files .*; give --ckpt-format torch_dist"):
        ranks.run(partial(pretrain_model, has_images=True, model=model, plan=plan), flags, "1f1b", world_size=2)
    assert not (tmp_path / "run").exists()


def test_pretrain_runs_with_balanced_microbatches(ranks):
    """Which replica computes a microbatch changes no step; what an evaluation logs is its mean over all, too."""
    expected = ranks.run(pretrain_model, {}, None, world_size=4)
    found = ranks.run(partial(pretrain_model, balance="whole-sample", length=first_token), {}, "1f1b", world_size=4)
    assert_same_run(found, expected)


def test_pretrain_goes_on_from_its_checkpoint(ranks, tmp_path):
    """Saved under one schedule after half the steps, resumed under another: two steps and an evaluation are not repeated."""
    expected = ranks.run(pretrain_model, {"save": tmp_path, "save-interval": 2, "ckpt-format": "torch"}, "1f1b", world_size=4)
    resumed = {"load": tmp_path, "ckpt-step": 2, "ckpt-format": "torch"}
    assert_same_run(ranks.run(pretrain_model, resumed, "gpipe", world_size=4), expected, since=3)
