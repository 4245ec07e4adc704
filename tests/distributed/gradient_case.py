"""One global batch through Braid's runtime, and through one process sample by sample: losses and all gradients."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from megatron.runtime.assembly import RankRuntime, assemble
from megatron.runtime.step import Step
from megatron.runtime.step_planner import ScheduleCache, plan_step
from multimodal.data.packing import pack_encoder_microbatch
from multimodal.model.parameter_sharding import WHOLE, ParameterSharding, join_shards, parameter_sharding
from multimodal.model.stage_input import PackedInput
from multimodal.model.transformer_config import BuildOptions, Precision
from multimodal.model.unit_stage import UnitStage
from multimodal.schedule.builders import BUILDERS
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import LayerKind, ModelGraph
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.random_source import RandomSource
from tests.distributed.rank_pool import TIMEOUT, RankPool

SEED = 7


@dataclass(frozen=True)
class GradientCase:
    """What is compared."""

    graph: ModelGraph
    plan: Plan
    assignment: Assignment
    source: RandomSource
    builder: str = "1f1b"
    sequence_parallel: bool = False
    recompute: str | None = None


@dataclass(frozen=True)
class RankGradients:
    """What one rank reports: (unit, parameter) -> (sharding, tensor parallel rank, gradient)."""

    loss_sum: float
    gradients: Mapping[tuple[str, str], tuple[ParameterSharding, int, np.ndarray]]


def options_of(case: GradientCase) -> BuildOptions:
    """Float64, so that the comparison is exact."""
    return BuildOptions(Precision(torch.float64), sequence_parallel=case.sequence_parallel, recompute=case.recompute)


def run_on_rank(case: GradientCase, tamper: str | None = None) -> RankGradients:
    """One step of a case on this rank; `tamper` plants an error (see test_master)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    runtime = assemble(
        case.graph, case.plan, rank=rank, world_size=world_size, options=options_of(case), vocab_size=case.source.vocab_size, seed=SEED, timeout=TIMEOUT
    )
    runtime.zero_gradients()
    step = _step(case, rank)
    step = _TAMPERS[tamper](step) if tamper else step
    result = runtime.executor.execute(step, is_training=True)
    runtime.finish_gradients()
    return RankGradients(result.loss_sum, gradients_of(runtime))


def gradients_of(runtime: RankRuntime) -> dict[tuple[str, str], tuple[ParameterSharding, int, np.ndarray]]:
    """This rank's gradients, with what is needed to join them."""
    found = {}
    for (unit, _), stage in runtime.stages.items():
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.main_grad.detach().numpy().copy()
                found[unit, name] = (_sharding(stage, name), stage.groups.tp.rank(), gradient)
    return found


def run_reference(case: GradientCase) -> RankGradients:
    """The same batch in one process, sample by sample, without executor, broker, plan or assignment."""
    whole = replace(case, plan=single_rank_plan(case.graph), sequence_parallel=False, recompute=None)
    runtime = assemble(
        case.graph, whole.plan, rank=0, world_size=1, options=options_of(whole), vocab_size=case.source.vocab_size, seed=SEED, timeout=TIMEOUT
    )
    runtime.zero_gradients()
    stages = {unit: stage.train() for (unit, _), stage in runtime.stages.items()}
    num_targets = sum(shape.num_target_tokens for shape in case.source.shapes)
    loss_sum = 0.0
    for index in range(len(case.source)):
        loss = _sample_loss(case, stages, index)
        loss_sum += float(loss)
        if loss.requires_grad:
            (loss / num_targets).backward()
    return RankGradients(loss_sum, gradients_of(runtime))


def single_rank_plan(graph: ModelGraph) -> Plan:
    """All units whole on rank 0."""
    return Plan({unit.name: UnitPlan((Replica((Stage((0,), ((0, len(unit.layers)),)),)),)) for unit in graph.units})


def assert_matches(case: GradientCase, ranks: RankPool, *, tamper: str | None = None, tolerance: float = 1e-9) -> None:
    """Loss and every gradient, on every replica, within `tolerance` of one process."""
    (expected,) = ranks.run(run_reference, case, world_size=1)
    found: list[RankGradients] = ranks.run(run_on_rank, case, tamper, world_size=case.plan.num_ranks)
    scale = max(1.0, abs(expected.loss_sum))
    loss_sum = sum(rank.loss_sum for rank in found)
    assert abs(loss_sum - expected.loss_sum) <= tolerance * scale, f"loss {loss_sum} instead of {expected.loss_sum}"
    seen = set()
    for unit_name, unit in case.plan.units.items():
        for replica in unit.replicas:
            for stage in replica.stages:
                shards = [found[rank].gradients for rank in stage.ranks]
                for key in [key for key in shards[0] if key[0] == unit_name]:
                    sharding = shards[0][key][0]
                    joined = join_shards([torch.from_numpy(shard[key][2]) for shard in shards], sharding).numpy()
                    reference = expected.gradients[key][2]
                    error = float(np.abs(joined - reference).max())
                    assert error <= tolerance * max(1.0, float(np.abs(reference).max())), f"gradient of {key} is off by {error}"
                    seen.add(key)
                    if sharding == WHOLE:
                        assert all(np.allclose(shard[key][2], joined, rtol=0, atol=tolerance) for shard in shards), f"{key} differs over tp"
    assert seen == set(expected.gradients), f"gradients are missing: {sorted(set(expected.gradients) - seen)[:3]}"


def _step(case: GradientCase, rank: int) -> Step:
    schedules = ScheduleCache(case.graph, case.plan, BUILDERS[case.builder])
    return plan_step(
        case.source,
        lengths=[case.source.lengths(index) for index in range(len(case.source))],
        assignment=case.assignment,
        schedules=schedules,
        rank=rank,
        source_index={index: index for index in range(len(case.source))},
    )


def _sample_loss(case: GradientCase, stages: Mapping[str, UnitStage], index: int) -> torch.Tensor:
    text, lengths = case.source.text(index), case.source.lengths(index)
    embeddings, rows = [], []
    for item, start, length in text.item_starts:
        unit = case.graph.unit(lengths.items[item].unit)
        assert unit.image is not None
        packed = pack_encoder_microbatch(
            [Atom(index, item)], source=case.source, index_of_sample={index: index}, merge_size=unit.image.merge_size, with_pixels=True
        )
        batch = PackedInput((lengths.items[item].num_tokens,), packed.positions, patches=packed.patches)
        embeddings.append(stages[unit.name](None, batch))
        rows.append(torch.arange(start, start + length))
    target_rows = torch.from_numpy(text.is_target).nonzero()[:, 0]
    batch = PackedInput(
        (lengths.num_tokens,),
        torch.arange(lengths.num_tokens),
        token_ids=torch.from_numpy(text.token_ids),
        item_rows=torch.cat(rows) if rows else None,
        target_rows=target_rows,
        targets=torch.from_numpy(text.labels)[target_rows],
    )
    backbone = stages[case.graph.backbone.name]
    loss: torch.Tensor = backbone(None, batch, torch.cat(embeddings) if embeddings else None).loss_sum
    return loss


def _sharding(stage: UnitStage, name: str) -> ParameterSharding:
    layer = stage.unit.layers[int(name.split(".")[1])]
    return parameter_sharding(name, is_gated=stage.unit.transformer.activation == "swiglu" and layer is LayerKind.TRANSFORMER)


_TAMPERS: dict[str, object] = {}
