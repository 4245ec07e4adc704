import math

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from multimodal.model.rotary import axes_of_pairs, rotary_frequencies


def rotate(vector: torch.Tensor, position: list[int], *, base: float = 100.0) -> torch.Tensor:
    """As megatron-core's attention rotates a query of one head."""
    positions = torch.tensor([position] if len(position) > 1 else position)
    frequencies = rotary_frequencies(positions, head_channels=len(vector), base=base, dtype=torch.float64)
    return _apply_rotary_pos_emb_bshd(vector.view(1, 1, 1, -1), frequencies).flatten()


def test_text_rotates_each_pair_of_channels_by_position_times_its_frequency() -> None:
    vector = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    expected = []
    for channel, angle in ((0, 5.0), (1, 5.0 / math.sqrt(100.0))):
        number = complex(vector[channel], vector[channel + 2]) * complex(math.cos(angle), math.sin(angle))
        expected.append(number)
    found = rotate(vector, [5])
    assert found.tolist() == pytest.approx([n.real for n in expected] + [n.imag for n in expected], abs=1e-12)


def test_images_give_half_of_the_pairs_to_rows_and_half_to_columns() -> None:
    angles = rotary_frequencies(torch.tensor([[2, 3]]), head_channels=8, base=100.0, dtype=torch.float64)
    half = [2.0, 2.0 / 10, 3.0, 3.0 / 10]
    assert angles.shape == (1, 1, 1, 8)
    assert angles.flatten().tolist() == pytest.approx(half + half, abs=1e-12)


def test_staggered_axes_take_turns_in_the_frequencies_of_one() -> None:
    places = torch.tensor([[2, 3]])
    angles = rotary_frequencies(places, head_channels=8, base=10000.0, dtype=torch.float64, is_staggered=True)
    half = [2.0, 2.0 / 100, 3.0 / 10, 3.0 / 1000]
    assert angles.flatten().tolist() == pytest.approx(half + half, abs=1e-12)


@pytest.mark.parametrize(("first", "second", "shift"), [([3], [1], [4]), ([3, 1], [0, 2], [5, 7])])
def test_only_distances_count(first: list[int], second: list[int], shift: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=generator)
    moved = [[a + b for a, b in zip(position, shift, strict=True)] for position in (first, second)]
    before = rotate(query, first) @ rotate(key, second)
    after = rotate(query, moved[0]) @ rotate(key, moved[1])
    assert float(before) == pytest.approx(float(after), abs=1e-12)
    assert float(before) != pytest.approx(float(query @ key), abs=1e-3)


def test_sections_follow_each_other_or_take_turns() -> None:
    assert axes_of_pairs((1, 3, 2), is_interleaved=False) == [0, 1, 1, 1, 2, 2]
    assert axes_of_pairs((3, 1, 2), is_interleaved=True) == [0, 1, 2, 0, 0, 2]
    assert axes_of_pairs((24, 20, 20), is_interleaved=True) == [0, 1, 2] * 20 + [0] * 4
