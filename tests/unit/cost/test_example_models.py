"""The example models against the parameter counts that their makers publish."""

from pathlib import Path

import pytest

from multimodal.cost.layers.registry import describe_layer, read_model
from multimodal.values.model_graph import ModelGraph
from tests.unit.cost.cost_cases import parameter_count, unit_parameters

FOLDER = Path(__file__).parents[3] / "examples" / "models"
TOTALS = {
    # safetensors totals of the published checkpoints
    "qwen2.5-vl-3b": (3_754_622_976, 0.001),
    "qwen2.5-vl-7b": (8_292_166_656, 0.001),
    "qwen2.5-vl-72b": (73_410_777_344, 0.001),
    "qwen2.5-omni-7b": (8.93e9, 0.002),  # thinker
    "internvl3-8b": (7_944_373_760, 0.001),
    "llama-3.2-vision-11b": (10_670_220_835, 0.01),  # its embeddings of tile positions (0.7 %) are not in our form
    "llava-onevision-7b": (8_030_348_832, 0.001),
    "qwen3-vl-30b-a3b": (31_070_754_032, 0.001),
    # sums of what the papers state per unit
    "mllm-9b": (9e9, 0.02),
    "mllm-15b": (15e9, 0.05),  # the paper's name; ViT-H 0.63 B + 13 B with Llama 3's vocabulary (1.3 B) + 0.87 B is 15.5 B
    "mllm-72b": (72e9, 0.01),
    "orchmllm-10b": (10e9, 0.01),
    "orchmllm-18b": (18e9, 0.02),
    "orchmllm-84b": (84e9, 0.01),
    "oobleck-bert-large": (340e6, 0.02),  # without learned positions, as all of these
    "oobleck-gpt-2-medium": (345e6, 0.03),  # the vocabulary is padded
    "oobleck-gpt-3-medium": (350e6, 0.02),
    "oobleck-gpt-3-2.7b": (2.65e9, 0.005),
    "oobleck-gpt-3-6.7b": (6.65e9, 0.005),
    "entrain-llama-1b": (668_683_520 + 1_235_814_400, 0.005),
    "entrain-llama-3b": (668_683_520 + 3_212_749_824, 0.005),
}
"""Of all units, and how far our count may be from it."""
UNITS = {
    ("entrain-llama-1b", "llm"): (1_235_814_400, 0.0),  # Llama 3.2 1B's exact count
    ("entrain-llama-3b", "llm"): (3_212_749_824, 0.0),
    ("cornstarch-vlm-m", "llm"): (8_030_261_248, 0.0),  # Llama 3.1 8B's
    ("qwen2.5-vl-7b", "llm"): (7_615_616_512, 0.0),  # Qwen2.5 7B's
    ("orchmllm-18b", "llm"): (14_770_033_664, 0.0),  # Qwen2.5 14B's
    ("orchmllm-84b", "llm"): (72_706_203_648, 0.0),  # Qwen2.5 72B's
    ("qwen3-vl-30b-a3b", "llm"): (30_532_122_624, 0.0),  # Qwen3 30B-A3B's
    ("qwen2.5-omni-7b", "audio"): (0.637e9, 0.015),  # Whisper-large's encoder; our projector concatenates
    ("mllm-9b", "vision"): (0.63e9, 0.015),  # ViT-Huge with a projector of 7 M
    ("mllm-9b", "generator"): (0.866e9, 0.04),  # Stable Diffusion 2.1's U-Net, in whose place a transformer stands
    ("vit-3b-gpt-11b", "vision"): (3e9, 0.03),
    ("vit-11b-vit-5b-gpt-175b", "second_vision"): (5.4e9, 0.02),
    ("vit-11b-gpt-175b", "vision"): (9.7e9, 0.02),  # the paper's 11B is also called 10B there
    ("vit-22b-gpt-175b", "vision"): (21.8e9, 0.01),  # Dehghani et al. 2023: 21,743 M
    ("vit-22b-gpt-175b", "llm"): (174.6e9, 0.001),  # Brown et al. 2020, without learned positions
    ("vit-22b-llama-70b", "llm"): (68_976_648_192, 0.0),  # Llama 2 70B's
    ("cornstarch-vlm-s", "vision"): (1.01e9, 0.06),  # EVA ViT-g/14; a projector of 55 M
    ("cornstarch-vlm-m", "vision"): (7.53e9, 0.05),  # EVA-CLIP 8B's vision tower; a projector of 0.3 B
    ("cornstarch-vlm-l", "vision"): (17.5e9, 0.04),  # EVA-CLIP 18B's; a projector of 0.5 B
    ("cornstarch-thesis-vlm-1b", "llm"): (1_235_814_400, 0.0),
    ("cornstarch-thesis-vlm-32b", "llm"): (32.5e9, 0.002),  # Qwen2.5 32B's, with Llama 3's vocabulary
    ("cornstarch-alm-s", "audio"): (1.4e9, 0.05),
    ("cornstarch-alm-m", "audio"): (7e9, 0.035),
    ("cornstarch-alm-l", "audio"): (15e9, 0.025),
}


@pytest.mark.parametrize(("name", "unit"), [*((name, None) for name in TOTALS), *UNITS])
def test_models_and_units_have_their_published_size(name: str, unit: str | None) -> None:
    graph = ModelGraph.from_file(FOLDER / f"{name}.yaml")
    total, tolerance = TOTALS[name] if unit is None else UNITS[name, unit]
    found = parameter_count(graph) if unit is None else unit_parameters(graph, graph.unit(unit))
    assert found == pytest.approx(total, rel=tolerance, abs=0)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_file_says_its_vocabulary_and_whether_it_can_only_be_planned(path: Path) -> None:
    graph = read_model(path)
    assert graph.backbone.vocab_size
    assert ModelGraph.from_dict(graph.to_dict()) == graph
    can_train = all(describe_layer(graph, unit, kind, vocab_size=0).can_be_built for unit in graph.units for kind in unit.layers)
    says_so = "# To be planned and simulated only, not trained:" in path.read_text()
    assert says_so is not can_train
