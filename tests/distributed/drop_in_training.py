"""A training loop written against Megatron alone; whoever patches Megatron before it is called, changes what it runs on."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal import llava_model
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import transformer_block
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.runtime import patches
from megatron.runtime.platform import CpuTorch
from multimodal.model.weight_gradient_queue import WeightGradientQueue
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan

NUM_STEPS = 2
SEQUENCE_LENGTH = 6
IMAGE_SIZE = 4
MICRO_BATCH_SIZE = 2
VOCAB_SIZE = 16
LEARNING_RATE = 0.05
LOSS_SCALE = 8.0
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "perform_initialization": False, "bias_dropout_fusion": False}
PLAIN |= {"gradient_accumulation_fusion": False}
"""Options of Megatron's config without which it would draw at random, or want CUDA."""


@dataclass(frozen=True)
class LoopCase:
    """How the loop runs; ranks beyond those of one pipeline are data parallel."""

    pipeline_parallel_size: int
    num_chunks: int = 1
    tensor_parallel_size: int = 1
    num_microbatches: int = 6
    per_token_loss: bool = False
    forward_only: bool = False
    launches_sync: bool = False
    """Whether the loop gives Megatron grad_sync_func and param_sync_func (align_grad_reduce and align_param_gather)."""
    options: dict[str, Any] = field(default_factory=dict)
    """More of the config."""
    has_images: bool = False
    """True: megatron-core's LLaVAModel, whose encoder is on the first stage; some samples have an image."""
    has_engine: bool = False
    """True: linear layers and norms of Transformer Engine."""
    delays_weight_gradients: bool = False
    """Whether these compute weight gradients when asked."""
    num_layers: int | None = None
    """None: one in every chunk."""


@dataclass(frozen=True)
class LoopResult:
    losses: list[list[float]]
    """Per step what the loss function reported per microbatch."""
    gradients: dict[str, np.ndarray]
    """Reduced gradients of the last step."""
    num_synchronizations: int
    """Calls of grad_sync_func and param_sync_func."""
    forwards: list[tuple[bool | None, int]]
    """Forwards of the lane in order: whether Megatron told them to recompute all their layers, and their tokens."""
    num_deferred: int
    """Weight gradients that backwards left for later."""


def train_on_schedule(
    case: LoopCase, schedule: str | None, model: ModelGraph | None = None, plan: Plan | None = None, balance: str = "none"
) -> LoopResult:
    """Train on a Braid schedule through the drop-in, or, with None, on Megatron's own function.

    Without CUDA: Megatron's own makes tensors on device "cuda", GPTModel moves tied embeddings there, and dropout (of zero) wants
    CUDA's random states. model, plan: set up Megatron's groups in place of its `initialize_model_parallel`.
    """
    parallel_state.destroy_model_parallel()
    parts: dict[str, bool] = {}
    if schedule is not None:
        groups = patches.apply(schedule=schedule, model=model, plan=plan, balance=balance)
        parts = {"add_encoder": "vision" in groups, "add_decoder": "llm" in groups} if groups else {}
    try:
        put = WeightGradientQueue.put
        with (
            patch.object(WeightGradientQueue, "put", autospec=True, side_effect=put) as deferred,
            patch.object(schedules, "torch", CpuTorch(torch)) if schedule is None else nullcontext(),
            without_cuda(),
        ):
            return replace(train(case, parts, under_plan=model is not None), num_deferred=deferred.call_count)
    finally:
        patches.undo()


@contextmanager
def without_cuda() -> Iterator[None]:
    """Replace what layers need CUDA for: random states, copies of embeddings, and streams for offloading."""
    with (
        patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
        patch.object(Tensor, "cuda", lambda tensor: tensor),
        patch.object(transformer_block, "get_cpu_offload_context", None),
    ):
        yield


def train(case: LoopCase, parts: dict[str, bool], *, under_plan: bool = False) -> LoopResult:
    """The loop: nothing in it knows of Braid, but for the weights of replicas that a plan made unlike.

    parts: of LLaVAModel that this rank has; empty: the encoder is on the first stage.
    """
    chunks_of_rank = case.num_chunks if case.num_chunks > 1 else None
    sizes = case.tensor_parallel_size, case.pipeline_parallel_size, chunks_of_rank
    with nullcontext() if under_plan else megatron_groups(*sizes):
        chunks = build_chunks(case, parts)
        patches.copy_weights(chunks)
        num_synchronizations = connect(chunks, case)
        losses, forwards = [], []
        for step in range(NUM_STEPS):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            losses.append(_run_step(chunks, case, step, partial(forward_step, forwards)))
            if not case.forward_only:
                _update(chunks)
        return LoopResult(losses, _gradients(chunks), num_synchronizations[0], forwards, 0)


@contextmanager
def megatron_groups(*sizes: int | None, **more: int) -> Iterator[None]:
    """Have Megatron's `initialize_model_parallel` make its groups, in the place of what was left before."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(*sizes, **more)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _run_step(chunks: list[DistributedDataParallel], case: LoopCase, step: int, forward_step: Callable[..., Any]) -> list[float]:
    iterators = [microbatches(case, step) for _ in chunks]
    data = {"data_iterator": iterators, "model": chunks}
    sizes = {"num_microbatches": case.num_microbatches, "seq_length": SEQUENCE_LENGTH, "micro_batch_size": MICRO_BATCH_SIZE}
    given = data if len(chunks) > 1 else {name: each[0] for name, each in data.items()}
    how = {"forward_step_func": forward_step, "forward_only": case.forward_only}
    found = get_forward_backward_func()(**given, **sizes, **how)
    assert all(next(iterator, None) is None for iterator in iterators), "every chunk takes every microbatch"
    return [float(entry["lm loss"]) for entry in found]


def build_chunks(case: LoopCase, parts: dict[str, bool]) -> list[DistributedDataParallel]:
    sizes = {"num_layers": case.num_layers or case.pipeline_parallel_size * case.num_chunks, "ffn_hidden_size": 24}
    places = {"tensor_model_parallel_size": case.tensor_parallel_size}
    places["pipeline_model_parallel_size"] = parallel_state.get_pipeline_model_parallel_world_size()
    places["virtual_pipeline_model_parallel_size"] = case.num_chunks if case.num_chunks > 1 else None
    how = {**PLAIN, "add_bias_linear": False, "pipeline_dtype": torch.float64, "params_dtype": torch.float64}
    how |= {"calculate_per_token_loss": case.per_token_loss, **case.options}
    config = TransformerConfig(hidden_size=16, num_attention_heads=4, **sizes, **places, **how)
    config.delay_wgrad_compute = case.delays_weight_gradients
    build = partial(build_llava, parts) if case.has_images else partial(_build_gpt, case.has_engine)
    num_chunks = case.num_chunks if parts.get("add_decoder", True) else 1
    return [_build_chunk(config, build, index if num_chunks > 1 else None) for index in range(num_chunks)]


def _build_gpt(has_engine: bool, config: TransformerConfig, **ends: Any) -> GPTModel:
    layer = get_gpt_layer_with_transformer_engine_spec() if has_engine else get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    more = {"vocab_size": VOCAB_SIZE, "max_sequence_length": SEQUENCE_LENGTH, "position_embedding_type": "rope"}
    return GPTModel(config, layer, **more, **ends)


def build_llava(
    parts: dict[str, bool], config: TransformerConfig, vocab_size: int = VOCAB_SIZE, **ends: Any
) -> llava_model.LLaVAModel:
    """Return this rank's part of LLaVAModel. parts: that it has; empty: the encoder is on the first stage."""
    of_encoder = {"num_layers": 1, "tensor_model_parallel_size": config.tensor_model_parallel_size}
    of_encoder |= {"params_dtype": config.params_dtype}
    vision = TransformerConfig(hidden_size=16, num_attention_heads=4, **of_encoder, **PLAIN)
    projector = TransformerConfig(hidden_size=16, ffn_hidden_size=24, num_attention_heads=1, **of_encoder, **PLAIN)
    encoder_layer = get_vit_layer_with_local_spec()
    encoder_layer.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    vision.vision_model_type, config.language_model_type = "clip", "llama"
    with patch.object(llava_model, "CLIPViTModel", partial(CLIPViTModel, ln_pre_impl=WrappedTorchNorm)):
        parts = {"add_encoder": ends["pre_process"]} | parts | ends
        parts |= {"img_h": IMAGE_SIZE, "img_w": IMAGE_SIZE, "patch_dim": IMAGE_SIZE // 2}
        llm = (config, get_gpt_layer_local_spec(), vocab_size, SEQUENCE_LENGTH)
        way_in = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        eye = (vision, encoder_layer, True, projector, way_in)
        return llava_model.LLaVAModel(*llm, *eye, language_position_embedding_type="rope", **parts)


def _build_chunk(config: TransformerConfig, build: Callable[..., Any], vp_stage: int | None) -> DistributedDataParallel:
    model = build(
        config,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=True,
        vp_stage=vp_stage,
    ).double()
    model.model_type = ModelType.encoder_or_decoder  # as Megatron's `get_model` does
    fill_weights(model, vp_stage)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=500)
    return DistributedDataParallel(config, ddp_config, model)


def fill_weights(model: Any, vp_stage: int | None = None) -> None:
    """Give a model weights that follow from their names and their stage."""
    for name, parameter in model.named_parameters():
        is_tied = name.endswith(("embedding.word_embeddings.weight", "output_layer.weight"))
        place = "tied" if is_tied else f"{name} {parallel_state.get_pipeline_model_parallel_rank()} {vp_stage or 0}"
        values = np.random.default_rng(zlib.crc32(place.encode())).normal(size=tuple(parameter.shape), scale=0.1)
        parameter.data.copy_(torch.from_numpy(values))


def connect(chunks: list[DistributedDataParallel], case: LoopCase) -> list[int]:
    """Tell Megatron's config about the wrapped chunks, as its training script does; returns a counter of synchronizations."""
    config, counter = chunks[0].config, [0]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = lambda loss: loss * LOSS_SCALE
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync

    def counted(function: Any) -> Any:
        def count(*args: Any) -> None:
            counter[0] += 1
            function(*args)

        return count

    if case.launches_sync:
        config.grad_sync_func = [counted(chunk.start_grad_sync) for chunk in chunks]
        config.param_sync_func = [counted(lambda _: None) for _ in chunks]
        if len(chunks) == 1:
            config.grad_sync_func, config.param_sync_func = config.grad_sync_func[0], config.param_sync_func[0]
    return counter


def _update(chunks: list[DistributedDataParallel]) -> None:
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.add_(parameter.main_grad, alpha=-LEARNING_RATE / LOSS_SCALE)


def _gradients(chunks: list[DistributedDataParallel]) -> dict[str, np.ndarray]:
    return {
        f"{index} {name}": parameter.main_grad.numpy().copy()
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def microbatches(case: LoopCase, step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for index in range(case.num_microbatches):
        random = np.random.default_rng((step, index, parallel_state.get_data_parallel_rank()))
        length = SEQUENCE_LENGTH - (index + step + parallel_state.get_data_parallel_rank()) % 4 * case.options.get(
            "variable_seq_lengths", False
        )
        tokens = torch.from_numpy(random.integers(VOCAB_SIZE, size=(2, MICRO_BATCH_SIZE, length)))
        is_target = torch.from_numpy(random.random((MICRO_BATCH_SIZE, length)) < 0.6)
        is_target[0, 0] = True
        yield tokens[0], tokens[1], is_target


def forward_step(
    forwards: list[Any], batches: Iterator[tuple[Tensor, Tensor, Tensor]], model: Any, checkpoint: bool | None = None
) -> Any:
    token_ids, labels, is_target = next(batches)
    if isinstance(model.module, llava_model.LLaVAModel):
        return _forward_with_images(token_ids[:, :3].clone(), labels[:, :3], is_target[:, :3].double(), model)
    forwards.append((checkpoint, token_ids.numel()))
    positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    is_hidden = torch.ones(1, 1, *positions.shape[1:] * 2, dtype=torch.bool).triu(1)
    return model(token_ids, positions, is_hidden, labels=labels), partial(_loss, is_target, model.config.calculate_per_token_loss)


def _forward_with_images(token_ids: Tensor, labels: Tensor, is_target: Tensor, model: Any) -> Any:
    token_ids[: 1 + token_ids[0, 0] % 2, 1] = llava_model.DEFAULT_IMAGE_TOKEN_INDEX
    is_target[:, 2] = 1  # the last token, as none before an image counts
    num_images = int((token_ids < 0).sum())
    pixels = torch.arange(num_images * 3 * IMAGE_SIZE**2, dtype=torch.float64).sin().view(-1, 3, IMAGE_SIZE, IMAGE_SIZE)
    is_hidden = torch.ones(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool).triu(1)
    positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    losses, is_counted = model(pixels, token_ids, positions, is_hidden, labels=labels, loss_mask=is_target)
    return losses, partial(_loss, is_counted, model.config.calculate_per_token_loss)


def _loss(is_target: Tensor, per_token: bool, losses: Tensor) -> tuple[Any, ...]:
    loss_sum, num_targets = (losses * is_target).sum(), is_target.sum().int()
    report = {"lm loss": loss_sum.detach().clone()}
    return (loss_sum, num_targets, report) if per_token else (loss_sum / num_targets, report)
