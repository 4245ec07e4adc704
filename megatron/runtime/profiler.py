"""Times real layers on the current device: forward, input gradient and weight gradient separately, for multimodal/cost to fit.

Also what a step takes beside its layers (executor, optimizer), and the device's peak for MFU, by a table or a product.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron.runtime import platform
from megatron.runtime.communication.units import Membership
from megatron.runtime.emulation.emulated_run import emulated_session, emulated_step
from megatron.runtime.execution.activation_store import SavedTensors
from megatron.runtime.gradients.gradients import UnitGradients, clip_gradients, global_gradient_norm, wrap_in_gradient_buffers
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config, build_unit_optimizers
from megatron.runtime.step.step import Step
from multimodal.attention.packed_lengths import PackedLengths
from multimodal.cost.cluster import peak_tflops
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.seconds.layer_curves import PackedSize
from multimodal.cost.step_costs import ComputeCost
from multimodal.model.initialization import initialize_parameters
from multimodal.model.layers.layer_kind import HeadOutput
from multimodal.model.layers.registry import kind_of
from multimodal.model.stage_input import PackedInput
from multimodal.model.transformer_config import BuildOptions
from multimodal.model.unit_stage import UnitStage
from multimodal.model.weight_gradient_queue import WeightGradientQueue, defer_weight_gradients
from multimodal.plan.plans_of_sizes import plan_colocated
from multimodal.values.assignment import Assignment, Atom
from multimodal.values.model_graph import ModelGraph, Role


class LayerInput(NamedTuple):
    """Arguments of a stage of one layer."""

    hidden: Tensor | None
    batch: PackedInput
    item_embeddings: Tensor | None = None

    @property
    def differentiable(self) -> Tensor | None:
        """The tensor whose gradient is the input gradient; None if only weights have gradients."""
        return self.hidden if self.hidden is not None else self.item_embeddings


def synthetic_input(stage: UnitStage, *, num_tokens: int, num_sequences: int = 1) -> LayerInput:
    """Return random inputs for a stage of one layer.

    num_tokens: counted tokens, as `counted_tokens` of multimodal/cost counts them: those that leave an encoder's projector, the
    targets of the LLM's head, else the tokens of the unit; a multiple of num_sequences, which have equal lengths.
    """
    unit, (index,) = stage.unit, stage.layer_range
    kind = kind_of(unit, index)
    if unit.role is Role.ENCODER and LAYER_KINDS[unit.layers[index]].counts == "leaving":
        num_tokens *= unit.merge_factor
    length = num_tokens // num_sequences
    positions = torch.arange(length).repeat(num_sequences)
    if unit.audio is not None:
        positions = torch.stack((positions, torch.full_like(positions, 2), torch.zeros_like(positions)), dim=1)
    elif not unit.is_causal:
        positions = torch.stack((positions // 16, positions % 16), dim=1)
    whole = PackedInput((length,) * num_sequences, positions).with_windows_of(unit)
    whole = whole.map_tensors(lambda tensor: tensor.to(torch.cuda.current_device()))
    parts, item_embeddings = kind.random_input(stage.context, num_tokens=num_tokens, num_sequences=num_sequences)
    hidden = None
    if not stage.is_first:
        width = stage.context.graph.width_behind(unit.name, index - 1)
        hidden = stage.context.random(stage.num_rows(num_tokens), 1, width).requires_grad_()
    return LayerInput(hidden, replace(whole, **parts), item_embeddings)


_EVICTING = torch.zeros(4 * 2**20, dtype=torch.uint8)
"""Larger than a core's own cache, whose contents it replaces."""


class LayerTimes(NamedTuple):
    """Seconds of one layer's computations at one size, each the median of all repetitions."""

    forward: float
    input_gradient: float
    """0 if a layer's input has no gradient (embeddings): then the whole backward counts as weight gradient."""
    weight_gradient: float
    attention: float
    """Core attention's forward, a part of `forward`; 0 for layers without attention."""


def build_layer(
    graph: ModelGraph, unit: str, kind: str, *, groups: ProcessGroupCollection, options: BuildOptions, vocab_size: int
) -> UnitStage:
    """Build a stage of the unit's first layer of a kind, with trainable weights or adapters; vocab_size: padded."""
    index = graph.unit(unit).layers.index(kind)
    layers = range(index, index + 1)
    stage = UnitStage(graph=graph, unit_name=unit, layers=layers, groups=groups, options=options, vocab_size=vocab_size)
    initialize_parameters(stage, seed=0)
    if not stage.unit.adapted_modules(index):
        stage.layers.requires_grad_(True)
    return stage.train()


def time_layer(
    stage: UnitStage, *, sizes: Sequence[PackedSize], num_repetitions: int, min_seconds: float = 0.0
) -> Mapping[PackedSize, LayerTimes]:
    """Time a stage of one layer on inputs of each size, in counted tokens (see `synthetic_input`).

    All sizes take turns, so that a temporary slowdown affects all of them; num_repetitions turns, and more until `min_seconds`
    have passed. As in training, gradients go to buffers, and before every call a core's own cache is filled with other data.
    """
    wrap_in_gradient_buffers(stage, groups=stage.groups, is_sharded=False)
    runs = {size: _LayerRun(stage, size) for size in dict.fromkeys(sizes)}
    for run in runs.values():
        run.once()  # not measured: allocations, gradient buffers, choices of kernels
    end = time.perf_counter() + min_seconds
    times: dict[PackedSize, list[LayerTimes]] = {size: [] for size in runs}
    while len(times[sizes[0]]) < num_repetitions or time.perf_counter() < end:
        for size, run in runs.items():
            times[size].append(run.once())
    return {size: LayerTimes(*map(median, zip(*turns, strict=True))) for size, turns in times.items()}


class _LayerRun:
    def __init__(self, stage: UnitStage, size: PackedSize) -> None:
        self._stage, self._given = stage, synthetic_input(stage, **size._asdict())
        self._attend = _core_attention(stage, size)

    def once(self) -> LayerTimes:
        """Run forward, input and weight gradient, core attention; rotary angles, once for all layers, count with embeddings."""
        stage, given, queue = self._stage, self._given, WeightGradientQueue()
        outputs: list[Tensor] = []
        storages = frozenset(parameter.untyped_storage().data_ptr() for parameter in stage.parameters())

        def compute() -> None:
            with SavedTensors(storages) if platform.device().type == "cpu" else nullcontext(), defer_weight_gradients(queue):
                output = stage(*given)
            outputs.append(output.loss_sum if isinstance(output, HeadOutput) else output)

        forward = _cold_seconds_of(compute)
        gradient = torch.ones_like(outputs[0])
        backward = _cold_seconds_of(lambda: torch.autograd.backward(outputs[0], gradient))
        queued = _cold_seconds_of(queue.compute)
        if given.differentiable is None:
            backward, queued = 0.0, backward + queued
        else:
            given.differentiable.grad = None
        if not stage.is_first:
            forward = max(0.0, forward - seconds_of(lambda: stage.frequencies(given.batch)))
        return LayerTimes(forward, backward, queued, seconds_of(self._attend) if self._attend else 0.0)


def _core_attention(stage: UnitStage, size: PackedSize) -> Callable[[], None] | None:
    """Return a call of a layer's core attention alone, as often as its forward calls it; None if it has none."""
    (index,) = stage.layer_range
    attention = stage.core_attention(index)
    if attention is None:
        return None
    shape, tp = stage.unit.transformer, stage.groups.tp.size()
    device, dtype = torch.cuda.current_device(), stage.options.params_dtype
    heads = (shape.num_attention_heads, shape.query_groups, shape.query_groups)
    lengths = (size.num_tokens // size.num_sequences,) * size.num_sequences
    inputs = [torch.randn(size.num_tokens, 1, number // tp, shape.head_channels, device=device, dtype=dtype) for number in heads]

    def attend() -> None:
        with torch.no_grad():
            attention(*inputs, None, packed_seq_params=PackedLengths(lengths=lengths))

    return attend


def _cold_seconds_of(run: Callable[[], None]) -> float:
    if platform.device().type == "cpu":
        _EVICTING.add_(1)
    return seconds_of(run)


def seconds_of(run: Callable[[], object]) -> float:
    """Time a call: until the device has finished it or, if one core computes alone, by that core's own time."""
    _synchronize()
    start = _clock()
    run()
    _synchronize()
    return _clock() - start


def _clock() -> float:
    """Return the time; if one core computes alone, without the machine's other work."""
    is_one_core = platform.device().type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if is_one_core else time.perf_counter()


def _synchronize() -> None:
    if platform.device().type == "cuda":
        torch.cuda.synchronize()


_PRODUCT_SIZE = 512
_NUM_PRODUCTS = 8


def find_peak_tflops(dtype: torch.dtype) -> float:
    """Return the peak TFLOP/s of this process's device; on a CPU its share while other ranks compute at the same time."""
    if torch.cuda.is_available():
        known = peak_tflops(torch.cuda.get_device_name(), str(dtype).removeprefix("torch."))
        if known is not None:
            return known
    matrix = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device=platform.device()).to(dtype)
    best_seconds = float("inf")
    for _ in range(_NUM_PRODUCTS):
        _synchronize()
        start = time.perf_counter()
        matrix @ matrix
        _synchronize()
        best_seconds = min(best_seconds, time.perf_counter() - start)
    return 2.0 * _PRODUCT_SIZE**3 / best_seconds / 1e12


_FEW, _MANY = 4, 20
"""Microbatches of the two steps whose difference gives the time of one computation."""
_NUM_TOKENS = 8


def time_runtime(graph: ModelGraph, *, num_repetitions: int) -> tuple[float, float]:
    """Return the seconds of a step without computations, and those that each forward or backward adds.

    All units run on this one rank, with the real executor, broker and gradient buffers, and with stages that compute nothing.
    Messages between ranks are not measured. torch.distributed must be initialised with one rank and any backend.
    """
    session = emulated_session(graph, plan_colocated(graph, sizes={}, world_size=1), cost=lambda action: ComputeCost(0.0))
    owners = [unit.name for unit in graph.item_encoders]
    encoders = {unit.name: owners.index(graph.item_units(unit.name)[0]) for unit in graph.encoders}
    steps = {}
    for count in (_FEW, _MANY):  # one sample per microbatch, and an item of every other unit
        atoms = {unit.name: [(Atom(sample, encoders.get(unit.name, -1)),) for sample in range(count)] for unit in graph.units}
        assignment = Assignment({name: (tuple(of_unit),) for name, of_unit in atoms.items()})
        schedule = session.schedules().schedule(assignment)
        steps[count] = emulated_step(schedule, assignment, num_tokens=_NUM_TOKENS, rank=0)

    def run(step: Step) -> None:
        session.forward_backward(step)
        session.finish_gradients()

    seconds = {count: median(seconds_of(partial(run, step)) for _ in range(num_repetitions)) for count, step in steps.items()}
    num_more = 2 * len(graph.units) * (_MANY - _FEW)
    slope = max(0.0, seconds[_MANY] - seconds[_FEW]) / num_more
    return max(0.0, seconds[_FEW] - slope * 2 * len(graph.units) * _FEW), slope


def time_update(stage: UnitStage, *, groups: ProcessGroupCollection, num_repetitions: int) -> tuple[PackedSize, float]:
    """Return the number of weights that a stage trains, as the size of a fit, and the seconds of updating them as trainers do."""
    if not any(parameter.requires_grad for parameter in stage.parameters()):
        return PackedSize(0), 0.0
    dtype = stage.options.params_dtype
    membership = Membership(stage.unit.name, 0, 0, groups)
    gradients = UnitGradients({0: stage}, membership=membership, is_sharded=dtype != torch.float64)
    adamw = build_optimizer_config(lr=0.0, min_lr=0.0, weight_decay=0.01, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0, dtype=dtype)
    ((_, optimizer),) = build_unit_optimizers(gradients, config=adamw)

    def update() -> None:
        optimizer.prepare_grads()
        norm = global_gradient_norm([(optimizer, True)], device=platform.device())
        clip_gradients(optimizer.get_parameters(), norm=norm, max_norm=1.0)
        optimizer.step_with_ready_grads()

    seconds_of(update)  # not measured: the optimizer's state is made
    num_weights = sum(parameter.numel() for parameter in stage.parameters())
    return PackedSize(num_weights), median(seconds_of(update) for _ in range(num_repetitions))
