"""Models that can be planned but not trained are refused before anything starts."""

from pathlib import Path

import pytest
import yaml

from megatron.runtime.flags.arguments import parse_arguments
from multimodal.values.errors import ModelError

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
UNITS = {"audio": {"role": "encoder", **SHAPE, "audio": {}}, "language": {"role": "backbone", **SHAPE}}


def test_audio_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({"units": UNITS}, sort_keys=False))
    flags = ["--model", str(tmp_path / "model.yaml"), "--data-path", "digits", "--lr", "1e-3", "--train-iters", "10"]
    with pytest.raises(ModelError, match="unit 'audio' takes audio, which can be planned and simulated but not trained yet"):
        parse_arguments([*flags, "--global-batch-size", "8"], environ={"WORLD_SIZE": "2"})
