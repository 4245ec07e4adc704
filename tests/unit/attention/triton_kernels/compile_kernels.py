"""Compile every kernel of attention and of the loss for a GPU that need not be there; prints a JSON object per kernel.

The interpreter forgives what the compiler does not: a variable of two types, a tile that fits no shared memory.
"""

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from multimodal.attention.triton_kernels import backward
from multimodal.attention.triton_kernels.forward import forward_kernel, join_outputs_kernel
from multimodal.attention.triton_kernels.options import TileSizes, choose_options
from multimodal.model.layers.cross_entropy_kernels import MOST_COLUMNS, NUM_WARPS, gradient_kernel, row_sums_kernel

FLOAT32_BUFFERS = ("log_sums", "deltas", "partial", "partial_output", "partial_log_sums", "partial_key", "partial_value")
FLOAT32_BUFFERS += ("found", "largest", "totals", "scales")
INT32_BUFFERS = ("query_ids", "key_ids", "blocks", "items", "counter", "split_rows")
INT64_BUFFERS = ("query_bits", "key_bits", "targets")
INPUTS = ("logits", "query", "key", "value", "output", "output_gradient", "gradient")
INPUTS += ("query_gradient", "key_gradient", "value_gradient")


def type_of(name: str) -> str:
    types = dict.fromkeys(FLOAT32_BUFFERS, "*fp32") | dict.fromkeys(INT32_BUFFERS, "*i32") | dict.fromkeys(INT64_BUFFERS, "*i64")
    types |= dict.fromkeys(INPUTS, "*bf16") | dict.fromkeys(("scale", "scale_log2"), "fp32")
    return "constexpr" if name.isupper() else types.get(name, "i32")


def compile_kernel(kernel: Any, tiles: TileSizes, *, channels: int, capability: int) -> dict[str, Any]:
    """Compile for a compute capability as bfloat16 inputs with four query heads per key head need it."""
    constants = {"HEADS_PER_GROUP": 4, "CHANNELS": channels, "PADDED_CHANNELS": 1 << (channels - 1).bit_length(), "BLOCK": 128}
    constants |= {"TILE_ROWS": tiles.rows, "TILE_COLUMNS": tiles.columns, "DOT_TYPE": tl.bfloat16, "WINDOW": 4096}
    constants |= {"IS_DYNAMIC": True, "COLUMNS": MOST_COLUMNS}
    names = kernel.arg_names
    types = {name: type_of(name) for name in names}
    aligned = [index for index, name in enumerate(names) if types[name].startswith("*") or name.endswith(("stride", "width"))]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "kernel": kernel.__name__,
        "shared_bytes": compiled.metadata.shared,
        "specialized_sizes": [each.name for each in kernel.params if each.name.startswith("num_") and not each.do_not_specialize],
        "has_matrix_instructions": "wgmma.mma_async" in compiled.asm["ptx"],
        **resources(compiled.asm["cubin"]),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and the bytes that it keeps elsewhere because there are no more."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(re.findall(rf"{key}:(\d+)", told)[-1]) for name, key in (("registers", "REG"), ("spilled_bytes", "STACK"))}


def main() -> None:
    """Compile for a head size, a compute capability and its shared memory."""
    channels, capability, shared_memory_bytes = map(int, sys.argv[1:])
    join, rows = TileSizes(64, 64, 4, 1), TileSizes(1, MOST_COLUMNS, NUM_WARPS, 3)
    options = choose_options(channels, dtype=torch.bfloat16, block_size=128, shared_memory_bytes=shared_memory_bytes)
    for kernel, tiles in (
        (forward_kernel, options.forward),
        (backward.query_gradient_kernel, options.query_gradient),
        (backward.key_value_gradient_kernel, options.key_value_gradient),
        (join_outputs_kernel, join),
        (backward.join_gradients_kernel, join),
        (backward.delta_kernel, join),
        (row_sums_kernel, rows),
        (gradient_kernel, rows),
    ):
        print(json.dumps(compile_kernel(kernel, tiles, channels=channels, capability=capability)))


if __name__ == "__main__":
    main()
