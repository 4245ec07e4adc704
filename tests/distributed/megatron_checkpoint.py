"""Trains one of megatron-core's models, writes checkpoints by its own dist_checkpointing, and holds others against them."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
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
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.models.multimodal import llava_model
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from megatron.runtime.checkpoint.megatron_weights import find_folder
from tests.distributed.drop_in_training import megatron_groups
from tests.distributed.megatron_training import megatron_without_cuda

VOCABULARY = 384
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
GATED |= {"normalization": "RMSNorm"}
RATES = {"lr": 1e-2, "weight_decay": 0.1}


def build(kind: str, dtype: torch.dtype = torch.float32) -> Module:
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
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
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    projector = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=1, ffn_hidden_size=48, use_cpu_initialization=True
    )
    if kind == "mimo":
        inner = {"vocab_size": VOCABULARY, "max_sequence_length": 64, "position_embedding_type": "rope"}
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        seen = {"img_h": 28, "img_w": 28, "patch_dim": 14, "ln_pre_impl": WrappedTorchNorm}
        seen |= {"transformer_config": vision, "transformer_layer_spec": get_vit_layer_with_local_spec()}
        encoder = ModuleSpec(CLIPViTModel, params=seen)
        way_in = {"config": projector, "submodules": parts, "projector_type": "mlp", "input_size": 32}
        projections = [ModuleSpec(MultimodalProjector, params=way_in)]
        modalities = {
            name: ModuleSpec(VisionModalitySubmodules, submodules={"encoders": {name: encoder}, "input_projections": projections})
            for name in ("left", "right")
        }
        own = ModuleSpec(GPTModel, params={"config": language, "transformer_layer_spec": spec, **inner})
        return MimoModel(MimoModelConfig(language_model_spec=own, modality_submodules_spec=modalities))
    with patch.object(llava_model, "CLIPViTModel", partial(CLIPViTModel, ln_pre_impl=WrappedTorchNorm)):
        llm = (language, get_gpt_layer_local_spec(normalization="RMSNorm"), VOCABULARY, 64)
        eye = (vision, get_vit_layer_with_local_spec(), True, projector, parts)
        sizes = {"img_h": 28, "img_w": 28, "patch_dim": 14}
        return llava_model.LLaVAModel(*llm, *eye, **sizes, language_position_embedding_type="rope")


@contextmanager
def megatron(tensor_size: int = 1, pipeline_size: int = 1, expert_size: int = 1) -> Iterator[None]:
    groups = megatron_groups(tensor_size, pipeline_size, expert_model_parallel_size=expert_size)
    with groups, megatron_without_cuda(), writing_without_psutil(), patch.object(Tensor, "cuda", lambda tensor: tensor):
        yield


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
    metadata = {"non_homogeneous_layers": kind == "tied", "dp_cp_group": parallel_state.get_data_parallel_group()}
    state: dict[str, Any] = model.sharded_state_dict(metadata=metadata)
    return {key: value for key, value in state.items() if "_extra_state" not in key}


def encode_image(folder: Path, pixels: Tensor) -> Tensor:
    """Return what LLaVAModel makes of an image, [3, height, width]: [num_patches, hidden_size of the LLM]."""
    with megatron():
        model: Any = Trained("llava", torch.float32).load(folder).model.eval()
        for layer in model.vision_model.decoder.layers:  # local layers of 0.16 mask as in an LLM, which later versions mend
            layer.self_attention.attn_mask_type = AttnMaskType.no_mask
            layer.self_attention.core_attention.scale_mask_softmax.attn_mask_type = AttnMaskType.no_mask
        patches = model.vision_model(pixels[None])[:, model.vision_model.class_token_len :]
        projected: Tensor = model.vision_projection(patches.transpose(0, 1).contiguous())[:, 0]
        return projected.detach()


class Trained:
    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        self.kind, self.model = kind, build(kind, dtype).to(dtype)
        with torch.no_grad():
            for parameter in self.model.parameters():  # replicated ones are written by the first rank that has them
                parameter.normal_()
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.wrapped = DistributedDataParallel(self.model.config, ddp, self.model)
        config = OptimizerConfig(
            optimizer="adam",
            **RATES,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,
        )
        self.optimizer = get_megatron_optimizer(config, [self.wrapped])

    def state(self, kind: str, *, is_loading: bool) -> dict[str, Any]:
        """Return what a checkpoint of it has, as Megatron's --dist-ckpt-optim-fully-reshardable writes it."""
        model = sharded(self.model, kind)
        form = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading, metadata=form)
        return {"model": model, "optimizer": optimizer, "iteration": 7}

    def load(self, folder: Path) -> "Trained":
        found = dist_checkpointing.load(
            self.state("" if folder.name in ("back", "next") else self.kind, is_loading=True), str(find_folder(folder))
        )
        self.model.load_state_dict(found["model"], strict=False)
        optimizer = found["optimizer"]  # of experts that ranks share it has two parts
        self.optimizer.load_state_dict({**optimizer.get(0, {}), **optimizer})
        return self

    def step(self) -> None:
        """Step by gradients that follow from the weights alone."""
        optimizers = [each.optimizer for each in chained(self.optimizer)]
        take_step(self.model.parameters(), optimizers, self.optimizer.prepare_grads, self.optimizer.step_with_ready_grads)

    def values(self) -> dict[str, Tensor]:
        found = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        for number, each in enumerate(chained(self.optimizer)):
            found[f"step {number}"] = torch.tensor(float(each.state_dict()["optimizer"]["param_groups"][0]["step"]))
            for place, parameter in enumerate(each.get_parameters()):
                state = each.optimizer.state[parameter]
                found |= {f"{number} {place} {kind}": state[kind] for kind in ("exp_avg", "exp_avg_sq")}
                found[f"{number} {place} main"] = parameter.detach()
        return found


def chained(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def take_step(parameters: Iterable[Tensor], optimizers: Iterable[Any], *actions: Callable[[], Any]) -> None:
    """Set gradients that follow from the weights alone, and the rates that a scheduler would set, and step."""
    for parameter in parameters:
        parameter.main_grad.copy_(parameter.detach().float().sin())  # type: ignore[attr-defined]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group |= {**RATES, "weight_decay": RATES["weight_decay"] * group["wd_mult"]}
    for action in actions:
        action()


def train(kind: str, path: Path, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """Train two steps, write a rank's part of iter_0000007 into a folder, train a third step, and write `third` in it."""
    may_have_children = patch.dict(multiprocessing.current_process()._config, daemon=False)  # type: ignore[attr-defined]
    with megatron(*sizes), may_have_children:
        torch.manual_seed(dist.get_rank())
        trained = Trained(kind, dtype)
        for number, name in enumerate(("", "iter_0000007", "third/iter_0000008")):
            trained.step()
            if number:
                (path / name).mkdir(parents=True, exist_ok=True)
                dist_checkpointing.save(trained.state(kind, is_loading=False), str(path / name))
                ((path / name).parent / "latest_checkpointed_iteration.txt").write_text(str(6 + number))


def compare_trained(kind: str, pairs: Iterable[tuple[Path, Path]], dtype: torch.dtype) -> None:
    """Hold what a model and its optimizer get from a folder against what they get from another."""
    with megatron():
        for pair in pairs:
            first, second = (Trained(kind, dtype).load(path).values() for path in pair)
            unlike = [name for name in first if not torch.equal(first[name], second[name])]
            assert unlike == [], f"{pair}: {unlike}"
