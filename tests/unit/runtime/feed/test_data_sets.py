"""The digits as data of models with several encoders."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.runtime.feed.data_sets import build_data_sets
from megatron.runtime.flags import configuration
from multimodal.values.errors import ConfigError, DataError
from multimodal.values.model_graph import ModelGraph

pytest.importorskip("sklearn", reason="scikit-learn is not installed (pip install 'braid[examples]')")

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "ffn_hidden_size": 8}
IMAGE = {"patch_size": 8, "merge_size": 2, "in_channels": 1, "min_pixels": 256, "max_pixels": 4096}
CONFIG = configuration.RunConfig(
    model=configuration.ModelConfig(model=Path("model.yaml")),
    parallelism=configuration.ParallelismConfig(),
    training=configuration.TrainingConfig(global_batch_size=4, train_iters=10),
    optimizer=configuration.OptimizerSettings(lr=0.1),
    data=configuration.DataConfig(data_path=("digits",), program_samples=6),
)


def graph_of(encoders: dict[str, Any]) -> ModelGraph:
    units = {name: {"role": "encoder", **SHAPE, **described} for name, described in encoders.items()}
    return ModelGraph.from_dict({"units": {**units, "llm": {"role": "backbone", **SHAPE}}})


def test_encoders_take_turns() -> None:
    """Sample by sample, each with pictures cut as its encoder asks for."""
    fine = {**IMAGE, "patch_size": 4}
    source = build_data_sets(CONFIG, graph_of({"coarse": {"image": IMAGE}, "fine": {"image": fine}})).train.source
    units = [{item.unit for item in source.lengths(index).items} for index in range(len(source))]
    assert units == [{"coarse"}, {"fine"}] * 3
    assert [source.item(index, 0).patches.shape[1] for index in (0, 1)] == [64, 16]


def test_sound_alone_cannot_read_digits() -> None:
    with pytest.raises(ConfigError, match="needs a model with an image encoder, found none"):
        build_data_sets(CONFIG, graph_of({"ear": {"audio": {}}}))


PROGRAM = """
from dataclasses import dataclass
from examples.digits.handwritten_digits import open_samples as open_digits

@dataclass
class Half:
    whole: object
    def __len__(self): return len(self.whole) // 2
    def __getattr__(self, name): return getattr(self.whole, name)

def open_samples(request):
    train, valid = open_digits(request)
    return Half(train), Half(valid)
"""


def config_of(program: Path) -> configuration.RunConfig:
    return replace(CONFIG, data=configuration.DataConfig(data_path=(str(program),), program_samples=6))


def test_a_program_of_ones_own_makes_samples(tmp_path: Path) -> None:
    """Also one that is called like a module of Python."""
    (tmp_path / "json.py").write_text(PROGRAM)
    data = build_data_sets(config_of(tmp_path / "json.py"), graph_of({"vision": {"image": IMAGE}}))
    digits = build_data_sets(CONFIG, graph_of({"vision": {"image": IMAGE}}))
    assert (len(data.train.source), len(digits.train.source)) == (3, 6)
    assert data.train.source.lengths(2) == digits.train.source.lengths(2)
    assert sys.modules["json"] is json


@pytest.mark.parametrize(("text", "message"), [(None, "there is no such program"), ("x = 1", "has no function `open_samples")])
def test_what_makes_no_samples_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(DataError, match=message):
        build_data_sets(config_of(tmp_path / "mine.py"), graph_of({"vision": {"image": IMAGE}}))
