"""What a stage's inputs are made of: pixels, parts of a sequence, and each rank's share."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multimodal.attention.packed_lengths import ItemSpan
from multimodal.cost.token_shares import BlockShares, RankShare
from multimodal.model.collectives import sequence_parts
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear
from multimodal.model.latents import normalised_patches
from multimodal.model.stage_input import PackedInput, find_row_ends, share_input
from multimodal.values.model_graph import ImageInput, ModelGraph
from tests.unit.model.rank_groups import build_stage, groups_of

SHARES = BlockShares(np.array([0, 1, 1, 0, 2], dtype=np.int32), 4, num_tokens=9, block_size=2)
"""Tokens 0 1 | 2 3 4 5 | 6 7 | 8; the last of four ranks has none."""
TEXT = PackedInput(
    (5, 4),
    torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]),
    token_ids=torch.arange(10, 19),
    items=(ItemSpan(1, 3, "vision"), ItemSpan(6, 2, "vision")),
    item_rows=torch.tensor([6, 7, 1, 2, 3]),
    target_rows=torch.tensor([0, 4, 8]),
    targets=torch.tensor([7, 8, 9]),
    generator_rows=torch.tensor([8, 5]),
)


@pytest.mark.parametrize(
    ("rank", "positions", "item_rows", "targets", "generator_rows"),
    [
        (0, [0, 1, 1, 2], [2, 3, 1], [(0, 7)], []),
        (1, [2, 3, 4, 0], [0, 1], [(2, 8)], [3]),
        (2, [3], [], [(0, 9)], [0]),
        (3, [], [], [], []),
    ],
)
def test_a_rank_keeps_what_belongs_to_its_tokens(
    rank: int, positions: list[int], item_rows: list[int], targets: list[tuple[int, int]], generator_rows: list[int]
) -> None:
    own = share_input(TEXT, RankShare(SHARES, rank))
    assert own.positions.tolist() == positions
    assert own.num_tokens == len(positions)
    assert own.token_ids is not None and own.token_ids.tolist() == [10 + at for at in SHARES.positions_of(rank)]
    assert own.item_rows is not None and own.item_rows.tolist() == item_rows
    assert own.target_rows is not None and own.targets is not None
    assert list(zip(own.target_rows.tolist(), own.targets.tolist(), strict=True)) == targets
    assert own.generator_rows is not None and own.generator_rows.tolist() == generator_rows
    assert (own.lengths, own.items) == (TEXT.lengths, TEXT.items)  # the mask is the whole microbatch's


def test_a_generator_counts_the_conditions_that_its_tokens_take() -> None:
    rows = torch.tensor([2, 2, 2, 0, 0, 1, 1, 1, 1])
    whole = PackedInput((3, 2, 4), torch.zeros(9, 2, dtype=torch.long), patches=torch.arange(9.0)[:, None], condition_rows=rows)
    found = [share_input(whole, RankShare(SHARES, rank)) for rank in range(4)]
    assert [own.condition_rows.tolist() for own in found if own.condition_rows is not None] == [
        [1, 1, 0, 0],
        [2, 0, 0, 1],
        [0],
        [],
    ]
    assert [own.patches.flatten().tolist() for own in found if own.patches is not None] == [[0, 1, 6, 7], [2, 3, 4, 5], [8], []]


def test_rows_of_patches_end_with_a_token_that_comes_from_none() -> None:
    """Of images with 2 x 2 patches, 3 x 1 and 1 x 3."""
    grids = [(2, 2), (3, 1), (1, 3)]
    places = torch.tensor([(row, column) for rows, columns in grids for row in range(rows) for column in range(columns)])
    assert find_row_ends(places).tolist() == [0, 1, 10, 2, 3, 10, 4, 10, 5, 10, 6, 10, 7, 8, 9, 10]
    assert find_row_ends(places[:0]).tolist() == []


CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}


@pytest.mark.parametrize("constants", [{}, CLIP])
@pytest.mark.parametrize("num_frames", [1, 2])
def test_bytes_are_normalised_channel_by_channel(constants: dict[str, tuple[float, ...]], num_frames: int) -> None:
    image = ImageInput(patch_size=2, num_frames=num_frames, **constants)
    patches = np.arange(3 * 3 * 4 * num_frames, dtype=np.uint8).reshape(3, -1)
    mean, std = (np.array(each, np.float32).reshape(-1, 1) for each in (image.mean, image.std))
    expected = ((patches.reshape(3, 3, -1).astype(np.float32) / np.float32(255) - mean) / std).reshape(3, -1)
    np.testing.assert_array_equal(normalised_patches(torch.from_numpy(patches), image).numpy(), expected)


def test_no_bytes_become_no_values() -> None:
    """A context parallel rank of an encoder may have none of a small image's patches."""
    assert normalised_patches(torch.empty((0, 12), dtype=torch.uint8), ImageInput(patch_size=2)).shape == (0, 12)


@given(st.integers(0, 200), st.integers(1, 20))
def test_parts_are_consecutive_and_alike_the_larger_ones_last(num_rows: int, num_parts: int) -> None:
    parts = sequence_parts(num_rows, num_parts=num_parts)
    sizes = [part.stop - part.start for part in parts]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
    assert len(parts) == max(1, min(num_parts, num_rows))
    assert sizes[0] == min(sizes) and max(sizes) - min(sizes) <= 1


SHAPE = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", "image": {"patch_size": 2, "in_channels": 1}, **SHAPE},
            "llm": {"role": "backbone", **SHAPE},
        }
    }
)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("unit", ["vision", "llm"])
def test_the_four_products_of_a_transformer_layer_overlap(unit: str, num_parts: int) -> None:
    stage = build_stage(GRAPH, unit, groups=groups_of(2), sequence_parallel=True, num_overlapped_parts=num_parts)
    found = {
        name: module.num_overlapped_parts
        for name, module in stage.named_modules()
        if isinstance(module, DeferrableColumnParallelLinear | DeferrableRowParallelLinear)
    }
    overlapped = {name for name, parts in found.items() if parts > 1}
    expected = {
        f"layers.1.{name}"
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    assert overlapped == (expected if num_parts > 1 else set())
    assert all(found[name] == num_parts for name in expected)
