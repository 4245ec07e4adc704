"""Models that can be planned but not trained are refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.runtime.flags.arguments import parse_arguments
from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.layers.transformer import TransformerLayer
from multimodal.values.errors import ConfigError, ModelError

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
UNITS = {"audio": {"role": "encoder", **SHAPE, "audio": {}}, "language": {"role": "backbone", **SHAPE}}


def parse(units: dict[str, Any], folder: Path, *more: str) -> None:
    (folder / "model.yaml").write_text(yaml.safe_dump({"units": units}, sort_keys=False))
    flags = ["--model", str(folder / "model.yaml"), "--data-path", "digits", "--lr", "1e-3", "--train-iters", "10"]
    parse_arguments([*flags, "--global-batch-size", "8", *more], environ={"WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio": {}}, "unit 'audio' takes audio, to which its first layer adds positions; set has_rotary_positions: false"),
        (
            {"audio": {"tokens_per_second": 25}, "has_rotary_positions": False},
            "'audio': tokens_per_second 25 .* not trained; set",
        ),
    ],
)
def test_other_audio_than_whispers_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        parse({**UNITS, "audio": {**UNITS["audio"], **changes}}, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 64}, r"--seq-length 65 is beyond the 64 tokens that .*\(sliding_window\).*; lower it"),
        ({"rotary_dynamic_scaling": [2.0, 64]}, r"--seq-length 65 is beyond the 64 tokens from which on"),
    ],
)
def test_longer_sequences_than_can_be_computed_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    units = {"language": {**UNITS["language"], **changes}}
    parse(units, tmp_path, "--seq-length", "64")
    with pytest.raises(ConfigError, match=message):
        parse(units, tmp_path, "--seq-length", "65")


class CountedLayer(TransformerLayer):
    """A kind that multimodal/model does not build."""

    can_be_built = False


def test_a_layer_that_nobody_builds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_KINDS, "counted", CountedLayer)
    language = {**UNITS["language"], "layers": ["token_embedding", "transformer", "counted", "head"]}
    found = r"unit 'language', layers\[2\]: 'counted' can be planned and simulated but not trained yet"
    with pytest.raises(ModelError, match=found):
        parse({"vision": {"role": "encoder", **SHAPE}, "language": language}, tmp_path)
