import gzip

import pytest

from multimodal.data.length_table import read_length_table
from multimodal.data.uniform_lengths import uniform_lengths
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
    items = (ItemLengths("vision", 16, 4), ItemLengths("vision", 24, 6), ItemLengths("audio", 25, 7))
    assert read_length_table(path, graph=GRAPH) == (SampleLengths(0, items, 20, 10), SampleLengths(1, (), 1, 1))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", HEADER + "x,56by56,1,1,1,0,\n", "row 1: image_sizes has '56by56'"),
        ("a.csv", HEADER + "x,,1,1,1,long,\n", "row 1: could not convert"),
        ("a.csv", HEADER + "x,,1,-3,1,0,\n", "text_tokens_gpt2 is -3.0"),
        ("a.csv", HEADER, "has no rows"),
        ("a.csv", "width,height\n1,2\n", "none of the columns image_sizes"),
        ("a.csv.gz", "plain text", "cannot be read as csv"),
        ("a.txt", "", "expected a .csv, .csv.gz or .parquet file"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_length_table(tmp_path / name, graph=GRAPH)


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
    assert uniform_lengths(graph, tokens={"ear": 10, "llm": 8}, num_samples=1)[0].items == (ItemLengths("ear", 10, 3),)
