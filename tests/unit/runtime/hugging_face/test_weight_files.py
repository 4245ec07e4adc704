"""Files of weights: every part is what safetensors' own reader finds there, and a damaged file is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.runtime.hugging_face.weight_files import WeightFiles
from multimodal.values.errors import CheckpointError

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


@pytest.mark.parametrize(
    "changes",
    [
        {"data_offsets": [0, 12]},
        {"data_offsets": [8, 40]},
        {"data_offsets": [0.0, 16.0]},
        {"shape": [-2, -2]},
        {"shape": [5]},
        {"dtype": "F64"},
        {"shape": None},
    ],
)
def test_damaged_headers_are_refused(changes: dict[str, object], tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    for described in (entry, entry | changes):
        header = json.dumps({"a": described}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        if described is not entry:
            with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read \(.*\); copy the file again"):
                WeightFiles(tmp_path)
        else:
            WeightFiles(tmp_path)
