"""Packed microbatches against their samples, one by one."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from multimodal.data.manifest import ManifestSource
from multimodal.data.packing import pack_encoder_microbatch, pack_language_microbatch
from multimodal.data.source_views import SamplesById
from multimodal.values.assignment import Atom
from multimodal.values.model_graph import ImageInput
from tests.unit.data.conftest import DataFolder

IMAGE = ImageInput(patch_size=4)
INDEX_OF_SAMPLE = {70: 0, 71: 1, 72: 2}


@pytest.fixture
def source(data: DataFolder) -> ManifestSource:
    """Two images, none, one image."""
    first, second, third = (
        {"type": "image", "path": data.image(f"{number}.png", size, seed=number)}
        for number, size in enumerate([(24, 16), (8, 8), (16, 32)])
    )
    words = {"type": "text", "role": "document", "text": "words"}
    return data.open([[first, words, second], [words], [words, third, words]])


def test_encoder_microbatch_holds_the_items_in_order(source: ManifestSource) -> None:
    """Patches, positions and bounds of each atom are those of the item itself."""
    atoms = [Atom(72, 0), Atom(70, 1), Atom(70, 0)]
    batch = pack_encoder_microbatch(atoms, source=SamplesById(source, INDEX_OF_SAMPLE), item_input=IMAGE, with_pixels=True)
    assert batch.cu_seqlens.tolist() == [0, 32, 36, 60] and batch.cu_seqlens.dtype == torch.int32
    assert batch.positions.dtype == torch.int64 and batch.positions.shape == (60, 2)
    assert batch.positions[32:36].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert batch.positions[36:].max(dim=0).values.tolist() == [3, 5]
    assert batch.patches is not None and batch.patches.dtype == torch.uint8
    expected = [source.item(index, item).patches for index, item in ((2, 0), (0, 1), (0, 0))]
    np.testing.assert_array_equal(batch.patches.numpy(), np.concatenate(expected))


def test_later_stages_decode_nothing(source: ManifestSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pixels the files are not touched, and all else is the same."""
    atoms = [Atom(70, 0), Atom(72, 0)]
    full = pack_encoder_microbatch(atoms, source=SamplesById(source, INDEX_OF_SAMPLE), item_input=IMAGE, with_pixels=True)
    monkeypatch.delattr(ManifestSource, "item")
    light = pack_encoder_microbatch(atoms, source=SamplesById(source, INDEX_OF_SAMPLE), item_input=IMAGE, with_pixels=False)
    assert light.patches is None
    assert torch.equal(light.positions, full.positions) and torch.equal(light.cu_seqlens, full.cu_seqlens)


def test_language_microbatch_holds_the_samples_in_order(source: ManifestSource) -> None:
    """Every sample's slice is its own text, and every span holds placeholders only."""
    batch = pack_language_microbatch([Atom(71), Atom(70), Atom(72)], source=SamplesById(source, INDEX_OF_SAMPLE))
    assert batch.sample_ids == (71, 70, 72)
    assert batch.cu_seqlens.dtype == torch.int32 and batch.cu_seqlens[-1] == len(batch.token_ids)
    for position, index in enumerate((1, 0, 2)):
        part = slice(*batch.cu_seqlens[position : position + 2].tolist())
        text = source.text(index)
        assert batch.token_ids[part].tolist() == text.token_ids.tolist()
        assert batch.labels[part].tolist() == text.labels.tolist()
        assert batch.is_target[part].tolist() == text.is_target.tolist()
        assert batch.position_ids[part].tolist() == list(range(len(text.token_ids)))
    assert {atom: length for atom, (_, length) in batch.item_spans.items()} == {Atom(70, 0): 6, Atom(70, 1): 1, Atom(72, 0): 8}
    covered = sorted(place for start, length in batch.item_spans.values() for place in range(start, start + length))
    placeholder = source.text(0).token_ids[2]
    assert covered == torch.nonzero(batch.token_ids == placeholder).flatten().tolist()


def test_microbatches_travel_between_processes(source: ManifestSource) -> None:
    """Loader workers hand them over pickled."""
    batch = pack_language_microbatch([Atom(70)], source=SamplesById(source, INDEX_OF_SAMPLE))
    copy = pickle.loads(pickle.dumps(batch))
    assert copy.item_spans == batch.item_spans and torch.equal(copy.token_ids, batch.token_ids)


@pytest.mark.parametrize(("class_token", "rows"), [("dropped", (24, 29)), ("kept", (0, 25))])
def test_every_image_may_have_a_class_token(class_token: str, rows: tuple[int, int], source: ManifestSource) -> None:
    """Behind its patches where it is dropped later, so that outputs keep their places; else before them."""
    atoms = [Atom(70, 0), Atom(70, 1)]
    given = {"source": SamplesById(source, INDEX_OF_SAMPLE), "with_pixels": True}
    inputs = IMAGE, replace(IMAGE, class_token=class_token)
    plain, batch = (pack_encoder_microbatch(atoms, **given, item_input=each) for each in inputs)
    is_class = (batch.positions == -1).all(dim=1)
    assert batch.cu_seqlens.tolist() == [0, 25, 30]
    assert tuple(is_class.nonzero()[:, 0].tolist()) == rows
    assert batch.patches is not None and plain.patches is not None
    assert not batch.patches[is_class].any()
    assert torch.equal(batch.patches[~is_class], plain.patches)
    assert torch.equal(batch.positions[~is_class], plain.positions)
