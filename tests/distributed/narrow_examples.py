"""The models of examples/models, narrow and of few layers, with all that their layers are made of; and a step of them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.runtime.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from megatron.runtime.flags.configuration import OptimizerSettings
from megatron.runtime.gradients.unit_optimizer import build_optimizer_config
from megatron.runtime.training.trainer import build_scheduler
from multimodal.cost.layers.adapters import adapt_units
from multimodal.cost.layers.registry import linear_layers, read_model
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated
from multimodal.values.model_graph import ImageInput, ModelGraph, Transformer, Unit
from tests.distributed.dealt_case import dealt
from tests.distributed.gradient_case import GradientCase, build_session, plan_case, whole_weights
from tests.distributed.hugging_face_case import RATE
from tests.distributed.random_source import RandomSource, SampleShape

EXAMPLES = Path("examples/models")
HEAD_CHANNELS, VOCABULARY = 8, 16
OPTIONS: Mapping[str, tuple[tuple[int, int], Mapping[str, Any]]] = {
    "zero bubble": ((1, 2), {"builder": "zb-h1"}),
    "ZeRO-3": ((1, 1), {"shards_weights": True}),
    "FP8": ((1, 1), {"dtype": torch.bfloat16, "fp8_recipe": "tensorwise"}),
    "tp 2": ((2, 1), {"sequence_parallel": True}),
}
"""(Tensor parallel size, the LLM's stages), and what else a case has."""
ROWS = {
    "plain": ("cornstarch-alm-l", "cornstarch-thesis-vlm-1b", "llama-3.2-vision-11b", "orchmllm-10b", "llava-onevision-7b"),
    "LoRA": ("llava-1.5-7b", "cornstarch-thesis-alm-1b", "cornstarch-thesis-vlm-32b", "orchmllm-18b", "qwen2.5-vl-7b"),
    "zero bubble": ("qwen3-vl-30b-a3b", "cornstarch-thesis-alm-32b", "cornstarch-vlm-l", "orchmllm-84b", "qwen2.5-vl-72b"),
    "ZeRO-3": ("mllm-9b", "cornstarch-thesis-valm-1b", "entrain-llama-1b", "qwen2-audio-7b", "vit-11b-gpt-175b"),
    "FP8": ("qwen2.5-omni-7b", "cornstarch-thesis-valm-32b", "entrain-llama-3b", "mllm-72b", "vit-11b-llama-70b"),
    "tp 2": ("qwen2.5-vl-3b", "cornstarch-valm-l", "internvl3-8b", "oobleck-bert-large", "vit-11b-vit-5b-gpt-175b"),
}
"""One model of every shape, by the option that it meets; the first ones are the most unlike."""


def _narrow_transformer(shape: Transformer, num_layers: int) -> Transformer:
    """As many query heads for a key as before, and an MLP that FP8 can have if it could."""
    heads = 2 * (shape.num_attention_heads // shape.query_groups)
    return replace(
        shape,
        num_layers=num_layers,
        hidden_size=heads * HEAD_CHANNELS // (1 if shape.kv_channels is None else 2),
        num_attention_heads=heads,
        num_query_groups=shape.num_query_groups and 2,
        kv_channels=shape.kv_channels and HEAD_CHANNELS,
        ffn_hidden_size=32 + shape.ffn_hidden_size % 16,
        rotary_base=10000.0,
        rotary_sections=shape.rotary_sections and (2, 1, 1),
        init_method_std=0.1,
        experts=shape.experts and replace(shape.experts, num_experts=4, router_topk=2, ffn_hidden_size=16),
    )


def _narrow_image(image: ImageInput) -> ImageInput:
    side, grid, deep = image.image_size and 4 * image.merge_size, image.position_grid and 3, len(image.deepstack_layers)
    small = replace(image, latents=None, patch_size=2, min_pixels=4, max_pixels=1024, image_size=side, position_grid=grid)
    return replace(small, deepstack_layers=tuple(range(deep)))


def _narrow_unit(unit: Unit, num_layers: int) -> Unit:
    return replace(
        unit,
        module=None,
        transformer=_narrow_transformer(unit.transformer, num_layers),
        image=unit.image and _narrow_image(unit.image),
        audio=unit.audio and replace(unit.audio, num_mel_bins=4, max_tokens=16),
        projector_hidden_size=unit.projector_hidden_size and 32,
        vocab_size=unit.vocab_size and VOCABULARY,
    )


def narrow(graph: ModelGraph) -> ModelGraph:
    """Return the model with few layers and small widths, and with everything else that it has."""
    num_layers = max(2, *(len(unit.deepstack_layers) for unit in graph.units))
    return replace(graph, units=tuple(_narrow_unit(unit, num_layers) for unit in graph.units))


def case_of_example(name: str, option: str) -> GradientCase:
    """Layers of Transformer Engine under an option, on two ranks or on one."""
    graph = narrow(read_model(EXAMPLES / f"{name}.yaml"))
    if option == "LoRA":
        graph = adapt_units(graph, linear_layers(graph), rank=2, alpha=None, targets=("transformer.*",))
    (tensor, stages), changes = OPTIONS.get(option, ((1, 1), {}))
    units = *graph.item_encoders, *graph.generators
    items = tuple((unit.name, 2, 2) if unit.image is not None else (unit.name, 4 * unit.merge_factor, 1) for unit in units)
    shapes = [SampleShape(items * count, 4 + count, 3) for count in (1, 2)]
    source = RandomSource(graph, (*shapes, SampleShape((), 4, 2)), VOCABULARY)
    sizes = {unit.name: UnitSizes(tensor, stages if unit is graph.backbone else 1) for unit in graph.units}
    plan = plan_colocated(graph, sizes=sizes, world_size=1 if option == "FP8" else 2)
    return GradientCase(graph, plan, dealt(source, plan, ([0], [1, 2])), source, transformer_impl="transformer_engine", **changes)


def second_step(case: GradientCase, folder: Path, resumes: bool) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss of the second step of AdamW, and the weights behind it; a checkpoint of the first is saved, or resumed."""
    optimizer = build_optimizer_config(
        lr=RATE, min_lr=RATE, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0, dtype=case.dtype
    )
    session = build_session(case, optimizer=optimizer)
    build_scheduler(OptimizerSettings(lr=RATE, min_lr=RATE), session, train_iters=2)
    if resumes:
        load_checkpoint(folder, session=session, load_optimizer=True, load_rng=True)
    for number in range(int(resumes), 2):
        session.zero_gradients()
        step = plan_case(case)
        loss = session.forward_backward(step).loss_sum
        session.finish_gradients()
        session.step_optimizers(session.gradient_norm(), gathers_later=step.cuts.gathers_parameters)
        session.complete_parameters()
        if number == 0:
            save_checkpoint(
                folder,
                step=1,
                session=session,
                schedulers_state={"num_steps": 1},
                run_state={"seed": 0},
                keep_last=1,
                background=None,
            )
    with whole_weights(session):
        named = {f"{unit} {name}": each for (unit, _), stage in session.stages.items() for name, each in stage.named_parameters()}
        return loss, {name: each.detach().double().numpy() for name, each in named.items()}
