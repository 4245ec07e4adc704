"""The peak that MFU is measured against: from the table of known accelerators, else measured by a matrix product."""

import time

import torch

from megatron.runtime import platform
from multimodal.cost.cluster import peak_tflops

_SIZE = 512
_NUM_PRODUCTS = 8


def find_peak_tflops(dtype: torch.dtype) -> float:
    """TFLOP/s of this process's device; on a CPU what this process gets of it, other ranks computing at the same time."""
    if torch.cuda.is_available():
        known = peak_tflops(torch.cuda.get_device_name(), str(dtype).removeprefix("torch."))
        if known is not None:
            return known
    return _measure_tflops(dtype)


def _measure_tflops(dtype: torch.dtype) -> float:
    matrix = torch.randn(_SIZE, _SIZE, device=platform.device()).to(dtype)
    best_seconds = float("inf")
    for _ in range(_NUM_PRODUCTS):
        _synchronize()
        start = time.perf_counter()
        matrix @ matrix
        _synchronize()
        best_seconds = min(best_seconds, time.perf_counter() - start)
    return 2.0 * _SIZE**3 / best_seconds / 1e12


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
