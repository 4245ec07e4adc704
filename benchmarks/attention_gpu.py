"""Claim: on irregular masks Braid's attention is at least 1.15 times as fast as FlexAttention, and never slower on any.

Both, and scaled dot product attention under a dense mask, attend over the same packed multimodal sequences in bfloat16, forward
and backward, in one run: masks causal (one text), prefix (a fifth of a sample is items before its text), embedded (items anywhere
in one document) and packed (many such documents), 8k to 64k tokens. FlexAttention is compiled and its block mask is built
before; so are Braid's work lists, with intra-GPU balancing on and off. TFLOP/s count the visible pairs of query and key alone
(4 x heads x channels operations each in the forward, 10 in the backward), beside what a matrix product reaches on the same card.
The aim for the causal forward at 64k with heads of 128 channels is 60 % of that. Every result is first checked against
FlexAttention's.

Run `python benchmarks/attention_gpu.py [--json] [--tokens 8192 ...] [--channels 128] [--repeats N]` on a machine with CUDA;
without one it says so and ends. `--sub-blocks 8 16 32` compares lengths of sub-blocks. Needs torch and Triton only.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch._functorch.config
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from multimodal.attention.attention_backend import AttentionBackend, AttentionMask, load_backend
from multimodal.attention.bitfield import MaskSegment, build_bitfield_mask
from multimodal.attention.block_summary import count_block_workloads

DTYPE = torch.bfloat16
DENSE_LIMIT = 16384
"""Largest number of tokens at which a dense mask and its scores are tried."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one implementation of attention on one mask."""

    mask: str
    num_tokens: int
    backend: str
    forward_ms: float
    backward_ms: float
    forward_tflops: float
    backward_tflops: float
    forward_peak_share: float


def draw_mask(family: str, num_tokens: int, *, seed: int = 0) -> AttentionMask:
    """Return a mask of a family; it is the same in every run."""
    random = Random(f"{family} {num_tokens} {seed}")
    if family == "causal":
        samples = [[MaskSegment(num_tokens)]]
    elif family == "prefix":
        samples = [[MaskSegment(num_tokens // 5, "vision", 0), MaskSegment(num_tokens - num_tokens // 5)]]
    else:
        samples, left = [], num_tokens
        while left:
            length = left if family == "embedded" else min(left, int(random.lognormvariate(8, 1)) + 16)
            samples.append(_document(length, random))
            left -= length
    tokens = build_bitfield_mask(samples, modalities=("vision",), mode="prefix" if family == "prefix" else "embedded")
    return AttentionMask(tokens)


def _document(num_tokens: int, random: Random) -> list[MaskSegment]:
    """Return text and images in turn, with lengths as skewed as those of documents."""
    segments: list[MaskSegment] = []
    while num_tokens:
        is_item = len(segments) % 2 == 1
        length = min(num_tokens, int(random.lognormvariate(7 if is_item else 5, 1)) + 1)
        segments.append(MaskSegment(length, "vision", len(segments)) if is_item else MaskSegment(length))
        num_tokens -= length
    return segments


def attend_with_dense_mask(query: Tensor, key: Tensor, value: Tensor, *, is_visible: Tensor) -> Tensor:
    """Compute torch's attention, which reads the whole mask."""
    inputs = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return scaled_dot_product_attention(*inputs, attn_mask=is_visible, enable_gqa=True)[0].transpose(0, 1)


def time_ms(run: Callable[[], object], *, repeats: int) -> float:
    """Return the median time on the device, in ms."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def measure_matrix_peak_tflops(*, repeats: int, size: int = 8192) -> float:
    """Return the TFLOP/s that a large matrix product reaches."""
    left, right = (torch.randn(size, size, device="cuda", dtype=DTYPE) for _ in range(2))
    return 2 * size**3 / time_ms(lambda: left @ right, repeats=repeats) / 1e9


def list_ways(mask: AttentionMask, *, channels: int, sub_blocks: list[int], with_dense: bool) -> dict[str, AttentionBackend]:
    """Return name -> implementation of everything that is compared."""
    from multimodal.attention.triton_kernels.options import choose_options

    chosen = choose_options(channels, dtype=DTYPE, block_size=mask.block_size)
    triton: Callable[..., torch.Tensor] = load_backend("triton")
    ways: dict[str, AttentionBackend] = {
        f"Braid, sub-blocks of {length}": partial(triton, options=replace(chosen, max_blocks_per_item=length))
        for length in sub_blocks
    }
    ways["Braid, unbalanced"] = partial(triton, options=replace(chosen, max_blocks_per_item=None))
    ways["FlexAttention"] = load_backend("flex")
    if with_dense:
        is_visible = torch.from_numpy(mask.tokens.to_dense()).cuda()
        ways["SDPA, dense mask"] = lambda query, key, value, **_: attend_with_dense_mask(query, key, value, is_visible=is_visible)
    return ways


def measure_mask(family: str, num_tokens: int, given: argparse.Namespace, *, peak_tflops: float) -> list[Measured]:
    """Measure all implementations on one mask; raises if their results differ."""
    mask = draw_mask(family, num_tokens)
    num_pairs = int(count_block_workloads(mask.tokens).visible_pairs.sum())
    torch._functorch.config.donated_buffer = False  # a backward that may overwrite its buffers cannot be repeated
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(num_tokens, heads, given.channels) for heads in (given.heads, given.groups, given.groups, given.heads)]
    query, key, value, gradient = (torch.randn(shape, device="cuda", dtype=DTYPE, generator=generator) for shape in shapes)
    leaves = tuple(tensor.requires_grad_() for tensor in (query, key, value))
    expected = load_backend("flex")(*leaves, mask=mask, softmax_scale=None).detach()
    measured = []
    ways = list_ways(mask, channels=given.channels, sub_blocks=given.sub_blocks, with_dense=num_tokens <= DENSE_LIMIT)
    for name, attend in ways.items():
        run = partial(attend, *leaves, mask=mask, softmax_scale=None)
        output = run()
        difference = float((output - expected).abs().max())
        if difference > 0.05:
            raise SystemExit(f"{name} differs from FlexAttention by {difference} on {family} masks of {num_tokens} tokens")
        with torch.no_grad():
            forward_ms = time_ms(run, repeats=given.repeats)
        backward = partial(torch.autograd.grad, output, leaves, gradient, retain_graph=True)
        backward_ms = time_ms(backward, repeats=given.repeats)
        flops = num_pairs * given.heads * given.channels
        forward_tflops, backward_tflops = 4 * flops / forward_ms / 1e9, 10 * flops / backward_ms / 1e9
        share = forward_tflops / peak_tflops
        measured.append(Measured(family, num_tokens, name, forward_ms, backward_ms, forward_tflops, backward_tflops, share))
    return measured


def show(rows: list[Measured], *, peak_tflops: float) -> None:
    """Print the table."""
    title = f"{torch.cuda.get_device_name()}, matrix product {peak_tflops:.0f} TFLOP/s"
    table = Table(
        "mask", "tokens", "", "forward ms", "backward ms", "forward TFLOP/s", "backward TFLOP/s", "of peak", title=title
    )
    for row in rows:
        numbers = [row.forward_ms, row.backward_ms, row.forward_tflops, row.backward_tflops]
        shown = [f"{number:.2f}" for number in numbers]
        table.add_row(row.mask, str(row.num_tokens), row.backend, *shown, f"{row.forward_peak_share:.0%}")
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--masks", nargs="+", default=["causal", "prefix", "embedded", "packed"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384, 32768, 65536])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--sub-blocks", nargs="+", type=int, default=[16])
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/attention_gpu.py measures CUDA kernels, and this machine has no CUDA device; nothing was measured")
        return
    peak_tflops = measure_matrix_peak_tflops(repeats=given.repeats)
    rows = [
        row
        for family in given.masks
        for num_tokens in given.tokens
        for row in measure_mask(family, num_tokens, given, peak_tflops=peak_tflops)
    ]
    if given.json:
        print(json.dumps({"peak_tflops": peak_tflops, "rows": [asdict(row) for row in rows]}))
    else:
        show(rows, peak_tflops=peak_tflops)


if __name__ == "__main__":
    main()
