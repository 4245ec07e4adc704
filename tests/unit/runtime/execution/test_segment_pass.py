"""A stage in ranges of segments: outputs, losses and gradients of the whole stage, whatever the ranges."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from megatron.runtime import platform
from multimodal.cost.layers.registry import count_segments
from multimodal.values.errors import ConfigError
from tests.distributed.segment_ranges import RangeCase, build_stage, compare, draw_bounds, sizes_of_pieces


@pytest.fixture(autouse=True)
def world_of_one(tmp_path: Path) -> Iterator[None]:
    platform.install()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


GATED = {"activation": "swiglu", "normalization": "RMSNorm", "num_query_groups": 2}
PLAIN = {"activation": "gelu", "normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": True}


def is_deep(case: RangeCase, transformer: dict[str, object], recompute: str | None) -> bool:
    """Tell what differs from every case of one transformer, and a whole stage with all that recomputes."""
    return case != RangeCase("vision") and (transformer, recompute) != (GATED, None)


@pytest.mark.deep(when=is_deep)
@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("transformer", [GATED, PLAIN])
@pytest.mark.parametrize(
    "case",
    [
        RangeCase("vision"),
        RangeCase("vision", num_frozen=2),
        RangeCase("vision", num_frozen=4, has_backward=False),
        RangeCase("vision", first=1, last=3),
        RangeCase("llm"),
        RangeCase("llm", first=1, last=4, num_frozen=1),
        RangeCase("vision", deepstack=(0, 1)),
        RangeCase("vision", first=2, last=4, deepstack=(0, 1)),
        RangeCase("vision", first=1, last=2, deepstack=(0,)),
        RangeCase("llm", last=2, deepstack=(0, 1)),
        RangeCase("llm", first=2, last=3, deepstack=(0, 1)),
    ],
    ids=lambda case: " ".join(f"{name}={value}" for name, value in vars(case).items() if value != getattr(RangeCase, name, None)),
)
def test_any_ranges_give_what_the_whole_stage_gives(case, transformer, recompute):
    chosen = RangeCase(**{**vars(case), "transformer": transformer, "recompute": recompute})
    count = build_stage(chosen).segments().num_segments
    every = list(range(1, count))
    compare(chosen, [([], []), (every, every), ([], every), (every, []), *(draw_bounds(count, seed) for seed in range(2))])


def test_a_transformer_layer_has_seven_segments_and_other_layers_one():
    stage = build_stage(RangeCase("vision"))
    assert stage.segments().num_segments == count_segments(stage.unit, stage.layer_range) == 1 + 2 * 7 + 1


@pytest.mark.parametrize(
    ("options", "lora", "problem"),
    [
        ({"fp8_format": "hybrid"}, None, "products are not in FP8; leave out --fp8-format"),
        ({"transformer_impl": "transformer_engine"}, Mock(), "adapters of Transformer Engine's layers .*; use --transformer"),
    ],
)
def test_what_cannot_be_cut(options, lora, problem):
    stage = build_stage(RangeCase("vision", first=1, last=3))
    unit = replace(stage.unit, lora=lora)
    stage.options, stage.unit, stage.groups = replace(stage.options, **options), unit, Mock(tp=Mock(size=lambda: 2))
    stage.context = replace(stage.context, unit=unit, options=stage.options)
    with pytest.raises(ConfigError, match=rf"^unit 'vision', layers 1 to 2: .* {problem}"):
        stage.segments()


def test_layers_whose_weights_come_and_go_cannot_be_cut():
    stage = build_stage(RangeCase("vision"))
    stage.guard = Mock()
    with pytest.raises(
        ConfigError, match=r"^unit 'vision', layers 0 to 3: .* weights are sharded .*; leave out --data-parallel-sh"
    ):
        stage.segments()


def test_memory_grows_with_forward_pieces_and_goes_with_backward_ones():
    case = RangeCase("vision", first=1, last=3)
    grown, whole = sizes_of_pieces(case, [2, 4, 7, 11])
    assert all(first < second for first, second in pairwise(grown[:4]))
    assert all(first > second for first, second in pairwise(grown[5:]))
    assert grown[-1] == 8 * 16 * 8  # the gradient of the stage's input
    assert grown[4] == whole + 2 * 2 * 8 * 16 * 8  # what comes out of both sums of both layers
