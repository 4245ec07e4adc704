"""The index over a manifest, and every way in which a manifest can be wrong."""

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from multimodal.data.image_processing import image_to_patches
from multimodal.data.manifest import ManifestSource
from multimodal.data.tokenizer import ByteTokenizer
from multimodal.values.errors import DataError, ModelError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

ANSWER = {"type": "text", "role": "assistant", "text": "yes"}
QUESTION = {"type": "text", "role": "user", "text": "what?"}
DOCUMENT = {"type": "text", "role": "document", "text": "words"}
AUDIO = {"type": "audio", "path": "a.wav", "seconds": 1.0}
CORPUS = Path(__file__).resolve().parents[4] / "shared" / "data" / "corpus"


def image(path: str, size: tuple[int, int] | None = None) -> dict[str, object]:
    """An image segment."""
    return {"type": "image", "path": path} | ({"width": size[0], "height": size[1]} if size else {})


def test_lengths_text_and_pixels_agree(
    open_manifest: Callable[..., ManifestSource], write_image: Callable[..., str], graph: ModelGraph, tmp_path: Path
) -> None:
    """Two images, one of whose sizes the manifest leaves out, in document order."""
    write_image("a.png", (24, 16))
    write_image("b.png", (8, 40), seed=1)
    source = open_manifest([[image("a.png", (24, 16)), DOCUMENT, image("b.png"), DOCUMENT]])
    assert len(source) == 1 and source.skipped == {} and source.num_cut == 0
    items = (ItemLengths("vision", 24, 6), ItemLengths("vision", 20, 5))
    # begin, 2 x (start, end), marker, 2 x "words", end
    assert source.lengths(0) == SampleLengths(0, items, num_text_tokens=1 + 4 + 1 + 10 + 1, num_target_tokens=11)
    text = source.text(0)
    assert len(text.token_ids) == source.lengths(0).num_tokens
    assert text.item_starts == ((0, 2, 6), (1, 16, 5))
    assert [source.item_grid(0, item) for item in (0, 1)] == [(4, 6), (10, 2)]
    encoder = graph.unit("vision").image
    assert encoder is not None
    for item, name in enumerate(("a.png", "b.png")):
        with Image.open(tmp_path / name) as file:
            expected = image_to_patches(file, image_input=encoder)
        found = source.item(0, item)
        assert found.grid == expected.grid == source.item_grid(0, item)
        np.testing.assert_array_equal(found.patches, expected.patches)


def test_tiles_of_an_image_are_items_that_follow_each_other(
    open_manifest: Callable[..., ManifestSource], write_image: Callable[..., str], graph: ModelGraph
) -> None:
    described = graph.to_dict()
    described["units"]["vision"]["image"] |= {"image_size": 16, "max_tiles": 3}
    tiled = ModelGraph.from_dict(described)
    line = [image(write_image("a.png", (40, 20))), image(write_image("b.png", (20, 20))), ANSWER]
    source = open_manifest([line], graph=tiled, needs_items_first=True)
    assert source.lengths(0).items == (ItemLengths("vision", 16, 4),) * 4
    assert source.text(0).item_starts == ((0, 2, 4), (1, 6, 4), (2, 10, 4), (3, 16, 4))
    left, right, whole, other = (source.item(0, item).patches for item in range(4))
    assert left.shape == right.shape == whole.shape == other.shape and not np.array_equal(left, right)
    with pytest.raises(DataError, match="b.png stands behind text"):
        open_manifest([[line[0], QUESTION, line[1], ANSWER]], graph=tiled, needs_items_first=True)


def test_images_beyond_the_cut_are_dropped(open_manifest: Callable[..., ManifestSource], write_image: Callable[..., str]) -> None:
    """Lengths speak of what is left only."""
    write_image("a.png", (8, 8))
    source = open_manifest([[image("a.png"), DOCUMENT, image("a.png"), DOCUMENT]], seq_length=11)
    assert source.lengths(0) == SampleLengths(0, (ItemLengths("vision", 4, 1),), num_text_tokens=9, num_target_tokens=5)
    assert source.num_cut == 1


def test_overlong_samples_are_left_out_or_refused(open_manifest: Callable[..., ManifestSource]) -> None:
    lines = [[DOCUMENT] * 9, [DOCUMENT]]
    assert open_manifest(lines, seq_length=20).num_cut == 1
    source = open_manifest(lines, seq_length=20, overlong="skip")
    assert len(source) == 1 and source.skipped == {"of more than 20 tokens (--overlong skip)": 1}
    with pytest.raises(DataError, match="line 1.*: more than 20 tokens; raise --seq-length"):
        open_manifest(lines, seq_length=20, overlong="error")


def test_an_answer_that_is_an_image_is_for_the_generator(
    open_manifest: Callable[..., ManifestSource], write_image: Callable[..., str], painter_graph: ModelGraph
) -> None:
    """A model without a generator reads it like any other image."""
    write_image("a.png", (24, 16))
    line = [image("a.png"), QUESTION, {**image("a.png"), "role": "assistant"}]
    source = open_manifest([line], graph=painter_graph)
    assert source.lengths(0).items == (ItemLengths("vision", 24, 6), ItemLengths("painter", 6, 0))
    *_, (item, start, num_tokens) = source.text(0).item_starts
    assert (item, num_tokens) == (1, 0) and source.text(0).is_target[start - 1]
    assert source.text(0).labels[start - 1] == source.text(0).token_ids[start]
    assert source.item(0, 1).grid == source.item_grid(0, 1) == (2, 3)
    assert source.item(0, 1).patches.shape == (6, 3 * 8 * 8)
    assert open_manifest([[*line, ANSWER]]).lengths(0).items == (ItemLengths("vision", 24, 6),) * 2


def test_prefixes_need_images_first(open_manifest: Callable[..., ManifestSource], write_image: Callable[..., str]) -> None:
    """Images behind text are named, with the fix; those that are cut off, or made by nobody yet, do not count."""
    first = [image(write_image("a.png", (8, 8))), image("a.png")]
    source = open_manifest([[*first, QUESTION, ANSWER], [ANSWER]], needs_items_first=True)
    assert [len(source.lengths(index).items) for index in range(len(source))] == [2, 0]
    for wrong in ([QUESTION, image("a.png"), ANSWER], [image("a.png"), ANSWER, image("a.png")]):
        message = r"manifest\.jsonl, line 2 \(sample 's2'\): .*a\.png stands behind text, but .*; put the images first there, or"
        with pytest.raises(DataError, match=f"{message} use --attention-mask embedded"):
            open_manifest([[ANSWER], wrong], needs_items_first=True)
        assert len(open_manifest([[ANSWER], wrong])) == 2
    assert len(open_manifest([[image("a.png"), ANSWER, image("a.png")]], needs_items_first=True, seq_length=9)) == 1


def test_an_image_to_make_needs_no_place_in_a_prefix(
    open_manifest: Callable[..., ManifestSource], write_image: Callable[..., str], painter_graph: ModelGraph
) -> None:
    """It has no tokens in the LLM; but an image to look at behind it stands behind text."""
    seen, made = image(write_image("a.png", (24, 16))), {**image("a.png"), "role": "assistant"}
    assert len(open_manifest([[seen, QUESTION, made]], graph=painter_graph, needs_items_first=True)) == 1
    with pytest.raises(DataError, match="stands behind text"):
        open_manifest([[seen, QUESTION, made, seen]], graph=painter_graph, needs_items_first=True)


def test_samples_the_model_cannot_use_are_counted(
    open_manifest: Callable[..., ManifestSource], write_image: Callable[..., str], text_graph: ModelGraph
) -> None:
    """Audio now; images when no encoder takes them; no target within the limit."""
    write_image("a.png", (8, 8))
    lines = [[AUDIO, ANSWER], [image("a.png"), ANSWER], [QUESTION], [AUDIO, ANSWER], [DOCUMENT]]
    source = open_manifest(lines)
    no_target = "without a target token among the first 1000 (seq_length)"
    assert source.skipped == {"with audio, which no unit of the model takes": 2, no_target: 1}
    assert [len(source.lengths(index).items) for index in range(len(source))] == [1, 0]
    source = open_manifest(lines, graph=text_graph)
    assert source.skipped["with images, which no unit of the model takes"] == 1
    assert len(source) == 1


def test_blank_lines_and_a_folder_are_accepted(write_manifest: Callable[..., Path], graph: ModelGraph) -> None:
    """The folder that holds manifest.jsonl will do."""
    folder = write_manifest([[DOCUMENT], "", [DOCUMENT]]).parent
    assert len(ManifestSource(folder, graph=graph, tokenizer=ByteTokenizer(), seq_length=9)) == 2


def test_a_source_travels_to_loader_workers(
    open_manifest: Callable[..., ManifestSource], write_image: Callable[..., str]
) -> None:
    """A pickled copy answers alike."""
    source = open_manifest([[image(write_image("a.png", (8, 8))), ANSWER]])
    copy = pickle.loads(pickle.dumps(source))
    assert copy.lengths(0) == source.lengths(0)
    np.testing.assert_array_equal(copy.item(0, 0).patches, source.item(0, 0).patches)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "x", "segments": [{"type": "te', "not a complete JSON object .* restore it or remove it"),
        ("[1, 2]", "expected a JSON object, found list"),
        (b"\xff", "not a complete JSON object"),
        (b'{"id": "x", "segments": [{"type": "text", "role": "user", "text": "caf\xe9"}]}', "not a complete JSON object .*utf-8"),
        (b"[" * 100_000, "not a complete JSON object .*recursion"),
        ('{"id": "x", "segments": ' + "[" * 5000 + "]" * 5000 + "}", "not a complete JSON object|expected a JSON object with a"),
        (b'{"id": 1' + b"0" * 5000 + b', "segments": []}', "not a complete JSON object .*4300 digits"),
        ({"id": "s1", "segments": [ANSWER]}, "the id 's1' is already that of line 1; give every sample an id of its own"),
        ({"id": True, "segments": [ANSWER]}, "'id' must be text or a number, found bool"),
        ({"id": None, "segments": [ANSWER]}, "'id' must be text or a number, found NoneType"),
        ('{"id": "x", "segments": [{"type": "image", "path": "a.png", "width": NaN, "height": 8}]}', "found nan and 8"),
        ([image("a.png", (True, 8))], "width and height must be positive whole numbers, found True and 8"),
        ([image("a.png", (-8, 8))], "width and height must be positive whole numbers, found -8 and 8"),
        ([image("a.png", (8.0, 8))], "width and height must be positive whole numbers, found 8.0 and 8"),
        ([image("a.png", ("8", 8))], "width and height must be positive whole numbers, found '8' and 8"),
        ([image("a.png", (-(10**400), 8))], "positive whole numbers, found a number of 1329 bits and 8"),
        ([{"type": "image", "path": 3}], "'path' must be text, found int"),
        ([image("")], "no file can be called ''"),
        ([image("a\0.png")], r"no file can be called 'a\\x00\.png'; correct 'path'"),
        ([image("\ud800.png")], r"no file can be called '\\ud800\.png'; correct 'path'"),
        (
            [{**image("a.png"), "role": "asistant"}, ANSWER],
            "unknown role 'asistant'; use one of user, assistant, document, system, or",
        ),
        ([image("..")], r"\.\. does not exist"),
        ({"segments": [ANSWER]}, "the key 'id' is missing; found 'segments'"),
        ({"id": "x"}, r"\(sample 'x'\): the key 'segments' is missing"),
        ({"id": "x", "segments": {}}, "'segments' must be a list, found dict"),
        ([], "'segments' is empty"),
        (["text"], "segment 0: expected a JSON object with a 'type', found str"),
        ([ANSWER, {"type": "video", "path": "v"}], "segment 1: unknown segment type 'video'; use one of text, image, audio"),
        ([{"role": "user", "text": ""}], "the key 'type' is missing"),
        ([{"type": "text", "role": "user"}], "the key 'text' is missing"),
        ([{"type": "text", "text": "a"}], "the key 'role' is missing"),
        ([{"type": "text", "role": "tool", "text": "a"}], "unknown role 'tool'; use one of user, assistant, document, system"),
        ([{"type": "text", "role": "user", "text": 3}], "'text' must be text, found int"),
        ([{"type": "image", "width": 3, "height": 3}], "the key 'path' is missing"),
        ([{"type": "image", "path": "a.png", "width": 3}], "width and height must be positive whole numbers, found 3 and None"),
        ([image("a.png", (0, 3))], "width and height must be positive whole numbers, found 0 and 3"),
        ([image("gone.png", (8, 8)), ANSWER], r"gone\.png does not exist; restore the file or remove that line"),
        ([image("text.png"), ANSWER], r"text\.png cannot be decoded as an image"),
        ([image("a.png", (12000, 12000)), ANSWER], r"a\.png has 12,000 x 12,000 pixels, but .* raise --max-image-pixels"),
        ([image("a.png", (10**400, 8)), ANSWER], r"a\.png has more than 10\^15 x 8 pixels, but no more than"),
        (
            [image("text.png", (8, 1608)), ANSWER],
            r"text\.png: an image of 8x1608 pixels is more than 200 times .*remove that line",
        ),
    ],
)
def test_a_wrong_line_is_named(
    open_manifest: Callable[..., ManifestSource], write_image: Callable[..., str], tmp_path: Path, line: object, message: str
) -> None:
    """Every fault names manifest and line, and the sample once that is known."""
    write_image("a.png", (8, 8))
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DataError, match=f"manifest.jsonl, line 2.*{message}"):
        open_manifest([[ANSWER], line])


def test_missing_and_empty_manifests(open_manifest: Callable[..., ManifestSource], tmp_path: Path, graph: ModelGraph) -> None:
    """Nothing there, nothing in it, nothing usable in it."""
    with pytest.raises(DataError, match=r"gone\.jsonl: no such manifest; give --data-path"):
        ManifestSource(tmp_path / "gone.jsonl", graph=graph, tokenizer=ByteTokenizer(), seq_length=9)
    (tmp_path / "folder" / "manifest.jsonl").mkdir(parents=True)
    for wrong in ("folder", "folder/manifest.jsonl"):
        with pytest.raises(DataError, match=r"manifest\.jsonl: no such manifest; give --data-path"):
            ManifestSource(tmp_path / wrong, graph=graph, tokenizer=ByteTokenizer(), seq_length=9)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(DataError, match=r"packed\.gz, line 1: the manifest is compressed, expected JSON; unpack it first"):
        ManifestSource(tmp_path / "packed.gz", graph=graph, tokenizer=ByteTokenizer(), seq_length=9)
    with pytest.raises(DataError, match=r"manifest\.jsonl: the manifest is empty"):
        open_manifest([])
    with pytest.raises(DataError, match=r"no usable sample \(2 samples with audio"):
        open_manifest([[AUDIO, ANSWER]] * 2)


def test_a_file_that_changed_since_is_named(
    open_manifest: Callable[..., ManifestSource], write_image: Callable[..., str]
) -> None:
    """The error of a loader worker still says which line of which manifest."""
    source = open_manifest([[image(write_image("a.png", (8, 8)), (8, 9)), ANSWER]])
    with pytest.raises(DataError, match=r"line 1 \(sample 's1'\): .*a\.png is 8x8 pixels but the manifest says 8x9"):
        source.item(0, 0)


def test_items_name_their_unit(
    open_manifest: Callable[..., ManifestSource],
    write_image: Callable[..., str],
    write_audio: Callable[..., str],
    two_encoder_graph: ModelGraph,
) -> None:
    """Where several might take them; those for a unit that the model lacks are left out."""
    write_image("a.png", (8, 8))
    clip = {"type": "audio", "path": write_audio("a.wav", 1601)}
    mine, yours = {**image("a.png"), "unit": "vision"}, {**image("a.png"), "unit": "sketch"}
    source = open_manifest([[yours, clip, mine, DOCUMENT], [{**clip, "unit": "nose"}, DOCUMENT]], graph=two_encoder_graph)
    assert source.skipped == {"with audio for 'nose', which no unit of the model takes": 1}
    lengths = source.lengths(0)
    assert lengths.items == (ItemLengths("sketch", 4, 1), ItemLengths("ear", 6, 3), ItemLengths("vision", 4, 1))
    assert [source.item_grid(0, item) for item in range(3)] == [(2, 2), (11, 1), (2, 2)]
    assert source.item(0, 1).patches.shape == (6, 5 * 4)
    message = r'line 1 .*: a.png might be for any of the units vision, sketch; say for which: "unit": "vision"'
    with pytest.raises(DataError, match=message):
        open_manifest([[image("a.png"), DOCUMENT]], graph=two_encoder_graph)


def test_models_that_cannot_take_image_files(open_manifest: Callable[..., ManifestSource], graph: ModelGraph) -> None:
    changed = graph.to_dict()
    changed["units"]["vision"]["image"]["in_channels"] = 4
    with pytest.raises(ModelError, match="unit 'vision': in_channels is 4"):
        open_manifest([[ANSWER]], graph=ModelGraph.from_dict(changed))


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not beside this checkout (../shared/data/corpus)")
def test_the_real_corpus() -> None:
    """All samples without audio are read; photos, figures, pages and characters decode to the promised lengths."""
    graph = ModelGraph.from_file(Path(__file__).resolve().parents[3] / "examples" / "corpus" / "model.yaml")
    source = ManifestSource(CORPUS, graph=graph, tokenizer=ByteTokenizer(), seq_length=8192)
    assert len(source) == 497 and sum(source.skipped.values()) == 447
    lengths = [source.lengths(index) for index in range(len(source))]
    assert max(len(sample.items) for sample in lengths) >= 6
    assert all(item.num_tokens == 4 * item.num_output_tokens <= 200704 / 14**2 for sample in lengths for item in sample.items)
    for index in range(0, len(source), 50):
        assert len(source.text(index).token_ids) == lengths[index].num_tokens <= 8192
        for item_index, item in enumerate(lengths[index].items):
            assert source.item(index, item_index).patches.shape == (item.num_tokens, 3 * 14 * 14)
