import gzip
import sys
from types import SimpleNamespace

import pytest

from multimodal.data.length_table import read_length_table, uniform_lengths, write_length_table
from multimodal.values.errors import DataError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths

SHAPE = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16}
GRAPH = ModelGraph.from_dict(
    {
        "units": {
            "vision": {"role": "encoder", **SHAPE},
            "audio": {"role": "encoder", **SHAPE},
            "llm": {"role": "backbone", **SHAPE},
            "painter": {"role": "generator", **SHAPE},
        }
    }
)
HEADER = "sample_id,image_sizes,text_words,text_tokens_gpt2,answer_words,audio_seconds,colour\n"


def test_rows_become_items_and_text(tmp_path):
    path = tmp_path / "lengths.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(HEADER + "x,56x56;84x56,10,20,5,0.5,red\ny,,0,0,,0,\n")
    items = (ItemLengths("vision", 16, 4), ItemLengths("vision", 24, 6), ItemLengths("audio", 25, 6))
    assert read_length_table(path, graph=GRAPH) == (SampleLengths(0, items, 20, 10), SampleLengths(1, (), 1, 1))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", HEADER + "x,56by56,1,1,1,0,\n", "row 1: image_sizes has '56by56'"),
        ("a.csv", HEADER + "x,\u00b2x\u00b2,1,1,1,0,\n", "line 2, row 1: image_sizes has '\u00b2x\u00b2', expected WxH"),
        ("a.csv", HEADER + f"x,{'9' * 400}x8,1,1,1,0,\n", "line 2, row 1: image_sizes has '9+', expected WxH"),
        ("a.csv", HEADER + "x,9999999999x9999999999,1,1,1,0,\n", "line 2, row 1: an image with a side of more than"),
        ("a.csv", HEADER + "x,0x8,1,1,1,0,\n", "line 2, row 1: an image of 0x8 pixels has no area"),
        ("a.csv", HEADER + "x,,1,1,1,long,\n", "line 2, row 1: audio_seconds is 'long', expected a number from 0"),
        ("a.csv", HEADER + 'x,,1,1,1,0,"a\nb"\nx,,1,-3,1,0,\n', "line 4, row 2: text_tokens_gpt2 is '-3'.*correct or remove"),
        ("a.csv", HEADER + "x,,1,nan,1,0,\n", "text_tokens_gpt2 is 'nan'"),
        ("a.csv", HEADER + "x,,1,1e300,1,0,\n", "text_tokens_gpt2 is '1e300', expected a number from 0 to 2,147,483,647"),
        ("a.csv", HEADER + "x,,1,1,1,1e300,\n", "audio_seconds is '1e300'"),
        ("a.csv", HEADER + "x,,1,1,inf,0,\n", "answer_words is 'inf'"),
        ("a.csv", HEADER + "x,,1,1\n", "line 2, row 1: has 4 values, but the header 7; complete or remove that row"),
        ("a.csv", HEADER + "x,,1,1,1,0,red,blue\n", "line 2, row 1: has 8 values, but the header 7"),
        ("a.csv", HEADER, "has no rows"),
        ("a.csv", "", "has no rows"),
        ("a.csv", "width,height\n1,2\n", "none of the columns image_sizes.*found width, height; name one of them"),
        ("a.csv", (HEADER + "caf\u00e9,,1,1,1,0,\n").encode("latin-1"), "cannot be read as csv behind row 0 .*utf-8"),
        ("a.csv", HEADER + "x," + "9" * 200_000, "cannot be read as csv behind row 0 .*field larger"),
        ("a.csv.gz", "plain text", "cannot be read as csv"),
        ("a.csv.gz", gzip.compress(HEADER.encode() * 99, mtime=0)[:-20], "cannot be read as csv"),
        ("a.csv.gz", gzip.compress(HEADER.encode(), mtime=0)[:20] + bytes(90), "cannot be read as csv"),
        ("a.txt", "", "expected a .csv, .csv.gz or .parquet file; convert it"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        read_length_table(tmp_path / name, graph=GRAPH)


def test_missing_tables_and_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"gone\.csv: no such file; give a"):
        read_length_table(tmp_path / "gone.csv", graph=GRAPH)
    with pytest.raises(DataError, match=r": a folder; give a"):
        read_length_table(tmp_path, graph=GRAPH)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"a\.parquet: reading parquet needs the package pyarrow; install it, or give"):
        read_length_table(tmp_path / "a.parquet", graph=GRAPH)


@pytest.mark.parametrize("value", [[1], {"a": 1}, b"seven", "1" * 400])
def test_values_of_other_types_in_parquet_are_refused(tmp_path, monkeypatch, value):
    """Parquet has types; a stand-in for pyarrow gives what its own reader would."""
    (tmp_path / "a.parquet").write_bytes(b"")
    table = SimpleNamespace(to_pylist=lambda: [{"text_tokens": 3, "image_sizes": None}, {"text_tokens": value}])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(read_table=lambda path: table))
    with pytest.raises(DataError, match=r"a\.parquet, row 2: text_tokens is .*, expected a number from 0"):
        read_length_table(tmp_path / "a.parquet", graph=GRAPH)


def test_a_parquet_file_that_pyarrow_refuses_is_named(tmp_path, monkeypatch):
    def read_table(path):
        raise KeyError("its own kind of error")

    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", SimpleNamespace(read_table=read_table))
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet .*; replace the file"):
        read_length_table(tmp_path / "a.parquet", graph=GRAPH)


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path):
    """Spreadsheets write one."""
    (tmp_path / "a.csv").write_text("text_tokens\n7\n", encoding="utf-8-sig")
    assert read_length_table(tmp_path / "a.csv", graph=GRAPH) == (SampleLengths(0, (), 7, 7),)


def test_uniform_lengths_count_encoder_outputs_among_the_backbones_tokens():
    (sample,) = uniform_lengths(GRAPH, tokens={"vision": 64, "painter": 100, "llm": 30}, num_samples=1)
    assert sample.items == (ItemLengths("vision", 64, 16), ItemLengths("painter", 100, 0))
    assert (sample.num_tokens, sample.num_text_tokens) == (30, 14)


def test_an_encoder_says_how_long_audio_is(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text(HEADER + "x,,10,20,5,3,red\n")
    ear = {"role": "encoder", **SHAPE, "audio": {"tokens_per_second": 20, "merge_factor": 4}}
    graph = ModelGraph.from_dict({"units": {"ear": ear, "llm": {"role": "backbone", **SHAPE}}})
    (sample,) = read_length_table(path, graph=graph)
    assert sample.items == (ItemLengths("ear", 60, 15),)
    assert uniform_lengths(graph, tokens={"ear": 10, "llm": 8}, num_samples=1)[0].items == (ItemLengths("ear", 10, 2),)


@pytest.mark.parametrize("name", ["L.csv", "L.csv.gz"])
def test_written_lengths_are_read_back(tmp_path, name):
    samples = (SampleLengths(0, (ItemLengths("vision", 16, 4), ItemLengths("vision", 64, 16)), 9, 3), SampleLengths(1, (), 5, 5))
    write_length_table(tmp_path / name, samples)
    assert read_length_table(tmp_path / name, graph=GRAPH) == samples


def test_items_that_are_none_are_refused_and_those_of_other_models_left_out(tmp_path):
    (tmp_path / "L.csv").write_text("items,text_tokens\nother:16:4,9\nvision:16,9\n")
    with pytest.raises(DataError, match=r"row 2: items has 'vision:16', expected UNIT:TOKENS:OUTPUT_TOKENS"):
        read_length_table(tmp_path / "L.csv", graph=GRAPH)
    (tmp_path / "L.csv").write_text("items,text_tokens\nother:16:4,9\n")
    assert read_length_table(tmp_path / "L.csv", graph=GRAPH)[0].items == ()
