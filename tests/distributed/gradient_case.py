"""One global batch through Braid's runtime, and through one process sample by sample: losses and all gradients."""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron.runtime.feed.packing import pack_encoder_microbatch, pack_language_microbatch
from megatron.runtime.feed.sample_exchange import SampleExchange
from megatron.runtime.feed.step_planner import StepOptions, plan_step
from megatron.runtime.gradients.sharded_layer import ShardedLayer
from megatron.runtime.session import Session, SessionOptions
from megatron.runtime.step.step import Step
from megatron.runtime.step.token_placement import ContextSharing
from multimodal.attention.bitfield import MaskMode
from multimodal.attention.packed_lengths import ItemSpan
from multimodal.attention.share_tokens import TokenDistribution
from multimodal.balance.step_predictor import StepPredictor
from multimodal.cost.cluster import Cluster
from multimodal.cost.run_options import RunOptions
from multimodal.data.sample_source import SampleSource
from multimodal.model.adapter import UP, is_new_rows
from multimodal.model.latents import draw_path
from multimodal.model.layers.registry import sharding_of
from multimodal.model.parameter_sharding import ParameterSharding, full_shape, take_shard
from multimodal.model.stage_input import PackedInput, stack_items
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.unit_stage import UnitStage
from multimodal.schedule.build_schedule import ScheduleCache
from multimodal.schedule.builders import BUILDERS
from multimodal.schedule.passes import Pass
from multimodal.schedule.passes.reduce_by_layer import reduce_by_layer
from multimodal.schedule.passes.split_backward import split_backward
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ImageInput, ModelGraph, Role, Unit
from multimodal.values.plan import Plan, Replica, Stage, UnitPlan
from tests.distributed.random_source import RandomSource
from tests.distributed.rank_pool import TIMEOUT

SEED = 7
Gradients = Mapping[tuple[str, str], np.ndarray]
"""(unit, parameter) -> gradient."""


@dataclass(frozen=True, repr=False)
class GradientCase:
    graph: ModelGraph
    plan: Plan
    assignment: Assignment
    source: RandomSource
    builder: str = "1f1b"
    sequence_parallel: bool = False
    recompute: str | None = None
    passes: tuple[Pass, ...] = ()
    exchanges_samples: bool = False
    """Whether ranks decode shares of the batch and exchange them, or load what they were assigned."""
    attention_mask: MaskMode = MaskMode.CAUSAL
    attention_backend: str = "auto"
    """The reference's is always the dense one."""
    distribution: TokenDistribution = TokenDistribution.LPT
    """Of tokens over context parallel ranks."""
    block_size: int = 4
    """Tokens that stay together there."""
    shards_weights: bool = False
    """Whether replicas share weights and gradients, too; the reference never does."""
    reduces_once: bool = False
    """Whether these gradients are reduced in a step's last backward alone."""
    num_state_copies: int | None = None
    """Of weights that replicas share."""
    num_overlapped_parts: int = 1
    """Of tensor parallel collectives."""
    buffer_rows: int | None = None
    """Of Transformer Engine's user buffers."""
    transformer_impl: str = "local"
    """The reference has local layers."""
    dtype: torch.dtype = torch.float64
    """Anything else is for what cannot be exact."""
    fp8_recipe: str | None = None
    cluster: Cluster | None = None
    """Whose durations schedules go by that need any; unit costs by default."""

    def __repr__(self) -> str:
        shapes = [(shape.items, shape.num_text_tokens, shape.num_target_tokens) for shape in self.source.shapes]
        lines = [
            f"{self.builder}, passes={self.passes}, sequence_parallel={self.sequence_parallel}, recompute={self.recompute}",
            f"shards_weights={self.shards_weights}, once {self.reduces_once}, in copies {self.num_state_copies}",
            f"num_overlapped_parts={self.num_overlapped_parts}",
            f"attention: {self.attention_mask}, by {self.attention_backend}; {self.distribution}, blocks of {self.block_size}",
            f"samples (items, text, targets): {shapes}",
            *(line for unit in self.graph.units for line in self._lines_of_unit(unit)),
        ]
        return "GradientCase(" + "\n    ".join(lines) + ")"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def _lines_of_unit(self, unit: Unit) -> list[str]:
        plan, replicas = self.plan.units[unit.name], self.assignment.units[unit.name]
        stages = [[(stage.ranks, stage.layer_ranges) for stage in replica.stages] for replica in plan.replicas]
        groups = [[[tuple(atom) for atom in microbatch] for microbatch in replica] for replica in replicas]
        frozen = f"module {unit.freeze_module}, projector {unit.freeze_projector}, {unit.lora}, new tokens {unit.new_tokens}"
        return [
            f"{unit.name}: {unit.transformer}, frozen: {frozen}, tied: {not unit.untie_embeddings_and_output_weights}",
            f"  tp {plan.tensor_parallel_size}, cp {plan.context_parallel_size}, ep {plan.expert_parallel_size}",
            f"  replicas -> stages (ranks, layers): {stages}",
            f"  replicas -> microbatches: {groups}",
        ]


@dataclass(frozen=True)
class RankGradients:
    loss_sums: Mapping[str, float]
    """By unit, of those that have a loss."""
    gradients: Gradients
    shardings: Mapping[tuple[str, str], ParameterSharding]


def build_session(case: GradientCase, *, optimizer: OptimizerConfig | None = None) -> Session:
    """This rank's part of a case, by default in float64 so that the comparison is exact.

    Biases, norm weights and what adapters have as zeros are drawn: as zeros and ones they would hide what adds or scales twice.
    """
    how = {"seed": SEED, "timeout": TIMEOUT, "optimizer": optimizer, "builder": BUILDERS[case.builder]}
    how |= sharing_options(case)
    options = SessionOptions(case.graph, build_options(case), case.source.vocab_size, **how)
    session = Session(options, plan=case.plan)
    with whole_weights(session):
        for (unit, _), stage in session.stages.items():
            for name, parameter in stage.named_parameters():
                if parameter.dim() == 1 or name.endswith((UP, "modulation.weight")) or is_new_rows(name):
                    _randomize(parameter, f"{unit}.{name}", sharding_of(stage.unit, name), stage)
    session.zero_gradients()
    return session


def sharing_options(case: Any) -> dict[str, Any]:
    """Return a session's options of how replicas share work and weights, as a case has them."""
    shared = {name: getattr(case, name) for name in ("passes", "shards_weights", "reduces_once", "num_state_copies")}
    return {**shared, "reduces_by_layer": reduce_by_layer in case.passes}


def build_options(case: GradientCase) -> BuildOptions:
    names = ("sequence_parallel", "recompute", "attention_backend", "attention_mask", "num_overlapped_parts", "buffer_rows")
    how = {name: getattr(case, name) for name in (*names, "transformer_impl")}
    fp8 = {"fp8_format": None if case.fp8_recipe is None else "hybrid", "fp8_recipe": case.fp8_recipe or "tensorwise"}
    return BuildOptions(case.dtype, **how, **fp8, delays_weight_gradients=_delays_weight_gradients(case))


def _delays_weight_gradients(case: GradientCase) -> bool:
    return (BUILDERS[case.builder].splits_backwards or split_backward in case.passes) and case.transformer_impl != "local"


def plan_case(case: GradientCase, *, forward_only: bool = False) -> Step:
    """The step of a case on this rank."""
    source: SampleSource = case.source
    lengths = [case.source.lengths(index) for index in range(len(case.source))]
    schedules = ScheduleCache(case.graph, case.plan, BUILDERS[case.builder], case.passes, forward_only)
    if case.exchanges_samples:
        exchange = SampleExchange(rank=dist.get_rank(), world_size=case.plan.num_ranks, timeout=TIMEOUT)
        share = exchange.decode(source, range(len(lengths)))
        assert [share.lengths(index) for index in range(len(share))] == lengths
        source = exchange.exchange(share, schedules.shape(case.assignment), case.assignment)
    options = RunOptions(
        recompute=case.recompute,
        zero_stage=3 if case.shards_weights else 0,
        sequence_parallel=case.sequence_parallel,
        transformer_impl=case.transformer_impl,
        num_overlapped_parts=case.num_overlapped_parts,
    )
    predictor = StepPredictor(schedules, case.cluster, case.source.vocab_size, options) if case.cluster is not None else None
    sharing = ContextSharing(case.distribution, case.block_size, case.attention_mask)
    how = {"shards_weights": case.shards_weights, "build": build_options(case), "seed": SEED}
    how["costs_of"] = predictor.costs if predictor is not None else None
    options = StepOptions(schedules, dist.get_rank(), sharing=sharing, **how)
    return plan_step(source, lengths=lengths, assignment=case.assignment, options=options).packed()


def plan_all(source: SampleSource, assignment: Assignment, options: StepOptions) -> Step:
    lengths = [source.lengths(index) for index in range(len(source))]
    return plan_step(source, lengths=lengths, assignment=assignment, options=options)


def sharded_layers(session: Session) -> list[ShardedLayer]:
    """Of all units of a rank, in one order on all ranks that share them."""
    return [layer for unit in session.gradients.values() for stage in unit.sharded.values() for layer in stage.layers.values()]


@contextmanager
def whole_weights(session: Session) -> Iterator[None]:
    """Have all of a rank's weights inside, to read or to change."""
    with ExitStack() as gathered:
        for layer in sharded_layers(session):
            gathered.enter_context(layer.whole())
        yield


def run_on_rank(case: GradientCase) -> RankGradients:
    return run_step(build_session(case), plan_case(case))


def run_step(session: Session, step: Step) -> RankGradients:
    result = session.executor.execute(step)
    session.finish_gradients()
    return _report(session, {step.graph.backbone.name: 0.0, **result.loss_sums})


def reference_of(case: GradientCase) -> GradientCase:
    """What is left of a case for one process."""
    kept = {name: getattr(case, name) for name in ("attention_mask", "dtype", "fp8_recipe")}
    plan = single_rank_plan(case.graph)
    return GradientCase(case.graph, plan, Assignment({}), case.source, attention_backend="dense", **kept)


def run_reference(case: GradientCase) -> RankGradients:
    """The batch of `reference_of` a case, sample by sample, without executor, broker, plan or assignment."""
    session = build_session(case)
    stages = {unit: stage.train() for (unit, _), stage in session.stages.items()}
    for stage in stages.values():
        stage.num_step_tokens = sum(case.source.lengths(index).num_tokens for index in range(len(case.source)))
    divisors = _loss_divisors(case)
    loss_sums = dict.fromkeys(divisors, 0.0)
    for index in range(len(case.source)):
        losses = _sample_losses(case, stages, index)
        loss = sum(sum_of_unit / divisors[unit] for unit, sum_of_unit in losses.items())
        for unit, sum_of_unit in losses.items():
            loss_sums[unit] += float(sum_of_unit)
        if loss.requires_grad:
            loss.backward()
    return _report(session, loss_sums)


def _loss_divisors(case: GradientCase) -> dict[str, int]:
    """Target tokens of the LLM, pixel values of every generator, of the whole batch."""
    divisors = dict.fromkeys((unit.name for unit in case.graph.generators), 0)
    for index, shape in enumerate(case.source.shapes):
        for item, (unit, _, _) in enumerate(shape.items):
            if unit in divisors:
                image = case.graph.unit(unit).image
                assert image is not None
                divisors[unit] += len(case.source.item(index, item).patches) * image.num_patch_values
    return {case.graph.backbone.name: sum(shape.num_target_tokens for shape in case.source.shapes), **divisors}


def single_rank_plan(graph: ModelGraph) -> Plan:
    return Plan({unit.name: UnitPlan((Replica((Stage((0,), ((0, len(unit.layers)),)),)),)) for unit in graph.units})


def _report(session: Session, loss_sums: Mapping[str, float]) -> RankGradients:
    gradients, shardings = {}, {}
    for layer in sharded_layers(session):
        if layer.gradient_share is not None:
            parts = [torch.empty_like(layer.gradient_share) for _ in range(layer.group.size())]
            dist.all_gather(parts, layer.gradient_share, group=layer.group)
            for parameter, gradient in zip(layer.parameters, layer.split(torch.cat(parts)), strict=True):
                parameter.main_grad = gradient
    for (unit, _), stage in session.stages.items():
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                gradients[unit, name] = parameter.main_grad.detach().numpy().copy()
                shardings[unit, name] = sharding_of(stage.unit, name)
    return RankGradients(loss_sums, gradients, shardings)


@torch.no_grad()
def _randomize(parameter: torch.Tensor, name: str, sharding: ParameterSharding, stage: UnitStage) -> None:
    size = stage.groups.tp.size()
    shape = full_shape(parameter.shape, sharding, tensor_parallel_size=size)
    values = np.random.default_rng(zlib.crc32(name.encode())).uniform(-0.3, 0.3, shape)
    shard = take_shard(torch.from_numpy(values), sharding, rank=stage.groups.tp.rank(), tensor_parallel_size=size)
    parameter.add_(shard)


def _sample_losses(case: GradientCase, stages: Mapping[str, UnitStage], index: int) -> dict[str, torch.Tensor]:
    text, lengths = case.source.text(index), case.source.lengths(index)
    embeddings, rows, ends, generated = [], [], [], []
    encoded: list[tuple[str, torch.Tensor]] = []
    items: list[ItemSpan] = []
    for item, start, length in text.item_starts:
        unit = lengths.items[item].unit
        if case.graph.unit(unit).role is Role.GENERATOR:
            generated.append((unit, start, item, len(encoded)))
            continue
        unit, output = _encode(case, stages, index, item)
        embeddings.append(output)
        encoded.append((unit, output))
        rows.append(torch.arange(start, start + length))
        image = case.graph.unit(unit).image
        columns = case.source.item_grid(index, item)[1] if image is not None and image.has_row_ends else length
        ends.append(torch.arange(length) % (columns + 1) == columns)
        items.append(ItemSpan(start, length, unit))
    target_rows = torch.from_numpy(text.is_target).nonzero()[:, 0]
    batch = PackedInput(
        (lengths.num_tokens,),
        _positions(case, index),
        token_ids=torch.from_numpy(text.token_ids),
        item_rows=torch.cat(rows) if rows else None,
        item_ends=torch.cat(ends) if ends else None,
        items=tuple(items),
        target_rows=target_rows,
        targets=torch.from_numpy(text.labels)[target_rows],
        generator_rows=torch.tensor([row for unit, start, _, _ in generated for row in _condition_rows(case, unit, start)])
        if generated
        else None,
    )
    backbone = case.graph.backbone.name
    output = stages[backbone](None, batch, stack_items(embeddings))
    losses = {backbone: output.loss_sum}
    row = 0
    for unit, _, item, num_before in generated:
        sources, described = case.graph.upstream(unit), case.graph.unit(unit)
        told = output.conditions[row : row + described.num_conditions]
        row += described.num_conditions
        given = [(sources.index(name), tokens) for name, tokens in encoded[:num_before] if name in sources]
        given.append((sources.index(backbone), told[:-1]))
        image = _image_input(case, index, item, unit)
        made = replace(image, condition_rows=torch.zeros(image.num_tokens, dtype=torch.long))
        conditions = stack_items([told[-1:], *(tokens for _, tokens in given)])
        if case.graph.takes_tokens(unit):
            made = _beside(made, [(source, len(tokens)) for source, tokens in given], llm=sources.index(backbone))
        if described.flow is not None:
            path = draw_path(
                [Atom(index, item)],
                described.flow,
                num_tokens=made.lengths,
                num_patches=image.lengths,
                num_values=image.patches.shape[1],
                seed=SEED,
            )
            made = replace(made, path=path)
        losses[unit] = losses.get(unit, 0.0) + stages[unit](None, made, conditions).loss_sum
    return losses


def _positions(case: GradientCase, index: int) -> torch.Tensor:
    """Of a sample's tokens in the LLM; M-RoPE's rule itself is held against transformers' models."""
    if not case.graph.backbone.transformer.rotary_sections:
        return torch.arange(case.source.lengths(index).num_tokens)
    images = {unit.name: unit.image for unit in case.graph.encoders if unit.image is not None}
    return pack_language_microbatch([Atom(index, -1)], source=case.source, images=images)[0].positions


def _condition_rows(case: GradientCase, unit: str, start: int) -> list[int]:
    """The LLM's tokens that condition an item: the last ones up to the one that opens it, or the first of all."""
    return [max(0, start - back) for back in reversed(range(case.graph.unit(unit).num_conditions))]


def _beside(made: PackedInput, given: list[tuple[int, int]], *, llm: int) -> PackedInput:
    """An image that is made beside tokens of encoders; given: which encoder, and how many tokens, in the order of the items."""
    count = sum(number for _, number in given)
    places = [(-1 - line, token) for line, (_, number) in enumerate(given) for token in range(number)]
    return replace(
        made,
        lengths=(count + made.num_tokens,),
        positions=torch.cat((torch.tensor(places, dtype=made.positions.dtype).reshape(-1, 2), made.positions)),
        condition_rows=torch.cat((1 + torch.arange(count), made.condition_rows)),
        item_sources=torch.tensor([llm, *(source for source, number in given for _ in range(number))]),
        target_rows=count + torch.arange(made.num_tokens),
    )


def _encode(case: GradientCase, stages: Mapping[str, UnitStage], index: int, item: int) -> tuple[str, torch.Tensor]:
    """The last encoder that an item passes through, and what it gives."""
    graph, lengths = case.graph, case.source.lengths(index).items[item]
    outputs: dict[str, torch.Tensor] = {}
    for name in lengths.units:
        sources = graph.upstream(name)
        if not sources:
            outputs[name] = stages[name](None, _image_input(case, index, item, name))
            continue
        counts = [len(outputs[source]) for source in sources]
        starts = [0 if graph.unit(name).join == "features" else sum(counts[:number]) for number in range(len(counts))]
        batch = PackedInput(
            (lengths.inside(name).num_tokens,),
            torch.arange(lengths.inside(name).num_tokens),
            item_rows=torch.cat([start + torch.arange(count) for start, count in zip(starts, counts, strict=True)]),
            item_sources=torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
        )
        outputs[name] = stages[name](None, batch, stack_items(outputs[source] for source in sources))
    return name, outputs[name]


def _image_input(case: GradientCase, index: int, item: int, name: str) -> PackedInput:
    unit = case.graph.unit(name)
    packed = pack_encoder_microbatch([Atom(index, item)], source=case.source, item_input=unit.item_input, with_pixels=True)
    if unit.image is not None and unit.image.latents is not None:
        packed = replace(packed, patches=latents_of(unit.image, packed.patches, packed.positions))
    return packed.with_windows_of(unit)


def latents_of(image: ImageInput, pixels: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What diffusers' autoencoder makes of an image, [num_patches, num_patch_values], patch by patch."""
    from diffusers import AutoencoderKL

    assert image.latents is not None
    vae = AutoencoderKL.from_pretrained(image.latents.directory, low_cpu_mem_usage=False).double()
    side, channels, scale = image.patch_size, image.in_channels, image.patch_size // image.latents.factor
    rows, columns = (int(number) + 1 for number in places.amax(0))
    whole = torch.zeros(1, channels, rows * side, columns * side, dtype=torch.float64)
    for patch, (row, column) in zip(pixels, places.tolist(), strict=True):
        values = (patch.float() / 255 - image.mean[0]) / image.std[0]
        whole[0, :, row * side : (row + 1) * side, column * side : (column + 1) * side] = values.view(channels, side, side)
    with torch.no_grad():
        latents = (vae.encode(whole).latent_dist.mean[0] - vae.config.shift_factor) * vae.config.scaling_factor
    return torch.stack(
        [latents[:, row * scale :, column * scale :][:, :scale, :scale].flatten() for row, column in places.tolist()]
    )
