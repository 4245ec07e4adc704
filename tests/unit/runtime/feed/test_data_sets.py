"""The digits as data of models with several encoders."""

from pathlib import Path
from typing import Any

import pytest

from megatron.runtime.feed.data_sets import build_data_sets
from megatron.runtime.flags.configuration import (
    DataConfig,
    ModelConfig,
    OptimizerSettings,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
)
from multimodal.values.errors import ConfigError
from multimodal.values.model_graph import ModelGraph

pytest.importorskip("sklearn", reason="scikit-learn is not installed (pip install 'braid[examples]')")

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "ffn_hidden_size": 8}
IMAGE = {"patch_size": 8, "merge_size": 2, "in_channels": 1, "min_pixels": 256, "max_pixels": 4096}
CONFIG = RunConfig(
    model=ModelConfig(model=Path("model.yaml")),
    parallelism=ParallelismConfig(),
    training=TrainingConfig(global_batch_size=4, train_iters=10),
    optimizer=OptimizerSettings(lr=0.1),
    data=DataConfig(data_path=("digits",), digits_samples=6),
)


def graph_of(encoders: dict[str, Any]) -> ModelGraph:
    units = {name: {"role": "encoder", **SHAPE, **described} for name, described in encoders.items()}
    return ModelGraph.from_dict({"units": {**units, "llm": {"role": "backbone", **SHAPE}}})


def test_encoders_take_turns() -> None:
    """Sample by sample, each with pictures cut as its encoder asks for."""
    fine = {**IMAGE, "patch_size": 4}
    source = build_data_sets(CONFIG, graph_of({"coarse": {"image": IMAGE}, "fine": {"image": fine}})).train
    units = [{item.unit for item in source.lengths(index).items} for index in range(len(source))]
    assert units == [{"coarse"}, {"fine"}] * 3
    assert [source.item(index, 0).patches.shape[1] for index in (0, 1)] == [64, 16]


def test_sound_alone_cannot_read_digits() -> None:
    with pytest.raises(ConfigError, match="needs a model with an image encoder, found none"):
        build_data_sets(CONFIG, graph_of({"ear": {"audio": {}}}))
