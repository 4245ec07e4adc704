"""What is said to wrong files of models, plans, costs, data and others: tests/golden/files.txt."""

import copy
import datetime
import math
import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.io import wavfile

from benchmarks.simulate_trace import read_trace
from megatron.runtime.launch.rank_place import find_rank_place
from multimodal.cost.cluster import Cluster
from multimodal.cost.cost_table import CostTable, build_table_step
from multimodal.cost.layers.registry import read_model
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.data import remote
from multimodal.data.audio import read_audio_length
from multimodal.data.blend import read_mixture
from multimodal.data.forms.sample_files import open_sample_files
from multimodal.data.length_table import read_length_table
from multimodal.plan.planners.templates.template_set import TemplateSet
from multimodal.schedule.builders import BUILDERS
from multimodal.values.errors import BraidError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.validate import read_plan, validate_plan
from tests.unit.cost.cost_cases import CLUSTER
from tests.unit.golden_answers import Kinds, golden_test
from tests.unit.plan.planners.templates.test_plan_templates import ONE_NODE

SHAPE = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
ENCODER = {"role": "encoder", **SHAPE, "image": {"patch_size": 2, "merge_size": 2, "in_channels": 1}}
JOINT = {"role": "encoder", **SHAPE, "join": "sequence", "queries": {"num_queries": 3}}
BACKBONE, GENERATOR = ({"role": role, **SHAPE} for role in ("backbone", "generator"))
EDGES = [["one", "joint"], ["two", "joint"], ["joint", "llm"]]
MODEL = {"units": {"vision": {"role": "encoder", **SHAPE}, "llm": BACKBONE}}
STAGE = {"forward": 1.0}


def in_file(document: Any, read: Callable[[Path], object]) -> object:
    Path("file.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return read(Path("file.yaml"))


def read_roles(path: Path) -> str:
    """Read a table of costs; returns the roles that follow from the places of its units."""
    return ", ".join(f"{unit.name} {unit.role}" for unit in build_table_step(CostTable.from_file(path))[0].graph.units)


def in_table(document: Mapping[str, str]) -> None:
    head = "sample_id,image_sizes,text_words,text_tokens_gpt2,answer_words,audio_seconds,colour"
    Path("lengths.csv").write_text(f"{head}\n{document['rows']}")
    read_length_table(Path("lengths.csv"), graph=ModelGraph.from_dict(MODEL))


def open_address(document: Mapping[str, str]) -> None:
    Path("a.jsonl").touch()
    with patch.object(remote, "find_spec", lambda name: None if name in ("gcsfs", "s3fs") else name):
        open_sample_files(document["address"])


def in_sound(document: Mapping[str, int]) -> None:
    """Read the length of a clip of 200 bytes in whose header a number stands somewhere."""
    wavfile.write("a.wav", 16000, np.zeros(100, np.int16))
    content = bytearray(Path("a.wav").read_bytes())
    content[document["place"] : document["place"] + document["size"]] = document["number"].to_bytes(document["size"], "little")
    Path("a.wav").write_bytes(content)
    read_audio_length("a.wav", where="line 3")


def in_trace(document: Mapping[str, str]) -> None:
    Path("trace.csv").write_text(document["text"])
    read_trace(Path("trace.csv"), num_nodes=4)


def in_mixture(document: Mapping[str, str]) -> str:
    """Read words of --data-path, among them metadatasets, m.yaml and n.yaml; returns data sets with weights or repetitions."""
    head = f"__module__: megatron.energon\n__class__: {document['class']}\nsplits:"
    for folder in (Path(), Path("there")):
        (folder / "set" / ".nv-meta").mkdir(parents=True, exist_ok=True)
        (folder / "m.yaml").write_text(f"{head} {{train: {{{document['train']}}}, other: {{path: o.jsonl}}}}\n")
        (folder / "n.yaml").write_text(f"{head} {{train: {{path: set}}, other: {{{document['inner']}}}}}\n")
    found = read_mixture(document["words"].split())
    shares = (each.weight or f"{each.repetitions:g} times" for each in found)
    return "; ".join(f"{each.path} {share} {[*each.ranges] or ''}".strip() for each, share in zip(found, shares, strict=True))


def unit_plan(rank: int) -> Mapping[str, Any]:
    return {"tensor_parallel_size": 1, "replicas": [{"stages": [{"ranks": [rank], "layers": [[0, 6]]}]}]}


FILES: Kinds = {
    "model": (MODEL, partial(in_file, read=read_model)),
    "model of joined encoders": (
        {"units": {"one": ENCODER, "two": ENCODER, "joint": JOINT, "llm": BACKBONE}, "edges": EDGES},
        partial(in_file, read=read_model),
    ),
    "model with a generator": ({"units": {**MODEL["units"], "painter": GENERATOR}}, partial(in_file, read=read_model)),
    "plan": (
        {"units": {"vision": unit_plan(0), "llm": unit_plan(1)}},
        partial(in_file, read=partial(read_plan, graph=ModelGraph.from_dict(MODEL), world_size=2)),
    ),
    "plan of any number of ranks": (
        {"units": {"vision": unit_plan(0), "llm": unit_plan(1)}},
        partial(in_file, read=partial(read_plan, graph=ModelGraph.from_dict(MODEL))),
    ),
    "cluster": (CLUSTER, partial(in_file, read=Cluster.from_file)),
    "costs of stages": (
        {"num_microbatches": 2, "units": {"b": {"stages": [STAGE], "ranks": [0]}, "a": {"upstream": ["b"], "stages": [STAGE]}}},
        partial(in_file, read=read_roles),
    ),
    "costs of layers": (
        {"units": {"llm": {"head": [{"forward": [1, 2, 3], "input_gradient": [0, 0, 0], "weight_gradient": [0, 0, 0]}]}}},
        partial(in_file, read=LayerProfile.from_file),
    ),
    "lengths": ({"rows": "x,56x56,1,1,1,0,red\n"}, in_table),
    "mixture": ({"train": "path: set", "words": "m.yaml", "inner": "path: set", "class": "MetadatasetV2"}, in_mixture),
    "templates": (ONE_NODE.to_dict(), TemplateSet.from_dict),
    "schedule's name": ({"name": "dip:rounds=2"}, lambda document: BUILDERS[document["name"]]),
    "environment": ({"environ": {}}, lambda document: find_rank_place(document["environ"])),
    "trace": ({"text": "10,-2\n"}, in_trace),
    "address": ({"address": "a.jsonl"}, open_address),
    "header of sound": ({"place": 34, "size": 2, "number": 16}, in_sound),
}
test_every_file_is_answered_as_written = golden_test("files.txt", FILES)
VALUES = {
    **dict.fromkeys(("model", "model of joined encoders", "model with a generator"), ModelGraph),
    "plan": Plan,
    "cluster": Cluster,
    "costs of stages": CostTable,
    "costs of layers": LayerProfile,
    "templates": TemplateSet,
}
MOST_BYTES = 30e6


def deep(levels):
    return reduce(lambda inner, _: [inner], range(levels), [])


NUMBERS = (math.nan, math.inf, -math.inf, 5e-324, 1e308, 0, -1, 0.5, 4.9, 10**9, 10**12, 2**63, 10**400, 10**5000)
TEXTS = ("text", "3", "false", "1e-5", "", "x" * 5000, b"3")
NESTED = ([], {}, [[]], {"a": 1}, {1: 2}, {"a"}, deep(40), deep(400))
REPLACEMENTS = [None, True, False, *TEXTS, *NUMBERS, *NESTED, datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1)]


def places(value, *, path=()):
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, path=(*path, key))


@st.composite
def mutated(draw, name):
    document = copy.deepcopy(FILES[name][0])
    *path, key = draw(st.sampled_from(list(places(document))))
    owner = document
    for step in path:
        owner = owner[step]
    value = owner[key]
    change = draw(st.sampled_from(["drop", "add", "replace", "replace", "scale", "wrap", "twice", "rename"]))
    if change == "drop":
        del owner[key]
    elif change == "scale" and isinstance(value, (int, float)) and not isinstance(value, bool):
        owner[key] = value * draw(st.sampled_from([-1, 0, 0.5, 2, 1000, 1e12, 10**12]))
    elif change == "wrap":
        owner[key] = draw(st.sampled_from([[value], {"a": value}, [value, value], str(value)]))
    elif change == "twice" and isinstance(owner, list):
        owner.append(copy.deepcopy(value))
    elif change == "rename" and isinstance(owner, dict):
        owner[draw(st.sampled_from(["other", f"{key}s", str(key)[1:], 5, None, "a b", "role", "edges"]))] = owner.pop(key)
    elif change == "add" and isinstance(owner, dict):
        owner[draw(st.sampled_from(["other", "name", "transformer", "layer_ranges", "vocab_size", 5]))] = value
    else:
        owner[key] = draw(st.sampled_from(REPLACEMENTS))
    return document


def check_value(name, value):
    if name == "plan":
        validate_plan(value, graph=ModelGraph.from_dict(MODEL), world_size=value.num_ranks)
    if hasattr(value, "to_dict"):
        assert type(value).from_dict(value.to_dict()) == value


@pytest.fixture
def traced_memory():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("name", VALUES)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_slip_is_an_error_or_another_value(name, data, traced_memory):
    document = data.draw(mutated(name))
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        check_value(name, VALUES[name].from_dict(document))
    except BraidError as problem:
        assert len(str(problem)) < 1000
    assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES
