"""A small model that trains on random samples, under any plan: what checkpoints are saved of and resumed into."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.runtime.checkpoint.checkpoint import BackgroundSave, LoadedCheckpoint, load_checkpoint, save_checkpoint
from megatron.runtime.feed.step_planner import StepOptions
from megatron.runtime.gradients.unit_optimizer import Rates, UnitRates, build_optimizer_config
from megatron.runtime.session import Session, SessionOptions
from megatron.runtime.step.step import LossMeans, Step
from megatron.runtime.step.token_placement import ContextSharing
from multimodal.balance import BALANCERS, UNBALANCED
from multimodal.balance.balance_options import BalanceOptions
from multimodal.model.layers.registry import sharding_of
from multimodal.model.parameter_sharding import ParameterSharding
from multimodal.model.transformer_config import BuildOptions
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated, plan_disaggregated
from multimodal.schedule.passes import Pass
from multimodal.values.model_graph import Experts, ImageInput, ModelGraph, Queries, Role, Transformer, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.gradient_case import plan_all, sharing_options, whole_weights
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import TIMEOUT, RankPool
from tests.unit.model.rank_groups import join_shards

SHAPES = (
    SampleShape((("vision", 2, 3), ("vision", 1, 1)), 9, 5),
    SampleShape((), 7, 6),
    SampleShape((("vision", 1, 4),), 5, 3),
    SampleShape((("vision", 2, 2),), 8, 4),
    SampleShape((("vision", 1, 2),), 6, 2),
    SampleShape((("vision", 3, 1),), 4, 4),
)
IMAGES_TO_MAKE = (
    (("painter", 2, 1),),
    (("painter", 1, 1), ("painter", 1, 3)),
    (),
    (("painter", 2, 2),),
    (),
    (("painter", 1, 2),),
)
"""What a generator makes of each of the samples."""


def build_graph(
    *,
    tied: bool = False,
    frozen: tuple[str, ...] = (),
    hidden_size: int = 16,
    with_generator: bool = False,
    with_edges: bool = False,
) -> ModelGraph:
    """An encoder with LayerNorm, GELU and biases; an LLM with RMSNorm, SwiGLU and grouped queries; a generator on wish.

    with_edges: behind the encoder another one, with queries, which a second one feeds, too, and which feeds both others.
    """
    vision = Unit(
        "vision",
        Role.ENCODER,
        Transformer(2, 16, 2, 20, normalization="LayerNorm", activation="gelu", add_bias_linear=True),
        image=ImageInput(patch_size=2, merge_size=2, in_channels=1, min_pixels=16, max_pixels=4096),
        freeze_module="vision" in frozen,
        freeze_projector="projector" in frozen,
    )
    llm = Unit(
        "llm",
        Role.BACKBONE,
        Transformer(3, hidden_size, 4, 24, num_query_groups=2),
        untie_embeddings_and_output_weights=not tied,
        freeze_module="llm" in frozen,
    )
    if not with_generator:
        return ModelGraph((vision, llm), (("vision", "llm"),))
    painter = Unit(
        "painter",
        Role.GENERATOR,
        Transformer(2, 8, 2, 12),
        image=ImageInput(patch_size=2, merge_size=1, in_channels=1, min_pixels=4, max_pixels=4096),
        freeze_module="painter" in frozen,
    )
    if not with_edges:
        return ModelGraph((vision, llm, painter), (("vision", "llm"), ("llm", "painter")))
    second = replace(vision, name="second")
    joint = Unit("joint", Role.ENCODER, vision.transformer, join="sequence", queries=Queries(3))
    inner = ("vision", "joint"), ("second", "joint")
    return ModelGraph((vision, second, joint, llm, painter), (*inner, ("joint", "llm"), ("llm", "painter"), ("joint", "painter")))


def _with_experts(graph: ModelGraph) -> ModelGraph:
    experts, llm = Experts(4, ffn_hidden_size=12, aux_loss_coeff=0.1), graph.backbone
    shared = replace(llm, transformer=replace(llm.transformer, experts=experts))
    return replace(graph, units=tuple(shared if unit is llm else unit for unit in graph.units))


EXPERTS = _with_experts(build_graph(tied=True))
"""An LLM with experts behind an encoder."""


def build_unlike_plan() -> Plan:
    """Six ranks, for an encoder and an LLM that share some of them; replicas of both differ in TP, PP and cuts.

    One of the encoder has virtual stages dealt in turn, one of the LLM has them in the shape of a V.
    """
    wide = Replica((Stage((0, 1), ((0, 4),), 2),))
    deep = Replica((Stage((2,), ((0, 1), (2, 3))), Stage((3,), ((1, 2), (3, 4)))))
    llm = (
        Replica((Stage((0, 1), ((0, 2),), 2), Stage((2, 3), ((2, 5),), 2))),
        Replica((Stage((4,), ((0, 1), (4, 5))), Stage((5,), ((1, 2), (2, 4))))),
    )
    return Plan({"vision": UnitPlan((wide, deep)), "llm": UnitPlan(llm, microbatch_shares=(3, 1))})


def build_plan(graph: ModelGraph, *, colocated: bool = False, experts: int = 1, **units: tuple[int, ...]) -> Plan:
    """units: (tp, pp, dp) or (tp, pp, dp, cp) of each; what is said of units that the graph does not have is left out.

    experts: replicas of the LLM that share them.
    """
    given = [(name, units[name]) for name in graph.unit_names]
    sizes = {name: UnitSizes(tp, pp, *cp, data_parallel_size=dp) for name, (tp, pp, dp, *cp) in given}
    sizes["llm"] = replace(sizes["llm"], expert_parallel_size=experts)
    counts = [size.num_ranks or 0 for size in sizes.values()]
    if colocated:
        return plan_colocated(graph, sizes=sizes, world_size=max(counts))
    return plan_disaggregated(graph, sizes=sizes, world_size=sum(counts))


AVERAGE_DECAY = 0.75
"""Of the average of every generator's weights."""


@dataclass(frozen=True)
class TrainingCase:
    graph: ModelGraph
    plan: Plan
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    seed: int = 3
    vocab_size: int = 36
    shards_weights: bool = False
    reduces_once: bool = False
    num_state_copies: int | None = None
    saves_in_background: bool = False
    passes: tuple[Pass, ...] = ()


class Training:
    def __init__(self, case: TrainingCase) -> None:
        self.case, self.rank = case, dist.get_rank()
        optimizer = build_optimizer_config(
            lr=0.01, min_lr=0.0, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0, dtype=case.dtype
        )
        rates = UnitRates(*[Rates(0.01, 0.0, 0.1, average_decay=AVERAGE_DECAY)] * 2)
        how = {"seed": case.seed, "timeout": TIMEOUT, "optimizer": optimizer, **sharing_options(case)}
        how["rates"] = {unit.name: rates for unit in case.graph.generators}
        build = BuildOptions(case.dtype, sequence_parallel=case.sequence_parallel)
        options = SessionOptions(case.graph, build, case.vocab_size, **how)
        self.session = Session(options, plan=case.plan)
        self.background = BackgroundSave(TIMEOUT) if case.saves_in_background else None

    def train_step(self, number: int) -> float:
        step = self.plan_step(number)
        result = self.session.forward_backward(step)
        self.session.finish_gradients()
        self.session.step_optimizers(self.session.gradient_norm(), gathers_later=step.cuts.gathers_parameters)
        if step.cuts.gathers_parameters:
            assert any(unit._ungathered for unit in self.session.gradients.values()), "the optimizer leaves it to the schedule"
        backbone = step.graph.backbone.name
        sums = _sum_over_ranks([result.loss_sums.get(key, 0.0) for key in step.loss_counts])
        return LossMeans.of(dict(zip(step.loss_counts, sums, strict=True)), step.loss_counts, backbone=backbone).total

    def plan_step(self, number: int) -> Step:
        shapes = SHAPES
        if self.case.graph.generators:
            shapes = tuple(replace(shape, items=shape.items + made) for shape, made in zip(SHAPES, IMAGES_TO_MAKE, strict=True))
        source = RandomSource(self.case.graph, shapes, self.case.vocab_size, seed=number)
        lengths = [source.lengths(index) for index in range(len(source))]
        graph, plan = self.case.graph, self.session.plan
        assignment = BALANCERS[UNBALANCED](lengths, graph=graph, plan=plan, options=BalanceOptions(micro_batch_size=1))
        sharing = ContextSharing(block_size=4)
        options = StepOptions(self.session.schedules(), self.rank, sharing=sharing, shards_weights=self.case.shards_weights)
        return plan_all(source, assignment, options)

    def save(self, folder: Path, *, step: int, keep_last: int = 2, run_state: dict[str, Any] | None = None) -> None:
        how = {"schedulers_state": {"num_steps": step}, "run_state": run_state or {"seed": self.case.seed}}
        how |= {"keep_last": keep_last, "background": self.background}
        save_checkpoint(folder, step=step, session=self.session, **how)

    def finish_saving(self) -> None:
        if self.background is not None:
            self.background.finish()

    def load(self, folder: Path, *, load_optimizer: bool = True, load_rng: bool = True) -> LoadedCheckpoint:
        return load_checkpoint(folder, session=self.session, load_optimizer=load_optimizer, load_rng=load_rng)

    def held(self, *, with_moments: bool = False) -> list[torch.Tensor]:
        """Parameters and, if asked for, what the optimizers have of them after a step."""
        parameters = [parameter for stage in self.session.stages.values() for parameter in stage.parameters()]
        states = [state for optimizer in self.session.optimizers.values() for state in optimizer.optimizer.state.values()]
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")] if with_moments else []
        return parameters + moments

    def fill(self, value: float, **which: bool) -> None:
        with torch.no_grad():
            for tensor in self.held(**which):
                tensor.fill_(value)

    def found(self, **which: bool) -> set[float]:
        return {value for tensor in self.held(**which) for value in tensor.detach().unique().tolist()}

    def parameters(self) -> "RankParameters":
        """Copies of all parameters of this rank; the copy of tied embeddings on a last stage goes by a name of its own."""
        found = {}
        self.session.complete_parameters()
        with whole_weights(self.session):
            for (unit, _), stage in self.session.stages.items():
                for name, parameter in stage.named_parameters():
                    sharding = sharding_of(stage.unit, name)
                    label = f"{name} (copy)" if getattr(parameter, "shared", False) else name
                    wide = torch.promote_types(parameter.dtype, torch.float32)  # NumPy has no bfloat16
                    found[unit, label] = (sharding, parameter.detach().to(wide, copy=True).numpy())
        return found


def _sum_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    found: list[float] = total.tolist()
    return found


RankParameters = dict[tuple[str, str], tuple[ParameterSharding, np.ndarray]]


@dataclass(frozen=True)
class RankReport:
    losses: list[float]
    parameters_at_checkpoint: RankParameters
    parameters_at_end: RankParameters
    loaded: LoadedCheckpoint | None = None


def train_and_save(
    case: TrainingCase, folder: Path, num_before: int, num_after: int, before_finish: Callable[[], None] = lambda: None
) -> RankReport:
    """before_finish: called behind the last step, before a save in the background is waited for."""
    training = Training(case)
    for number in range(num_before):
        training.train_step(number)
    training.save(folder, step=num_before)
    at_checkpoint = training.parameters()
    losses = [training.train_step(number) for number in range(num_before, num_before + num_after)]
    before_finish()
    training.finish_saving()
    return RankReport(losses, at_checkpoint, training.parameters())


def resume(case: TrainingCase, folder: Path, num_after: int, load_optimizer: bool = True) -> RankReport:
    """Start from other initial values, load, and train on."""
    training = Training(replace(case, seed=case.seed + 1))
    loaded = training.load(folder, load_optimizer=load_optimizer)
    at_checkpoint = training.parameters()
    losses = [training.train_step(number) for number in range(loaded.step, loaded.step + num_after)]
    return RankReport(losses, at_checkpoint, training.parameters(), loaded)


def run(ranks: RankPool, function: Any, case: TrainingCase, *args: Any) -> list[Any]:
    return ranks.run(function, case, *args, world_size=case.plan.num_ranks)


def join_parameters(plan: Plan, shards: list[RankParameters]) -> dict[tuple[str, str], np.ndarray]:
    """Whole parameters from those of all ranks; asserts that replicas and copies are alike."""
    whole: dict[tuple[str, str], np.ndarray] = {}
    for unit_name, unit in plan.units.items():
        for replica in unit.replicas:
            for stage in replica.stages:
                for unit_of_parameter, label in shards[stage.ranks[0]]:
                    if unit_of_parameter == unit_name:
                        key = unit_name, label.removesuffix(" (copy)")
                        for group in unit.tensor_parallel_groups(stage):
                            parts = [shards[rank][unit_name, label] for rank in group]
                            joined = join_shards([torch.from_numpy(values) for _, values in parts], parts[0][0]).numpy()
                            assert np.array_equal(whole.setdefault(key, joined), joined), f"{key} differs between replicas"
    return whole


def assert_resumed_bit_for_bit(found: list[RankReport], *, expected: list[RankReport]) -> None:
    """The same losses, and parameters before and after them."""
    assert len({tuple(report.losses) for report in expected}) == 1
    for before, after in zip(expected, found, strict=True):
        assert after.losses == before.losses
        for moment in ("parameters_at_checkpoint", "parameters_at_end"):
            saved, loaded = (getattr(report, moment) for report in (before, after))
            assert loaded.keys() == saved.keys() and all(np.array_equal(loaded[key][1], saved[key][1]) for key in saved)
