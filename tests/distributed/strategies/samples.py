"""Random samples: their items and texts."""

from collections.abc import Sequence

from hypothesis import strategies as st

from multimodal.values.model_graph import Unit
from tests.distributed.random_source import SampleShape

VOCAB_SIZE = 12
MAX_AUDIO_TOKENS = 6


@st.composite
def samples(draw: st.DrawFn, units: Sequence[Unit]) -> tuple[SampleShape, ...]:
    """One to seven samples with up to three items; some without items, some without target tokens, but not all."""
    found = []
    for _ in range(draw(st.integers(1, 7))):
        takers = [draw(st.sampled_from(units)) for _ in range(draw(st.integers(0, 3)) if units else 0)]
        items = [
            (unit.name, draw(st.integers(3, 2 * MAX_AUDIO_TOKENS)), 1)
            if unit.audio is not None
            else (unit.name, draw(st.integers(1, 2)), draw(st.integers(1, 3)))
            for unit in takers
        ]
        found.append(SampleShape(tuple(items), draw(st.integers(2, 6)), draw(st.integers(0, 2))))
    if not any(sample.num_target_tokens for sample in found):
        found[0] = SampleShape(found[0].items, found[0].num_text_tokens, 1)
    return tuple(found)
