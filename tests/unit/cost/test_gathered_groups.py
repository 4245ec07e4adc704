import pytest

from multimodal.cost.layers.collectives import GATHERED_AT_ONCE_BYTES, count_groups_at_once, held_key_bytes


@pytest.mark.parametrize(
    ("num_groups", "share_of_the_most", "at_once"),
    [(8, 0.0, 8), (8, 0.125, 8), (8, 0.126, 4), (6, 0.25, 3), (5, 0.3, 1), (4, 3.0, 1)],
)
def test_small_groups_of_heads_are_gathered_together(num_groups: int, share_of_the_most: float, at_once: int) -> None:
    bytes_per_group = share_of_the_most * GATHERED_AT_ONCE_BYTES
    assert count_groups_at_once(num_groups, bytes_per_group=bytes_per_group) == at_once
    assert held_key_bytes(num_groups, bytes_per_group=bytes_per_group) == min(2 * at_once, num_groups) * bytes_per_group
    assert held_key_bytes(num_groups, bytes_per_group=bytes_per_group) <= 2 * max(GATHERED_AT_ONCE_BYTES, bytes_per_group)
