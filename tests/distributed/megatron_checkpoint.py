"""Writes a checkpoint of one of megatron-core's models by its own dist_checkpointing, and holds a second one against it."""

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal import llava_model
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from megatron.runtime.checkpoint.megatron_weights import find_folder
from tests.distributed.megatron_training import megatron_without_cuda

VOCABULARY = 128
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
GATED = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}


def build(kind: str) -> Module:
    """Return this rank's part of a model."""
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "pipeline_dtype": torch.float32,
    }
    config = partial(TransformerConfig, **SHAPE, **sizes, use_cpu_initialization=True)
    ends = {"pre_process": is_first, "post_process": is_last, "position_embedding_type": "rope"}
    gpt = partial(GPTModel, vocab_size=VOCABULARY, max_sequence_length=64, **ends)
    if kind == "groups":
        spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        return gpt(config(**GATED, num_query_groups=2, qk_layernorm=True), spec)
    if kind == "tied":
        return gpt(config(), get_gpt_layer_local_spec(), share_embeddings_and_output_weights=True)
    if kind == "experts":
        more = {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 48, "moe_ffn_hidden_size": 24}
        spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm")
        return gpt(config(**GATED, **more), spec)
    language, vision = config(**GATED), config(num_query_groups=4)
    vision.vision_model_type, language.language_model_type = "clip", "llama"
    projector = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=1, ffn_hidden_size=48, use_cpu_initialization=True
    )
    with patch.object(llava_model, "CLIPViTModel", partial(CLIPViTModel, ln_pre_impl=WrappedTorchNorm)):
        return llava_model.LLaVAModel(
            language,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            VOCABULARY,
            64,
            vision,
            get_vit_layer_with_local_spec(),
            True,
            projector,
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            img_h=28,
            img_w=28,
            patch_dim=14,
            language_position_embedding_type="rope",
        )


@contextmanager
def megatron(tensor_size: int = 1, pipeline_size: int = 1) -> Iterator[None]:
    """Have the groups of megatron-core, on as many ranks."""
    parallel_state.destroy_model_parallel()  # what Braid has left
    parallel_state.initialize_model_parallel(tensor_size, pipeline_size)
    try:
        with megatron_without_cuda(), writing_without_psutil(), patch.object(Tensor, "cuda", lambda tensor: tensor):
            yield
    finally:
        parallel_state.destroy_model_parallel()


@contextmanager
def writing_without_psutil() -> Iterator[None]:
    """Let megatron-core's writers, which log their memory, work where psutil is missing; else they would wait for ever.

    What they hand to their own process goes through a queue of it; for theirs they would start Python anew.
    """
    with ExitStack() as replaced:
        if not getattr(filesystem_async, "HAVE_PSUTIL", True):
            replaced.enter_context(patch.object(filesystem_async, "_process_memory", partial(int, 0)))
        if hasattr(filesystem_async, "_results_queue"):
            replaced.enter_context(patch.object(filesystem_async, "_results_queue", SimpleQueue()))
        yield


def sharded(model: Module, kind: str) -> dict[str, Any]:
    """Return a model's state dict; that of "tied" names every layer by itself."""
    state: dict[str, Any] = model.sharded_state_dict(metadata={"non_homogeneous_layers": kind == "tied"})
    return {key: value for key, value in state.items() if "_extra_state" not in key}


def loaded(kind: str, folder: Path) -> Module:
    """Return a new model with the weights of a checkpoint."""
    model = build(kind)
    state = sharded(model, "" if folder.name == "back" else kind)
    model.load_state_dict(dist_checkpointing.load(state, str(find_folder(folder))), strict=False)
    return model.eval()


@torch.no_grad()
def encode_image(folder: Path, pixels: Tensor) -> Tensor:
    """Return what LLaVAModel makes of an image, [3, height, width]: [num_patches, hidden_size of the LLM]."""
    with megatron():
        model: Any = loaded("llava", folder)
        for layer in model.vision_model.decoder.layers:  # local layers of 0.16 mask as in an LLM, which later versions mend
            layer.self_attention.attn_mask_type = AttnMaskType.no_mask
            layer.self_attention.core_attention.scale_mask_softmax.attn_mask_type = AttnMaskType.no_mask
        patches = model.vision_model(pixels[None])[:, model.vision_model.class_token_len :]
        projected: Tensor = model.vision_projection(patches.transpose(0, 1).contiguous())[:, 0]
        return projected


def write(kind: str, path: Path, tensor_size: int, pipeline_size: int) -> None:
    """Write a rank's part of iter_0000007 into a folder, as a run of Megatron does."""
    may_have_children = patch.dict(multiprocessing.current_process()._config, daemon=False)  # type: ignore[attr-defined]
    with megatron(tensor_size, pipeline_size), may_have_children:
        torch.manual_seed(dist.get_rank())
        model = build(kind)
        with torch.no_grad():
            for parameter in model.parameters():  # replicated ones are written by the first rank that has them
                parameter.normal_()
        (path / "iter_0000007").mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save({"model": sharded(model, kind), "iteration": 7}, str(path / "iter_0000007"))
        (path / "latest_checkpointed_iteration.txt").write_text("7")


def compare(kind: str, path: Path) -> None:
    """Hold what a model gets from a folder against what it gets from the folder `back` in it."""
    with megatron():
        first, second = (dict(loaded(kind, each).named_parameters()) for each in (path, path / "back"))
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert all(parameter.std() > 0.5 for parameter in first.values())
