"""Models that can be planned but not trained are refused before anything starts."""

from typing import Any

import pytest

from multimodal.cost.layers.registry import LAYER_KINDS
from multimodal.cost.layers.transformer import TransformerLayer
from multimodal.values.errors import ConfigError, ModelError
from tests.unit.runtime.flags.conftest import BACKBONE, ENCODER, Parse

AUDIO = {"audio": {**ENCODER, "audio": {}}, "language": BACKBONE}


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
def test_other_audio_than_whispers_is_refused(changes: dict[str, Any], message: str, parse_on_base: Parse) -> None:
    with pytest.raises(ModelError, match=message):
        parse_on_base(units={**AUDIO, "audio": {**AUDIO["audio"], **changes}})


@pytest.mark.parametrize(
    ("changes", "message"), [({"rotary_dynamic_scaling": [2.0, 64]}, r"--seq-length 65 is beyond the 64 tokens from which on")]
)
def test_longer_sequences_than_can_be_computed_are_refused(changes: dict[str, Any], message: str, parse_on_base: Parse) -> None:
    units = {"language": {**BACKBONE, **changes}}
    parse_on_base("--seq-length 64", units=units)
    with pytest.raises(ConfigError, match=message):
        parse_on_base("--seq-length 65", units=units)


class CountedLayer(TransformerLayer):
    """A kind that multimodal/model does not build."""

    can_be_built = False


def test_a_layer_that_nobody_builds_is_refused(parse_on_base: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_KINDS, "counted", CountedLayer)
    language = {**BACKBONE, "num_layers": 2, "layers": ["token_embedding", "transformer", "counted", "head"]}
    found = r"unit 'language', layers\[2\]: 'counted' can be planned and simulated but not trained yet"
    with pytest.raises(ModelError, match=found):
        parse_on_base(units={"vision": ENCODER, "language": language})
