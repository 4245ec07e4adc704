"""Generators with a module of diffusers: its own loss and gradients, those of one process under plans, folders, drawings."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("diffusers", reason="diffusers is not installed (pip install 'braid[diffusion]')")

from safetensors.torch import load_file
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from megatron.runtime.generation.drawing import _follow
from megatron.runtime.generation.whole_model import open_model
from megatron.runtime.hugging_face.save_weights import save_hugging_face
from megatron.runtime.hugging_face.unit_weights import load_units
from multimodal.cost.layers.layer import ActivationCase
from multimodal.cost.layers.registry import describe_layer, read_model
from multimodal.cost.unit_load import UnitLoad
from multimodal.hugging_face.composition import compose
from multimodal.hugging_face.registry import read_encoder
from multimodal.hugging_face.weight_names import rows_of
from multimodal.model.latents import ItemsMade, NoisePath, cut_image, join_patches
from multimodal.model.layers.generator_ends import _keep
from multimodal.model.stage_input import PackedInput
from multimodal.model.unit_stage import UnitStage
from multimodal.plan.plans_of_sizes import place_stages
from multimodal.values.backward_need import BackwardNeed
from multimodal.values.errors import ModelError
from multimodal.values.file_form import write_mapping
from multimodal.values.model_graph import ModelGraph, Role
from multimodal.values.plan import Plan
from tests.distributed.dealt_case import UNITS, dealt, unit_plan
from tests.distributed.gradient_case import GradientCase, build_session, single_rank_plan
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.hugging_face_comparison import MULTIPLE, run_and_save
from tests.distributed.hugging_face_models import WRITTEN, llama
from tests.distributed.launch import launch, train
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankError
from tests.distributed.test_latents import autoencoder, write_run
from tests.unit.cost.cost_cases import unit_parameters
from tools import convert, profile_layers

SIDE = 4
"""Pixels of a patch."""
WIDTH, NUM_STEPS = 16, 4
SHAPES = (
    SampleShape((("painter", 1, 2),), 5, 3),
    SampleShape((("painter", 2, 2), ("painter", 1, 2)), 6, 2),
    SampleShape((), 3, 2),
    SampleShape((("painter", 2, 2),), 4, 0),
)
KINDS = [("dit", "epsilon"), ("unet", "epsilon"), ("unet", "v"), ("sd3", "velocity")]
IN_LAYERS = [("dit in layers", "epsilon"), ("sd3 in layers", "velocity"), ("sd3.5 in layers", "velocity")]
"""The same in Braid's layers; SD3.5 has norms of queries and keys."""


def save_module(kind: str, folder: Path) -> Path:
    """A tiny U-Net, SD3 or DiT of random weights, also those that start as zeros."""
    import diffusers

    torch.manual_seed(3)
    kind, normed = kind.split()[0].replace(".5", ""), {"qk_norm": "rms_norm"} if ".5" in kind else {}
    config = {**WRITTEN["denoisers"][kind], **normed}
    module: Any = getattr(diffusers, config.pop("class"))(**config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    module.save_pretrained(folder, max_shard_size="10GB" if kind == "unet" else "20KB")
    return folder


def _betas(folder: Path | str) -> dict[str, Any]:
    """DiT's, or Stable Diffusion's."""
    if "DiT" in (Path(folder) / "config.json").read_text():
        return {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
    return {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def graph_with(folder: Path, prediction: str = "epsilon", **llm: Any) -> ModelGraph:
    flow = {"prediction": prediction, "condition_tokens": 3, "condition_dropout": 0.4, **_betas(folder)}
    image = {"patch_size": SIDE, "in_channels": 1, "merge_size": 1}
    kind = {"module": {"directory": str(folder)}, "weights": str(folder)}
    painter = {**UNITS["painter"], "hidden_size": WIDTH, "image": image, "flow": flow, **kind}
    if "in layers" in folder.name:
        encoder, config = read_encoder(folder, Role.GENERATOR)
        described = encoder.to_unit(config)
        image = {**painter["image"], "patch_size": described["image"]["patch_size"]}
        flow = {**painter["flow"], **described.pop("flow")}
        flow["condition_tokens"] = 3 if flow["form"] == "sd3" else 1
        adapters = {"lora": {"rank": 2}} if "adapters" in folder.name else {}
        painter = {**described, "image": image, "flow": flow, "weights": str(folder), **adapters}
    return ModelGraph.from_dict({"units": {"llm": {**UNITS["llm"], **llm}, "painter": painter}})


def case_of(graph: ModelGraph, plan: Plan, **options: Any) -> GradientCase:
    source = RandomSource(graph, SHAPES, MULTIPLE)
    return GradientCase(graph, plan, dealt(source, plan, ([0, 1], [2], [3])), source, **options)


def batch_of(
    *, times: torch.Tensor, told: torch.Tensor, width: int = WIDTH, rows: int = 1, before: int = 2, side: int = SIDE
) -> tuple[PackedInput, torch.Tensor]:
    """Two images of 2 x 2 patches and one of `rows` x 2, each behind `before` more conditions; and all their conditions."""
    grids, generator = ((2, 2), (rows, 2), (2, 2)), torch.manual_seed(5)
    places = torch.cat([torch.cartesian_prod(*map(torch.arange, grid)) for grid in grids])
    counts = [math.prod(grid) for grid in grids]
    each = before + 1
    given = torch.cat([each * item + torch.tensor([*range(before), *[before] * count]) for item, count in enumerate(counts)])
    lengths, items = tuple(count + before for count in counts), torch.arange(3).repeat_interleave(torch.tensor(counts) + before)
    is_patch = torch.cat([torch.arange(length) >= before for length in lengths])
    data, noise = torch.randn(2, len(places), side**2, dtype=torch.float64, generator=generator)
    positions = torch.zeros(len(given), 2, dtype=torch.long)
    positions[is_patch] = places
    made = ItemsMade(grids, places, torch.arange(len(places)))
    path = NoisePath(times, told, items, noise)
    conditions = torch.randn(3 * each, width, dtype=torch.float64, generator=generator)
    rest = {"target_rows": is_patch.nonzero()[:, 0], "condition_rows": given, "last_condition_rows": each * items + before}
    rest["item_sources"] = torch.zeros(3 * each, dtype=torch.long)
    return PackedInput(lengths, positions, patches=data, items_made=made, path=path, **rest), conditions


def predict_by(module: Any, name: str, sample: torch.Tensor, given: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """given: [num_items, 3, width]; to a DiT its last row beside the vector of no class, as a class of its own."""
    if name.startswith("SD3"):
        pooled, seen = torch.nn.functional.pad(given[:, -1], (0, 8)), given if name == "SD3" else given[:, :-1]
        return module(sample, encoder_hidden_states=seen, pooled_projections=pooled, timestep=step).sample
    if name == "UNet":
        return module(sample, step, encoder_hidden_states=given).sample
    tables = {key: table for key, table in module.named_parameters() if "embedding_table" in key}
    told = {key: torch.cat((table[-1] + given[:, -1], table)) for key, table in tables.items()}
    asked = {"timestep": step, "class_labels": torch.arange(len(given))}
    return torch.func.functional_call(module, told, (sample,), asked).sample[:, :1]


def compare_with_diffusers(case: GradientCase, folder: str) -> dict[str, float]:
    """Return the largest differences of loss and gradients from diffusers' own; on one rank."""
    import diffusers

    session = build_session(case)
    load_units(session)
    stage: UnitStage = session.stages["painter", 0].train()
    flow = stage.unit.flow
    times, told = torch.tensor([0.25, 0.5, 0.875], dtype=torch.float64), torch.tensor([1.0, 0.0, 1.0])
    name = next(each for each in ("DiT", "SD3", "UNet") if each in (Path(folder) / "config.json").read_text())
    kind = getattr(diffusers, {"UNet": "UNet2DConditionModel"}.get(name, f"{name}Transformer2DModel"))
    is_native = flow.form is not None
    sizes = {"before": stage.unit.num_conditions - 1, "side": 2} if is_native else {}
    batch, conditions = batch_of(times=times, told=told, rows=2 if name == "DiT" else 1, **sizes)
    loss = stage(None, batch, conditions).loss_sum
    loss.backward()
    module = kind.from_pretrained(folder, low_cpu_mem_usage=False).double().eval()
    predict = partial(predict_by, module, f"{name}{' in layers' * is_native}")
    projector = stage.layers["0"]
    projected = (torch.nn.functional.linear(conditions, projector.weight.detach(), projector.bias.detach())).unflatten(0, (3, -1))
    if flow.prediction == "velocity":
        scheduler: Any = None
    else:
        betas = _betas(folder)
        scheduler = diffusers.DDPMScheduler(**betas)
        steps = [torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2]
        steps.append(torch.linspace(0.0001, 0.02, 1000, dtype=torch.float64))
        scheduler.alphas_cumprod = (1 - steps[name == "DiT"]).cumprod(0)
    counts, made = [math.prod(grid) for grid in batch.items_made.grids], batch.items_made
    start = torch.randn(batch.patches.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def draw(image: torch.Tensor, item: int) -> torch.Tensor:
        """As diffusers' pipelines do, from the same noise."""
        places, grid = made.places.split(counts)[item], made.grids[item]
        sample = join_patches(start.split(counts)[item], places, grid, channels=1)[None]
        given = torch.stack((projected[item], torch.zeros_like(projected[item]))).detach()
        if flow.prediction == "velocity":
            sampler: Any = diffusers.FlowMatchEulerDiscreteScheduler()
            sampler.set_timesteps(sigmas=[1 - number / NUM_STEPS for number in range(NUM_STEPS)])
        else:
            kind = {"epsilon": "epsilon", "v": "v_prediction"}[flow.prediction]
            known = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1, "prediction_type": kind}
            sampler = diffusers.DDIMScheduler(**betas, **known)
            sampler.set_timesteps(NUM_STEPS)
        for step in sampler.timesteps:
            with torch.no_grad():
                told, untold = predict(sample.expand(2, -1, -1, -1), given, step.double().expand(2))
            sample = sampler.step((untold + 2 * (told - untold))[None], step, sample).prev_sample
        return cut_image(sample[0], places, grid)

    pictures: list[torch.Tensor] = []
    expected = torch.zeros((), dtype=torch.float64)
    parts = zip(batch.patches.split(counts), batch.path.noise.split(counts), made.places.split(counts), made.grids, strict=True)
    for item, (patches, noisy, places, grid) in enumerate(parts):
        image, noise = (join_patches(each, places, grid, channels=1)[None] for each in (patches, noisy))
        given, step = projected[item][None] * told[item], (1000 * times[item]).long()[None]
        if flow.prediction == "velocity":
            mixed, target = torch.lerp(image, noise, times[item]), noise - image
            found = predict(mixed, given, 1000 * times[item][None])
        else:
            mixed = scheduler.add_noise(image, noise, step)
            target = noise if flow.prediction == "epsilon" else scheduler.get_velocity(image, noise, step)
            found = predict(mixed, given, step)
        expected = expected + (found - target).square().sum()
        pictures.append(draw(image, item))
    stage.eval()
    drawn = _follow(stage, batch, conditions, num_steps=NUM_STEPS, guidance_scale=2.0, seed=1)
    expected.backward()
    differences = {"drawn": float((drawn - torch.cat(pictures)).abs().max()), "loss": float((loss - expected).abs() / expected)}
    of_module = {} if is_native else dict(stage.layers["1"].module.named_parameters())
    ours = native_gradients(stage, folder) if is_native else {key: each.main_grad for key, each in of_module.items()}
    for key, parameter in module.named_parameters():
        scale = max(1e-2, float(parameter.grad.abs().max()))  # a key's bias has no gradient but what rounding leaves
        differences[key] = float((ours[key].view_as(parameter) - parameter.grad).abs().max()) / scale
    return differences


def native_gradients(stage: UnitStage, folder: str) -> dict[str, torch.Tensor]:
    """Gradients of a painter with Braid's layers under diffusers' names."""
    names, found = read_encoder(folder, Role.GENERATOR)[0].names, dict[str, list[tuple[int, torch.Tensor]]]()
    for name, parameter in stage.named_parameters():
        for rows in rows_of(names, stage.unit, name, num_rows=parameter.shape[0]):
            part = parameter.main_grad[rows.target : rows.target + rows.num_rows]
            found.setdefault(rows.key, []).append((rows.start, part))
    return {key: torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])]) for key, parts in found.items()}


@pytest.mark.parametrize(("kind", "prediction"), [*KINDS, *IN_LAYERS])
def test_loss_and_gradients_are_those_of_diffusers(kind, prediction, ranks, tmp_path):
    graph = graph_with(save_module(kind, tmp_path / kind), prediction)
    case = case_of(graph, single_rank_plan(graph))
    (differences,) = ranks.run(compare_with_diffusers, case, str(tmp_path / kind), world_size=1)
    assert differences.pop("drawn") < 1e-5
    most = 1e-6 if ".5" in kind else 1e-12  # norms of heads are computed in float32
    assert len(differences) > 40 and {name: each for name, each in differences.items() if not each < most} == {}


@pytest.mark.deep(when=lambda kind: kind not in ("unet", "sd3.5 in layers"))  # gradients of the others are held above
@pytest.mark.parametrize(("kind", "prediction"), [*KINDS[2:], *IN_LAYERS, ("sd3 in layers, adapters", "velocity")])
def test_plans_equal_one_process_and_untrained_weights_go_back_as_they_came(kind, prediction, ranks, tmp_path):
    llama().save_pretrained(tmp_path / "llm")
    painter = graph_with(save_module(kind, tmp_path / kind), prediction).unit("painter")
    llm = replace(read_model(tmp_path / "llm").backbone, name="llm", weights=str(tmp_path / "llm"))
    graph = ModelGraph((llm, painter), (("llm", "painter"),))
    (expected,) = ranks.run(run_and_save, case_of(graph, single_rank_plan(graph)), world_size=1)
    layers = len(llm.layers)
    if "in layers" in kind:
        sizes = {
            "tp 2 pp 2": ({"first": 1, "tp": 2, "pp": 2}, {"builder": "zb-h1"}),
            "cp 2 tp 2": ({"first": 1, "cp": 2, "tp": 2}, {"sequence_parallel": True, "recompute": "full", "block_size": 2}),
            "zero 3": ({"first": 0, "dp": 2}, {"shards_weights": True}),
        }
    else:
        sizes = {
            "apart": ({"first": 1, "dp": 2, "num_layers": 2}, {"builder": "zb-h1"}),
            "on the LLM's last stage": ({"first": 2, "dp": 2, "num_layers": 2}, {"builder": "zb-h1"}),
            "zero 3": ({"first": 0, "dp": 2, "num_layers": 2}, {"shards_weights": True}),
        }
    for name, (of_painter, options) in sizes.items():
        of_llm = unit_plan(0, tp=1 + ("zero" in name), num_layers=layers)
        if "stage" in name:
            of_llm = place_stages({0: ((0, 2),), 1: ((2, layers),)}, tensor=2, context=1, data=1)
        case = case_of(graph, Plan({"llm": of_llm, "painter": unit_plan(**of_painter)}), **options)
        run = partial(run_and_save, target=str(tmp_path / name))
        assert_matches(case, ranks, run=run, expected=expected)
        files = sorted(path.name for path in (tmp_path / kind).iterdir())
        assert (len(files) == 2) == (kind == "unet"), "one file, or several and an index"
        for file in files:
            assert (tmp_path / name / "painter" / file).read_bytes() == (tmp_path / kind / file).read_bytes(), f"{file}, {name}"
        assert set(load_file(tmp_path / name / "projectors" / "model.safetensors")) == {
            f"painter.layers.0.{tensor}" for tensor in ("weight", "bias")
        }


@pytest.mark.parametrize("kind", ["unet", "sd3", "dit"])
def test_operations_of_a_module_are_counted_into_the_model_file(kind, tmp_path):
    """Exactly, also for a size that was not counted: 4 x 4 patches behind two conditions."""
    import diffusers

    folder = save_module(kind, tmp_path / kind)
    graph = graph_with(folder, "velocity" if kind == "sd3" else "epsilon")
    write_mapping(tmp_path / "model.yaml", graph.to_dict())
    asked = ["--model", str(tmp_path / "model.yaml"), "--output", str(tmp_path / "counted.yaml"), "--count-operations"]
    assert profile_layers.main(asked) == 0
    counted = read_model(tmp_path / "counted.yaml")
    module = (
        getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"]).from_pretrained(folder).to("meta")
    )
    layer = describe_layer(counted, counted.unit("painter"), "denoiser", vocab_size=0)
    assert layer.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        told = {"unet": {"encoder_hidden_states": torch.zeros(2, 3, WIDTH)}, "dit": {"class_labels": torch.zeros(2).long()}}
        told["sd3"] = {**told["unet"], "pooled_projections": torch.zeros(2, 24)}
        module(torch.zeros(2, 1, 16, 16), timestep=torch.zeros(2), **told[kind])
    load = UnitLoad(36, 2 * 18**2, 32, 2)
    assert sum(layer.forward_flops(load)) == counter.get_total_flops()
    kept: dict[int, torch.Tensor] = {}
    module = module.to_empty(device="cpu").eval()
    own = {each.untyped_storage()._cdata for each in module.parameters()}
    with saved_tensors_hooks(partial(_keep, kept), lambda each: each):
        module(
            torch.zeros(2, 1, 16, 16),
            timestep=torch.zeros(2),
            **{key: torch.zeros(each.shape, dtype=each.dtype) for key, each in told[kind].items()},
        )
    bytes_kept = sum(each.untyped_storage().nbytes() for key, each in kept.items() if key not in own)
    case = ActivationCase(BackwardNeed.FULL, 4, "local")
    assert layer.activation_bytes(load, case).replicated == pytest.approx(bytes_kept, rel=0.02)


def count_parameters(case: GradientCase) -> int:
    return sum(each.numel() for each in build_session(case).stages["painter", 0].parameters())


@pytest.mark.parametrize(("kind", "prediction"), IN_LAYERS)
def test_weights_of_layers_are_those_that_are_built(kind, prediction, ranks, tmp_path):
    """With embeddings and head; the last layer of an SD3 lacks the conditions' projection and MLP, which kinds do not tell."""
    graph = graph_with(save_module(kind, tmp_path / kind), prediction)
    (built,) = ranks.run(count_parameters, case_of(graph, single_rank_plan(graph)), world_size=1)
    assert unit_parameters(graph, graph.unit("painter")) - built == ("sd3" in kind) * (9 * WIDTH**2 + 6 * WIDTH)


def draw_and_save(case: GradientCase, target: str, guidance_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the painter draws, and the conditions behind its projector; runs on a rank."""
    session = build_session(case)
    load_units(session)
    save_hugging_face(Path(target), session=session)
    stage = session.stages["painter", 0].eval()
    batch, conditions = batch_of(
        times=torch.zeros(3, dtype=torch.float64), told=torch.ones(3), width=case.graph.backbone.transformer.hidden_size, rows=2
    )
    with torch.no_grad():
        drawn = _follow(stage, batch, conditions, num_steps=NUM_STEPS, guidance_scale=guidance_scale, seed=1)
        return drawn, stage.layers["0"].project(conditions).unflatten(0, (3, 3))


NOTHING: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
TEXTS: dict[str, Any] = {f"{part}{number}": None for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")}


@pytest.mark.parametrize(("kind", "prediction"), [("unet", "v"), ("sd3", "velocity"), ("dit", "epsilon")])
def test_a_pipeline_of_the_exported_folder_draws_the_same(kind, prediction, ranks, tmp_path, monkeypatch):
    import diffusers

    llama().save_pretrained(tmp_path / "llm")
    part = "unet" if kind == "unet" else "transformer"
    folder = save_module(kind, tmp_path / part)
    known = {**_betas(folder), "prediction_type": "v_prediction" if kind == "unet" else prediction}
    if kind == "sd3":
        scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    else:
        scheduler = diffusers.DDIMScheduler(**known, clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    vae = diffusers.AutoencoderKL.from_pretrained(autoencoder(tmp_path / "vae", channels=1), low_cpu_mem_usage=False)
    names = {"unet": "StableDiffusionPipeline", "sd3": "StableDiffusion3Pipeline", "dit": "DiTPipeline"}
    nothing = {"unet": NOTHING, "sd3": TEXTS, "dit": {}}[kind]
    with_module = {"unet": "UNet2DConditionModel", "sd3": "SD3Transformer2DModel", "dit": "DiTTransformer2DModel"}
    module = getattr(diffusers, with_module[kind]).from_pretrained(folder, low_cpu_mem_usage=False)
    unchecked = {"requires_safety_checker": False} if kind == "unet" else {}
    parts = {"vae": vae, part: module, "scheduler": scheduler, **nothing}
    getattr(diffusers, names[kind])(**parts, **unchecked).save_pretrained(tmp_path / "pipeline", max_shard_size="10GB")
    llm = replace(read_model(tmp_path / "llm").backbone, name="llm", weights=str(tmp_path / "llm"))
    graph = ModelGraph((llm, graph_with(tmp_path / "pipeline" / part, prediction).unit("painter")), (("llm", "painter"),))
    case = case_of(graph, single_rank_plan(graph))
    scale = 1.0 if kind == "dit" else 2.0  # its pipeline's no class is the thousandth
    ((drawn, projected),) = ranks.run(draw_and_save, case, str(tmp_path / "out"), scale, world_size=1)
    written = tmp_path / "out" / "painter"
    for path in (f"{part}/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors", "model_index.json"):
        assert (written / path).read_bytes() == (tmp_path / "pipeline" / path).read_bytes()
    pipeline = getattr(diffusers, names[kind]).from_pretrained(
        written, **nothing, torch_dtype=torch.float64, low_cpu_mem_usage=False
    )
    getattr(pipeline, part).double()
    pipeline.set_progress_bar_config(disable=True)
    start = torch.randn(drawn.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[:4]
    places = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    latents = join_patches(start, places, (2, 2), channels=1)[None]
    asked: dict[str, Any] = {"guidance_scale": scale, "num_inference_steps": NUM_STEPS}
    if kind == "dit":  # of class 0, made of no class and the condition; its pipeline takes no noise
        for name, table in pipeline.transformer.named_parameters():
            if "embedding_table" in name:
                table.data[0] = table.data[-1] + projected[0, -1]
        monkeypatch.setattr("diffusers.pipelines.dit.pipeline_dit.randn_tensor", lambda **_: latents)
        monkeypatch.setattr(pipeline.vae, "decode", lambda latents: SimpleNamespace(sample=latents / 100))
        pictures = pipeline(class_labels=[0], output_type="pt", **asked).images
        found = (2 * pictures[0] - 1) * 100 * pipeline.vae.config.scaling_factor
    else:
        told = {"prompt_embeds": projected[:1], "negative_prompt_embeds": torch.zeros_like(projected[:1])}
        if kind == "sd3":
            pooled = torch.nn.functional.pad(projected[:1, -1], (0, 8))
            told |= {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": torch.zeros_like(pooled)}
        found = pipeline(**told, **asked, latents=latents, height=16, width=16, output_type="latent").images[0]
    torch.testing.assert_close(cut_image(found.double(), places, (2, 2)), drawn[:4], rtol=0, atol=1e-5)


@pytest.mark.deep
def test_averages_are_exported(tmp_path):
    llama(vocab_size=264).save_pretrained(tmp_path / "llm")
    painter = graph_with(save_module("unet", tmp_path / "unet")).unit("painter")
    llm = replace(read_model(tmp_path / "llm").backbone, name="llm", weights=str(tmp_path / "llm"))
    flags = {**write_run(tmp_path), "--generator-ema-decay": 0.5, "--save": tmp_path / "saved", "--llm-dp": 1, "--painter-dp": 1}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(ModelGraph((llm, painter), (("llm", "painter"),)).to_dict()))
    train(flags, num_ranks=2)
    for name, more in (("weights", []), ("averages", ["--averages"])):
        assert convert.main(["--load", str(tmp_path / "saved"), "--save-hf", str(tmp_path / name), *more]) == 0
    with open_model(tmp_path / "saved") as (session, _):
        averages = dict(session.stages["painter", 0].layers["1"].module.named_parameters())
        for name, is_alike in (("weights", False), ("averages", True)):
            found = load_file(tmp_path / name / "painter" / "diffusion_pytorch_model.safetensors")
            assert all(map(torch.equal, map(averages.__getitem__, found), found.values())) == is_alike
    assert convert.main(["--load-hf", str(tmp_path / "weights"), "--save-hf", str(tmp_path / "other"), "--averages"]) != 0


def test_a_composed_model_trains_and_its_frozen_generator_goes_back_as_it_came(tmp_path):
    flags = {**write_run(tmp_path), "--painter-tp": 2, "--llm-dp": 1, "--save-hf": tmp_path / "out"}
    llama(vocab_size=264).save_pretrained(tmp_path / "llm")
    folder = save_module("sd3", tmp_path / "transformer")
    autoencoder(tmp_path / "vae", channels=1)
    given: dict[str, Any] = {"llm": tmp_path / "llm", "encoders": {}, "freeze": ["painter"], "output": tmp_path / "model.yaml"}
    compose(**given, generators={"painter": folder})
    history = train(flags, num_ranks=3)
    assert all(entry["generator_loss"] > 0 for entry in history[0])
    for path in folder.iterdir():
        assert (tmp_path / "out" / "painter" / path.name).read_bytes() == path.read_bytes()
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"num_layers": 2', '"num_layers": 3'))
    launched = launch(flags | {"--save-hf": tmp_path / "again"}, num_ranks=3)
    assert launched.exit_codes == (2, 2, 2) and "unit 'painter' would need num_layers 3, found 2" in launched.output
    with pytest.raises(ModelError, match="generator 'painter': .*SD3Transformer2DModel, DiTTransformer2DModel; or take it"):
        compose(**given, generators={"painter": save_module("unet", tmp_path / "unet")})


def build_all(case: GradientCase) -> None:
    build_session(case)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, but the module in .* takes 16"),
        ({"module": {"class": "AutoencoderKL"}}, "AutoencoderKL is not known as a generator's"),
        ({"flow": None}, "or to generators with image and flow"),
    ],
)
def test_a_module_that_does_not_fit_is_refused(change, message, ranks, tmp_path):
    folder = save_module("unet", tmp_path)
    entry = graph_with(folder).to_dict()
    painter = entry["units"]["painter"]
    changed = {key: {**painter[key], **value} if isinstance(value, dict) else value for key, value in change.items()}
    painter |= changed
    with pytest.raises((ModelError, RankError), match=message):
        graph = ModelGraph.from_dict(
            {**entry, "units": {**entry["units"], "painter": {k: v for k, v in painter.items() if v is not None}}}
        )
        ranks.run(build_all, case_of(graph, single_rank_plan(graph)), world_size=1)
