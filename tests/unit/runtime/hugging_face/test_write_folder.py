"""Files beside weights are copied, but none from elsewhere through a link."""

from pathlib import Path

import pytest

from megatron.runtime.hugging_face.write_folder import check_links
from multimodal.values.errors import CheckpointError


def test_links_may_lead_into_the_folder_and_the_hubs_blobs_alone(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "1a2b", tmp_path / "blobs"
    for each in (folder, blobs):
        each.mkdir(parents=True)
    for path in (blobs / "3c4d", folder / "a.json", tmp_path / "secret.txt"):
        path.write_text("{}")
    (folder / "tokenizer.json").symlink_to("../../blobs/3c4d")
    (folder / "b.json").symlink_to("a.json")
    check_links(folder)
    (folder / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(CheckpointError, match=r"notes.txt: is a link to .*secret.txt, outside of the folder"):
        check_links(folder)
