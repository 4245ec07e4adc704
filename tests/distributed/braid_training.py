"""Models, batches and an optimizer that megatron-core's own loops and Braid's are both given, to compare what they learn."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from megatron.runtime.feed.step_planner import StepOptions
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config
from megatron.runtime.orchestrator.machine import assumed_cluster
from megatron.runtime.session import Session, SessionOptions
from megatron.runtime.step.step import Step
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.run_options import RunOptions
from multimodal.model.transformer_config import BuildOptions
from multimodal.plan.planners.planned_run import PlannedRun
from multimodal.plan.planners.planning_request import PlanningRequest
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import passes_named
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from tests.distributed.gradient_case import SEED, plan_all, single_rank_plan
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import TIMEOUT

NUM_STEPS = 20
MICRO_BATCH_SIZE = 2
VOCAB_SIZE = 16
LEARNING_RATE = 0.02
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
EPSILON = 1e-8
CLIP_GRAD = 0.1


@dataclass(frozen=True)
class ComparedCase:
    graph: ModelGraph
    shapes: tuple[SampleShape, ...]
    """Of a global batch. GPTModel wants one number of tokens: what it trains pads shorter ones."""

    def batch_of_step(self, step: int) -> RandomSource:
        return RandomSource(self.graph, self.shapes, VOCAB_SIZE, seed=step)

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest sample."""
        source = self.batch_of_step(0)
        return max(source.lengths(index).num_tokens for index in range(len(source)))


_LLM = {"role": "backbone", "num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2}
_LLM |= {"ffn_hidden_size": 24, "add_qkv_bias": True, "init_method_std": 0.1}
_VISION = {"role": "encoder", "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 20}
_VISION |= {"init_method_std": 0.1}
_VISION |= {"image": {"patch_size": 2, "merge_size": 2, "in_channels": 1, "min_pixels": 16, "max_pixels": 4096}}
_NUM_TARGETS = (1, 3, 7, 2, 5, 4, 6, 1, 3, 2, 7, 1)
_IMAGES = (((2, 3), (1, 1)), ((1, 4),), ((2, 2),), ((1, 2),), ((3, 1), (2, 1)), ((1, 1),)) * 2

TEXT_ONLY = ComparedCase(
    ModelGraph.from_dict({"units": {"llm": _LLM}}), tuple(SampleShape((), 7, num_targets) for num_targets in _NUM_TARGETS)
)
"""Twelve sequences with unequal numbers of target tokens."""
WITH_IMAGES = ComparedCase(
    ModelGraph.from_dict({"units": {"vision": _VISION, "llm": _LLM}}),
    tuple(
        SampleShape(
            tuple(("vision", *image) for image in images), 16 - sum(rows * columns for rows, columns in images), num_targets
        )
        for images, num_targets in zip(_IMAGES, _NUM_TARGETS, strict=True)
    ),
)
"""One or two images each, 1 to 7 of 16 tokens."""
TWO_ENCODERS = ComparedCase(
    ModelGraph.from_dict({"units": {"vision": _VISION, "charts": {**_VISION, "num_layers": 1}, "llm": _LLM}}),
    tuple(
        replace(
            shape, items=tuple((("vision", "charts")[(index + item) % 2], *image[1:]) for item, image in enumerate(shape.items))
        )
        for index, shape in enumerate(WITH_IMAGES.shapes)
    ),
)
"""The same images, every other one by an encoder of its own."""
Weights = Mapping[str, Mapping[str, np.ndarray]]
"""Unit -> parameter -> values."""


def initial_weights(case: ComparedCase) -> Weights:
    """Every parameter whole, under Braid's names; on one rank."""
    stages = BraidTraining(case, compared_run(single_rank_plan(case.graph))).session.stages
    return {
        unit: {name: parameter.detach().numpy().copy() for name, parameter in stage.named_parameters()}
        for (unit, _), stage in stages.items()
    }


def braid_losses(case: ComparedCase, plan: Plan) -> list[float]:
    training = BraidTraining(case, compared_run(plan))
    return [training.train_step(training.prepare(case.batch_of_step(number))) for number in range(NUM_STEPS)]


def compared_run(plan: Plan, *, balance: str = "orchmllm") -> PlannedRun:
    return PlannedRun(plan, balance=balance, micro_batch_size=MICRO_BATCH_SIZE)


class BraidTraining:
    def __init__(self, case: ComparedCase, run: PlannedRun, request: PlanningRequest | None = None) -> None:
        self.case, self.run = case, run
        self._machine = (request.cluster, request.profile) if request else (assumed_cluster(), None)
        rates = {"lr": LEARNING_RATE, "min_lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "clip_grad": CLIP_GRAD}
        optimizer = build_optimizer_config(**rates, betas=BETAS, eps=EPSILON, dtype=torch.float64)
        build = BuildOptions(torch.float64)
        self._costs = RunOptions(zero_stage=0, sequence_parallel=False, transformer_impl="local")
        how = {"builder": BUILDERS[run.schedule], "passes": passes_named(",".join(run.passes)), "optimizer": optimizer}
        options = SessionOptions(case.graph, build, VOCAB_SIZE, seed=SEED, timeout=TIMEOUT, **how)
        self.session = Session(options, plan=run.plan)
        for group in (group for unit in self.session.optimizers.values() for group in unit.param_groups):
            group["weight_decay"] = WEIGHT_DECAY * group["wd_mult"]  # what the learning rate schedule does in each step

    def prepare(self, source: RandomSource) -> Step:
        lengths = [source.lengths(index) for index in range(len(source))]
        cluster, profile = self._machine
        predictor = StepPredictor(self.session.schedules(), cluster, VOCAB_SIZE, self._costs, profile)
        sizes = {"encoder_micro_batch_sizes": dict(self.run.encoder_micro_batch_sizes), "vocab_size": VOCAB_SIZE}
        options = BalanceOptions(micro_batch_size=self.run.micro_batch_size, predictor=predictor, **sizes)
        assignment = BALANCERS[self.run.balance](lengths, graph=self.case.graph, plan=self.session.plan, options=options)
        return plan_all(source, assignment, StepOptions(self.session.schedules(), dist.get_rank(), costs_of=predictor.costs))

    def train_step(self, step: Step) -> float:
        loss = sum(self.session.forward_backward(step).loss_sums.values()) / step.num_target_tokens
        self.session.finish_gradients()
        self.session.step_optimizers(self.session.gradient_norm(), gathers_later=False)
        return loss
