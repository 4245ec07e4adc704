"""Peaks of known accelerators, from their makers' data sheets (dense, without sparsity)."""

from collections.abc import Mapping

PEAK_TFLOPS: Mapping[str, Mapping[str, float]] = {
    "H200": {"bfloat16": 989.0, "float32": 67.0, "float64": 67.0},
    "H100": {"bfloat16": 989.0, "float32": 67.0, "float64": 67.0},
    "H800": {"bfloat16": 989.0, "float32": 67.0, "float64": 1.0},
    "B200": {"bfloat16": 2250.0, "float32": 80.0, "float64": 40.0},
    "A100": {"bfloat16": 312.0, "float32": 19.5, "float64": 19.5},
    "A800": {"bfloat16": 312.0, "float32": 19.5, "float64": 9.7},
    "A40": {"bfloat16": 149.7, "float32": 37.4, "float64": 0.58},
    "L40S": {"bfloat16": 362.0, "float32": 91.6, "float64": 1.4},
}
"""Part of the device's name -> dtype -> TFLOP/s."""


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Peak of a device in TFLOP/s, or None when it is not in the table."""
    for name, peaks in PEAK_TFLOPS.items():
        if name in device_name:
            return peaks[dtype]
    return None
