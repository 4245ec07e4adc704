"""The kernels in Triton's interpreter, which runs them on the CPU (see tests/conftest.py); `tests/gpu` runs them compiled."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from multimodal.attention.block_attention import attend_densely
from multimodal.attention.triton_kernels.options import KernelOptions, TileSizes, choose_options
from multimodal.attention.triton_kernels.triton_attention import attend_by_triton
from multimodal.values.errors import ConfigError
from tests.unit.attention.mask_cases import MASKS, build_mask, draw_inputs, largest_error, named_mask, output_and_gradients

pytest.importorskip("triton", reason="Triton is not installed (pip install 'braid[triton]')")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: tests/gpu has them", allow_module_level=True)


WIDE, NARROW = TileSizes(32, 16, 4, 1), TileSizes(16, 32, 4, 1)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def options(max_blocks_per_item: int | None, *tiles: TileSizes) -> KernelOptions:
    forward, query_gradient, key_value_gradient = tiles or (TileSizes(16, 16, 4, 1),) * 3
    return KernelOptions(forward, query_gradient, key_value_gradient, max_blocks_per_item=max_blocks_per_item)


@pytest.mark.deep(when=lambda name: name not in ("packed, empty modalities", "window of 20"))
@pytest.mark.parametrize("name", MASKS)
def test_kernels_give_the_references_output_and_gradients(name: str) -> None:
    mask = named_mask(name)
    inputs = draw_inputs(mask, channels=16)
    expected = output_and_gradients(attend_densely, inputs, mask)
    attend = partial(attend_by_triton, options=options(2))
    assert largest_error(output_and_gradients(attend, inputs, mask, torch.float32), expected) < TOLERANCE[torch.float32]


@pytest.mark.deep(when=lambda chosen: chosen in (options(None), options(1)))  # others cut items, and have larger tiles
@pytest.mark.parametrize(
    ("rule", "drawn", "chosen"),
    [
        ({}, {"groups": 2}, options(None)),
        ({}, {"groups": 2}, options(1)),
        ({"block_size": 32}, {"heads": 3, "channels": 20}, options(1, WIDE, NARROW, NARROW)),
        ({"query_blocks": (1, 3)}, {}, options(2)),
    ],
    ids=["unbalanced", "balanced", "heads of odd size in groups, tiles inside blocks", "queries of some blocks"],
)
def test_balancing_tiles_and_heads_change_nothing(rule: dict[str, Any], drawn: dict[str, int], chosen: KernelOptions) -> None:
    mask = build_mask(MASKS["embedded"][1], mode="embedded", **rule)
    inputs = draw_inputs(mask, **{"channels": 16, **drawn})
    expected = output_and_gradients(attend_densely, inputs, mask)
    attend = partial(attend_by_triton, options=chosen)
    assert largest_error(output_and_gradients(attend, inputs, mask, torch.float32), expected) < TOLERANCE[torch.float32]


@pytest.mark.deep(when=lambda dtype: dtype == torch.float16)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    mask = build_mask(MASKS["prefix"][1], mode="prefix")
    inputs = tuple(tensor.to(dtype).double() for tensor in draw_inputs(mask, channels=16))
    expected = output_and_gradients(attend_densely, inputs, mask)
    found = output_and_gradients(partial(attend_by_triton, options=options(2)), inputs, mask, dtype)
    assert {tensor.dtype for tensor in found} == {dtype}
    assert largest_error(found, expected) < TOLERANCE[dtype]


def test_inputs_may_be_strided_views() -> None:
    mask = build_mask(MASKS["causal"][1], mode="causal")
    query, key, value, _ = (tensor.float() for tensor in draw_inputs(mask, heads=2, groups=2, channels=16))
    joined = torch.cat((query, key, value), dim=2)  # one tensor per head, as a projection gives them
    found = attend_by_triton(*joined.split(16, dim=2), mask=mask, softmax_scale=0.5, options=options(2))
    assert largest_error((found,), (attend_densely(query, key, value, mask=mask, softmax_scale=0.5),)) < TOLERANCE[torch.float32]


def test_empty_blocks_are_never_visited() -> None:
    mask = build_mask(MASKS["packed, empty modalities"][1], mode="embedded", query_blocks=(0,))
    query, key, value, _ = (tensor.float() for tensor in draw_inputs(mask, channels=16))
    key[16:], value[16:] = torch.nan, torch.nan
    assert attend_by_triton(query, key, value, mask=mask, softmax_scale=None, options=options(2)).isfinite().all()


@pytest.mark.parametrize("channels", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared_memory_bytes", [99 * 1024, 227 * 1024])
def test_chosen_tiles_divide_the_block(channels: int, dtype: torch.dtype, shared_memory_bytes: int) -> None:
    for block_size in (16, 64, 128):
        chosen = choose_options(channels, dtype=dtype, block_size=block_size, shared_memory_bytes=shared_memory_bytes)
        for tiles in (chosen.forward, chosen.query_gradient, chosen.key_value_gradient):
            assert block_size % tiles.rows == block_size % tiles.columns == 0 and min(tiles.rows, tiles.columns) >= 16


def test_what_the_kernels_do_not_take_is_refused() -> None:
    mask = build_mask(MASKS["causal"][1], mode="causal")
    with pytest.raises(ConfigError, match="takes float16, bfloat16 and float32, not torch.float64"):
        attend_by_triton(*draw_inputs(mask)[:3], mask=mask, softmax_scale=None)
    with pytest.raises(ConfigError, match="heads of 257 channels are too large"):
        choose_options(257, dtype=torch.float16, block_size=128)


ROOT = Path(__file__).parents[4]
GPUS = ((128, 90, 227 * 1024), (80, 86, 99 * 1024))
"""Channels of a head, compute capability, shared memory of a program in bytes."""


@pytest.mark.deep(when=lambda gpu: gpu != GPUS[0])
@pytest.mark.parametrize("gpu", GPUS, ids=["H100", "A40"])
def test_kernels_compile_and_fit(tmp_path: Path, gpu: tuple[int, int, int]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "tests/unit/attention/triton_kernels/compile_kernels.py", *map(str, gpu)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    kernels, (_, capability, shared_bytes) = [json.loads(line) for line in ended.stdout.splitlines()], gpu
    assert all(kernel["shared_bytes"] <= shared_bytes for kernel in kernels)
    spilled = [kernel["spilled_bytes"] for kernel in kernels]
    assert max(spilled) <= (64 if capability == 90 else 256) and not any(spilled[3:]), kernels
    assert capability != 90 or kernels[0]["registers"] < 255 > max(kernel["registers"] for kernel in kernels[3:])
    assert [kernel["has_matrix_instructions"] for kernel in kernels] == [capability == 90] * 3 + [False] * 5
    sizes = {size for kernel in kernels for size in kernel["specialized_sizes"]}
    assert sizes == {"num_heads", "num_groups", "num_known"}, (
        "others change with the microbatch, and each variant takes a while to compile"
    )
