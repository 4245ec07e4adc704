"""Megatron's own `pretrain()` on a text GPT: flags, logging, evaluation and checkpoints are its own; nothing knows of Braid."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX
from megatron.core.pipeline_parallel import bridge_communicator
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.training import arguments, get_args, global_vars, initialize, pretrain, training
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.runtime import patches
from tests.distributed import pretrain_mimo
from tests.distributed.drop_in_training import IMAGE_SIZE, build_llava, fill_weights
from tests.distributed.megatron_checkpoint import writing_without_psutil
from tests.distributed.mimo_training import Gloo

SEQUENCE_LENGTH, VOCABULARY = 8, 32
_FLAGS = f"""
pipeline-model-parallel-size=2 distributed-backend=gloo transformer-impl=local tokenizer-type=NullTokenizer
num-layers=4 hidden-size=16 num-attention-heads=4 position-embedding-type=rope attention-dropout=0.0 hidden-dropout=0.0
seq-length={SEQUENCE_LENGTH} max-position-embeddings={SEQUENCE_LENGTH} vocab-size={VOCABULARY} dataloader-type=external
micro-batch-size=1 global-batch-size=8 train-iters=4 eval-interval=2 eval-iters=1 log-interval=1 lr=0.01 clip-grad=0.5
"""
FLAGS = dict(flag.split("=") for flag in _FLAGS.split())
SWITCHES = "no-gradient-accumulation-fusion no-persist-layer-norm no-masked-softmax-fusion no-bias-gelu-fusion"
SWITCHES += " no-bias-dropout-fusion use-cpu-initialization no-load-rng no-rope-fusion"


@dataclass(frozen=True)
class PretrainResult:
    logged: list[dict[str, float]]
    """What Megatron logged of each step and evaluation: losses, gradient norms, learning rates."""
    weights: dict[str, np.ndarray]


_CALLS_OF_CUDA = ("empty_cache", "synchronize", "set_device", "reset_peak_memory_stats", "get_rng_state", "set_rng_state")


class _CudaOnCpu(TorchFunctionMode):
    """Makes tensors for device "cuda" on the CPU, which name the type that clipping asserts."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is Tensor.type and len(args) == 1 and not isinstance(args[0], torch.nn.Parameter):
            return function(*args).replace("torch.", "torch.cuda.")
        return args[0] if function is Tensor.cuda else function(*args, **kwargs)


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Let `pretrain` run without CUDA, which it asserts; dropout is zero."""
    do_nothing = {name: lambda *_, **__: None for name in _CALLS_OF_CUDA}
    with ExitStack() as stack:
        # With PYTORCH_NVML_BASED_CUDA_CHECK, which processes that are forked from set, one device would mean CUDA.
        for name, value in {**do_nothing, "device_count": lambda: 1, "is_available": lambda: False}.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch.nn.Module, "cuda", lambda module, *_: module))
        stack.enter_context(patch.object(torch.cuda, "Stream", _Stream))
        stack.enter_context(patch.object(torch.cuda, "current_stream", _Stream))
        stack.enter_context(patch.object(torch.cuda, "stream", lambda _: nullcontext()))
        stack.enter_context(patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()))
        stack.enter_context(patch.object(CudaRNGStatesTracker, "add", lambda *_: None))
        without_cuda = partial(initialize.initialize_megatron, allow_no_cuda=True)
        stack.enter_context(patch.object(training, "initialize_megatron", without_cuda))
        stack.enter_context(patch.object(initialize, "_compile_dependencies", lambda: None))  # of its indexed data sets
        stack.enter_context(patch.object(arguments, "get_device_arch_version", lambda: 10))
        stack.enter_context(patch.object(training, "set_jit_fusion_options", lambda **_: None))
        stack.enter_context(patch.dict(training._STARTUP_TIMESTAMPS, program_start=None))  # on ranks that trained before
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        stack.enter_context(patch.object(bridge_communicator, "dist", Gloo()))
        stack.enter_context(writing_without_psutil())
        stack.enter_context(_CudaOnCpu())
        yield


class _Stream:
    def wait_stream(self, _: Any) -> None:
        pass


def pretrain_model(
    flags: dict[str, Any],
    schedule: str | None,
    has_images: bool = False,
    mimo: pretrain_mimo.MimoSizes | None = None,
    call: Callable[..., None] = pretrain,
    **more: Any,
) -> PretrainResult:
    """Run `pretrain()` on a Braid schedule, or, with None, on Megatron's own functions.

    has_images: train LLaVAModel, with the encoder where the plan has it; mimo: train MimoModel so; call: gets the arguments of
    `pretrain`; more: of `patches.apply`.
    """
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    destroy_rerun_state_machine()
    global_vars.unset_global_variables()
    logged: list[dict[str, float]] = []
    models: list[Any] = []
    argv = ["pretrain", *(f"--{name}" for name in SWITCHES.split())]
    for name, value in {**FLAGS, **flags}.items():
        argv += [f"--{name}", *str(value).split()] if value is not True else [f"--{name}"]
    groups = patches.apply(schedule=schedule, **more) if schedule is not None else {}
    parts = {"add_encoder": "vision" in groups, "add_decoder": "llm" in groups} if groups else {}
    try:
        with patch.object(sys, "argv", argv), _on_cpu(), _recorded(logged):
            if mimo is not None:
                _pretrain_mimo(mimo, models)
            else:
                arguments.parse_and_validate_args()
                providers = {"model_provider": partial(_build_model, models, parts if has_images else None)}
                step = _forward_with_images if has_images else _forward_step
                config = pretrain_cfg_container_from_args(get_args())
                call(config, _open_data, ModelType.encoder_or_decoder, step, **providers)
    finally:
        patches.undo()
        BridgeCommunicator.destroy_bridge_pgs()
        BridgeCommunicator.destroy_broadcast_pgs()
        parallel_state.destroy_model_parallel()
    weights = {
        f"{place} {n}": p.detach().numpy().copy() for place, model in enumerate(models) for n, p in model.named_parameters()
    }
    return PretrainResult(logged, weights)


def _pretrain_mimo(sizes: pretrain_mimo.MimoSizes, models: list[Any]) -> None:
    args = arguments.parse_args()
    world, args.world_size = args.world_size, sizes.llm_dp * sizes.llm_pp
    arguments.validate_args(args)
    args.world_size = world
    args.padded_vocab_size = pretrain_mimo.VOCABULARY
    global_vars.set_global_variables(args, build_tokenizer=False)
    if sizes.shares_ranks:
        parallel_state.initialize_model_parallel()
    elif parallel_state._GLOBAL_MEMORY_BUFFER is None:  # without a plan
        parallel_state._set_global_memory_buffer()
    topology = pretrain_mimo.MimoTopology(sizes)
    model = pretrain_mimo.MimoBuildConfig(_topology=topology, post_wrap_hooks=[models.extend])
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        topology.open_data,
        ModelType.encoder_or_decoder,
        pretrain_mimo.forward_step,
        skip_model_parallel_init=True,
        p2p_communicator=topology.communicator,
        pg_collection=topology.collection,
    )


@contextmanager
def _recorded(logged: list[dict[str, float]]) -> Iterator[None]:
    step, evaluate = training.train_step, training.evaluate

    def record_step(*args: Any, **kwargs: Any) -> Any:
        found = step(*args, **kwargs)
        losses, norm = found[0], found[5]
        logged.append({name: float(value) for name, value in losses.items()} | {"norm": float(norm)})
        return found

    def record_evaluation(*args: Any, **kwargs: Any) -> Any:
        found = evaluate(*args, **kwargs)
        logged.append({name: float(value) for name, value in (found[0] or {}).items()})
        return found

    with patch.object(training, "train_step", record_step), patch.object(training, "evaluate", record_evaluation):
        yield


def _build_model(
    models: list[Any],
    parts: dict[str, bool] | None,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    args = get_args()
    if parts is not None:
        config = core_transformer_config_from_args(args)
        config.variable_seq_lengths = True
        model = build_llava(parts, config, VOCABULARY, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
        fill_weights(model, vp_stage)
        models.append(model)
        return model
    ends = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage, "pg_collection": pg_collection}
    sizes = {"vocab_size": args.padded_vocab_size, "max_sequence_length": SEQUENCE_LENGTH, "position_embedding_type": "rope"}
    sizes["share_embeddings_and_output_weights"] = not args.untie_embeddings_and_output_weights
    model = GPTModel(config or core_transformer_config_from_args(args), get_gpt_layer_local_spec(), **sizes, **ends)
    models.append(model)
    return model


def _open_data(_: Any, vp_stage: int | None = None) -> tuple[Iterator[Any], ...]:
    """Return the iterators of training, validation and test, which go on where a checkpoint left off."""
    args, rank = get_args(), parallel_state.get_data_parallel_rank()
    consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    return tuple(_read(kind, rank, number // args.data_parallel_size) for kind, number in enumerate(consumed))


_open_data.is_distributed = True  # type: ignore[attr-defined]


def _read(kind: int, rank: int, first: int) -> Iterator[Tensor]:
    for index in count(first):
        yield torch.from_numpy(np.random.default_rng((kind, rank, index)).integers(VOCABULARY, size=(2, 1, SEQUENCE_LENGTH)))


def first_token(tokens_and_labels: Tensor) -> int:
    return int(tokens_and_labels[0, 0, 0])


def _forward_step(batches: Iterator[Tensor], model: Any) -> Any:
    tokens, labels = next(batches)
    positions = torch.arange(SEQUENCE_LENGTH).expand_as(tokens)
    is_hidden = torch.ones(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool).triu(1)
    return model(tokens, positions, is_hidden, labels=labels), pretrain_mimo.loss_of_tokens


def _forward_with_images(batches: Iterator[Tensor], model: Any) -> Any:
    tokens, labels = next(batches)[..., :3]
    tokens = tokens.clone()
    tokens[0, 1] = DEFAULT_IMAGE_TOKEN_INDEX
    pixels = torch.arange(3 * IMAGE_SIZE**2, dtype=torch.float32).add(labels[0, 0]).sin().view(1, 3, IMAGE_SIZE, IMAGE_SIZE)
    is_hidden = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
    is_target = torch.ones(1, 3)
    losses, _ = model(pixels, tokens, torch.arange(3)[None], is_hidden, labels=labels, loss_mask=is_target)
    return losses, pretrain_mimo.loss_of_tokens
