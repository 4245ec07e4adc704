"""Generators of latents: gradients of one process under plans, with diffusers' autoencoder; caches; what is drawn; errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("diffusers", reason="diffusers is not installed (pip install 'braid[diffusion]')")

from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from megatron.runtime.feed.data_sets import with_cached_latents
from megatron.runtime.generation.drawing import image_of, make_item
from megatron.runtime.generation.whole_model import open_model
from multimodal.cost.cluster import Cluster
from multimodal.cost.flops import unit_flops
from multimodal.cost.layers.backbone_ends import encoding_flops
from multimodal.cost.seconds.layer_costs import LayerCosts, Sharing
from multimodal.cost.unit_load import UnitLoad
from multimodal.hugging_face.architecture import check_autoencoders
from multimodal.model.latents import decode_latents
from multimodal.values.errors import ModelError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.units.items import ImageInput, Latents
from tests.distributed.dealt_case import UNITS, dealt, unit_plan
from tests.distributed.gradient_case import GradientCase
from tests.distributed.gradient_comparison import assert_matches
from tests.distributed.launch import launch
from tests.distributed.launch import train as train_flags
from tests.distributed.random_source import RandomSource, SampleShape
from tests.distributed.rank_pool import RankPool
from tools import cache_latents

CHANNELS, FACTOR = 3, 2
SHAPE = {"hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16, "num_layers": 2}
SHAPES = (
    SampleShape((("vision", 1, 2), ("painter", 1, 2)), 5, 3),
    SampleShape((("painter", 2, 2), ("painter", 1, 3), ("vision", 1, 1)), 6, 2),
    SampleShape((), 3, 2),
    SampleShape((("painter", 1, 1),), 4, 0),
)


def autoencoder(folder: Path, *, seed: int = 0, channels: int = CHANNELS) -> Path:
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"in_channels": 1, "out_channels": 1, "latent_channels": channels, "block_out_channels": (4, 4), "norm_num_groups": 2}
    AutoencoderKL(**blocks, **sizes, scaling_factor=0.7, shift_factor=0.1).save_pretrained(folder)
    return folder


JOINT = {"joint": True}


def image_with(folder: Path, **changes: Any) -> dict[str, Any]:
    latents = {"directory": str(folder), "channels": CHANNELS, "factor": FACTOR}
    sizes = {"patch_size": 4, "merge_size": 1, "in_channels": 1, "min_pixels": 64, "max_pixels": 256}
    return {**sizes, "latents": {**latents, **changes}}


@pytest.mark.deep(when=lambda painter, options: "sequence_parallel" not in options and "lora" not in options)
@pytest.mark.parametrize(
    ("painter", "options"),
    [
        ({"first": 1, "cp": 2, "pp": 2}, {"block_size": 4}),
        ({"first": 0, "tp": 2}, {"sequence_parallel": True, "exchanges_samples": True, "builder": "zb-h1"}),
        ({"first": 1, "tp": 2, "cp": 2}, {**JOINT, "sequence_parallel": True, "block_size": 2, "recompute": "full"}),
        ({"first": 1, "tp": 2, "pp": 2}, {**JOINT, "builder": "zb-h1"}),
        ({"first": 0, "pp": 2}, {**JOINT, "lora": {"rank": 2}, "builder": "gpipe"}),
        ({"first": 0, "dp": 2}, {**JOINT, "shards_weights": True}),
    ],
    ids=["cp 2 pp 2", "tp 2 colocated", "joint cp 2 tp 2", "joint tp 2 pp 2", "joint with adapters", "joint zero 3"],
)
def test_gradients_equal_one_process(painter: Any, options: Any, ranks: RankPool, tmp_path: Path) -> None:
    options = dict(options)
    of_flow, of_unit = {"has_joint_attention": options.pop("joint", False)}, {"lora": options.pop("lora", None)}
    image = image_with(autoencoder(tmp_path / "vae"))
    flow = {"condition_tokens": 2, "condition_dropout": 0.3, **of_flow}
    drawing = {**UNITS["painter"], **of_unit, "image": image, "flow": flow}
    edges = [["vision", "llm"], ["llm", "painter"], ["vision", "painter"]]
    units = {"vision": UNITS["vision"], "llm": UNITS["llm"], "painter": drawing}
    graph = ModelGraph.from_dict({"units": units, "edges": edges})
    plan = Plan({"vision": unit_plan(0), "llm": unit_plan(0), "painter": unit_plan(**painter)})
    source = RandomSource(graph, SHAPES, 12)
    assert_matches(GradientCase(graph, plan, dealt(source, plan, ([0, 1], [2], [3])), source, **options), ranks)


def write_run(folder: Path) -> dict[str, object]:
    image = image_with(autoencoder(folder / "vae"))
    units = {"llm": {"role": "backbone", **SHAPE}, "painter": {"role": "generator", **SHAPE, "image": image, "flow": {}}}
    (folder / "model.yaml").write_text(yaml.safe_dump({"units": units}))
    entries = []
    for index in range(4):
        Image.effect_noise((8 + 4 * (index % 2), 8), 50).convert("L").save(folder / f"{index}.png")
        said = {"type": "text", "role": "user", "text": f"draw {index}"}
        entries.append({"id": str(index), "segments": [said, {"type": "image", "role": "assistant", "path": f"{index}.png"}]})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    of_data = {"--model": folder / "model.yaml", "--data-path": folder / "manifest.jsonl", "--split": "100"}
    return {**of_data, "--global-batch-size": 2, "--train-iters": 2, "--lr": 1e-3, "--num-workers": 0}


def test_a_run_learns_the_same_from_a_cache_and_refuses_that_of_another(tmp_path: Path, capsys: Any) -> None:
    flags = write_run(tmp_path)
    given = [str(part) for pair in flags.items() for part in pair]
    assert cache_latents.main(["--output", str(tmp_path / "cache"), "--images-per-file", "3", *given]) == 0
    assert "4 images of unit 'painter'" in capsys.readouterr().out
    assert len(list((tmp_path / "cache").iterdir())) == 2
    losses = []
    for cache in ({}, {"--latent-cache": tmp_path / "cache"}):
        more = {"--llm-dp": 1, "--painter-dp": 1, "--log-json": tmp_path / f"{len(cache)}.jsonl", **cache}
        losses.append([entry["generator_loss"] for entry in train_flags({**flags, **more}, num_ranks=2)[0]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 2
    train_flags({**flags, "--save": tmp_path / "saved", "--llm-dp": 1, "--painter-dp": 1}, num_ranks=2)
    with open_model(tmp_path / "saved") as model:
        assert make_item(model, "draw 1", size=(16, 8), num_steps=2, guidance_scale=2.0).size == (16, 8)
    autoencoder(tmp_path / "vae", seed=1)
    launched = launch({**flags, **more}, num_ranks=2)
    assert launched.exit_codes == (2, 2)
    assert "was written by another autoencoder than unit 'painter' has in" in launched.output


def test_latents_are_drawn_as_diffusers_decodes_them(tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    image = ImageInput(patch_size=4, merge_size=1, in_channels=1, latents=Latents(str(autoencoder(tmp_path)), CHANNELS, FACTOR))
    latents = torch.randn(CHANNELS, 4, 6, generator=torch.manual_seed(2), dtype=torch.float64)
    patches = latents.view(CHANNELS, 2, 2, 3, 2).permute(1, 3, 0, 2, 4).reshape(6, -1)
    with torch.no_grad():
        pixels = AutoencoderKL.from_pretrained(tmp_path).double().decode((latents / 0.7 + 0.1)[None]).sample[0]
    torch.testing.assert_close(decode_latents(latents, image.latents), pixels, rtol=0, atol=1e-12)
    expected = (pixels[0] * 0.5 + 0.5).mul(255).clamp(0, 255).round().byte()
    drawn = image_of(patches, torch.cartesian_prod(torch.arange(2), torch.arange(3)), image)
    assert np.array_equal(np.asarray(drawn), expected.numpy())


@pytest.mark.parametrize("is_large", [False, True], ids=["tiny", "stable diffusion"])
def test_encoding_costs_what_torch_counts_on_the_first_stage_alone(is_large: bool, tmp_path: Path) -> None:
    """For items of 2 and of 6 patches behind two conditions; the sizes of Stable Diffusion's hold where no folder is."""
    from diffusers import AutoencoderKL

    with torch.device("meta"):
        blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
        large = AutoencoderKL(**blocks, block_out_channels=(128, 256, 512, 512), layers_per_block=2)
    vae = large if is_large else AutoencoderKL.from_pretrained(autoencoder(tmp_path / "vae")).to("meta")
    sizes = {"channels": 4, "factor": 8} if is_large else {}
    image = image_with(tmp_path / "vae", **sizes) | {"in_channels": 3 if is_large else 1, "patch_size": 16 if is_large else 4}
    flow = {"condition_tokens": 3}
    units = {"llm": {"role": "backbone", **SHAPE}, "painter": {"role": "generator", **SHAPE, "image": image, "flow": flow}}

    def flops(graph: ModelGraph, load: UnitLoad) -> tuple[float, float]:
        found = unit_flops(graph, "painter", vocab_size=8)
        return found.forward.of(load), found.backward.of(load)

    load = UnitLoad(12, 4**2 + 8**2, 8, 2)
    graph = ModelGraph.from_dict({"units": units})
    with FlopCounterMode(display=False) as counter, torch.device("meta"), torch.no_grad():
        for rows, columns in ((1, 2), (2, 3)):
            vae.encode(torch.empty(1, image["in_channels"], *(image["patch_size"] * each for each in (rows, columns))))
    before, after = flops(with_cached_latents(graph), load), flops(graph, load)
    assert (after[0] - before[0], after[1]) == (pytest.approx(counter.get_total_flops(), rel=1e-12), before[1])
    per_pixel, _ = encoding_flops(graph.unit("painter").image.latents, in_channels=image["in_channels"])
    assert not is_large or 4.1e6 < per_pixel < 4.2e6
    cluster = Cluster.from_file("examples/clusters/h100.yaml")
    with_and_without = [
        LayerCosts(each, cluster, 8).seconds("painter", "generator_projector", load, Sharing(tensor_parallel_size=2))
        for each in (graph, with_cached_latents(graph))
    ]
    forward, *gradients = (one - other for one, other in zip(*with_and_without, strict=True))
    assert forward * cluster.flops_per_second == pytest.approx(counter.get_total_flops(), rel=1e-9) and not any(gradients)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"directory": "no/such"}, "no/such has no config.json"),
        ({"channels": 4}, "channels is 4, but the autoencoder in .* has 3"),
        ({"factor": 4}, "factor is 4, but the autoencoder in .* has 2"),
        ({"factor": 3}, "patch_size 4 holds no whole number of latents"),
    ],
)
def test_an_autoencoder_that_does_not_fit_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    units = {
        "llm": {"role": "backbone", **SHAPE},
        "painter": {"role": "generator", **SHAPE, "image": image_with(autoencoder(tmp_path), **change)},
    }
    with pytest.raises(ModelError, match=message):
        check_autoencoders(ModelGraph.from_dict({"units": units}))


def test_an_autoencoder_that_went_after_training_is_missed() -> None:
    with pytest.raises(ModelError, match="in no/such cannot be read [(]there is no config.json[)]"):
        decode_latents(torch.zeros(CHANNELS, 4, 6), Latents("no/such", CHANNELS, FACTOR))
