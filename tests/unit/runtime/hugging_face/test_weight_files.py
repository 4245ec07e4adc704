"""Files of weights: every part is what safetensors' own reader finds there, and a damaged file is refused."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.runtime.hugging_face.weight_files import WeightFiles
from multimodal.values.errors import CheckpointError
from tests.unit.golden_answers import Kinds, golden_test

WEIGHTS = {
    "scale": torch.tensor(3.0),
    "bias": torch.arange(7).bfloat16(),
    "patch": torch.randn(6, 2, 2),
    "matrix": torch.randn(9, 4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [range(4), range(1, 3)])
def test_parts_are_read_in_any_type(dtype: torch.dtype, columns: range, tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with WeightFiles(tmp_path) as files:
        assert files.metadata == {"model.safetensors": {"format": "pt"}}
        assert all(torch.equal(files.read_whole(key), values) for key, values in WEIGHTS.items())
        for key in ("patch", "matrix"):
            target = torch.zeros(3, len(columns), dtype=dtype)
            read = list(files.read(key, range(2, 5), columns, row_size=4, target=target))
            assert torch.equal(target, WEIGHTS[key].view(-1, 4)[2:5, columns.start : columns.stop].to(dtype))
            assert torch.equal(torch.cat([each.view(-1) for each in read]), target.view(-1))


def read_header(entry: Mapping[str, Any]) -> str | None:
    """Open a file of 16 bytes behind a header with one tensor; safetensors' own words change with its version."""
    header = json.dumps({"a": entry}).encode()
    Path("model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    try:
        WeightFiles(Path())
    except CheckpointError as problem:
        return re.sub(r"[(].*[)]", "(why)", str(problem))
    return None


HEADERS: Kinds = {"header": ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, read_header)}
test_damaged_headers_are_refused = golden_test("headers.txt", HEADERS)
