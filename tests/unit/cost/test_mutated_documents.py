"""One random slip in a valid document is a BraidError that names the file, or a value that is read back as written."""

import copy
import datetime
import json
import math
import tracemalloc
from functools import reduce

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multimodal.cost.cluster import Cluster
from multimodal.cost.cost_table import CostTable
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.values.errors import BraidError
from multimodal.values.model_graph import ModelGraph
from multimodal.values.plan import Plan
from multimodal.values.validate import validate_plan
from tests.unit.cost import cost_cases

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
MODEL = {
    "units": {
        "vision": {"role": "encoder", **SHAPE, "image": {"patch_size": 4, "min_pixels": 64}, "freeze_module": True},
        "ear": {"role": "encoder", **SHAPE, "audio": {"num_mel_bins": 8}, "projector_hidden_size": 8},
        "llm": {"role": "backbone", **SHAPE, "num_query_groups": 2, "layernorm_epsilon": 1e-5, "vocab_size": 32},
        "painter": {"role": "generator", **SHAPE, "kv_channels": 8, "normalization": "LayerNorm", "rotary_base": 1e4},
    },
    "edges": [["vision", "llm"], ["ear", "llm"], ["llm", "painter"]],
}
GRAPH = ModelGraph.from_dict(MODEL)
PLAN = {
    "units": {
        **{
            name: {"tensor_parallel_size": 1, "replicas": [{"stages": [{"ranks": [rank], "layers": [[0, 4]]}]}]}
            for rank, name in enumerate(("vision", "ear", "painter"))
        },
        "llm": {
            "tensor_parallel_size": 2,
            "context_parallel_size": 1,
            "replicas": [
                {"stages": [{"ranks": [3, 4], "layers": [[0, 1], [2, 3]]}, {"ranks": [5, 6], "layers": [[1, 2], [3, 4]]}]}
            ],
        },
    }
}
CLUSTER = {
    **{key: value for key, value in cost_cases.CLUSTER.items() if key != "peak_tflops"},
    "device": "H100",
    "attention_efficiency": 0.4,
    "dtype": "bfloat16",
    "inter_node": {**cost_cases.LINKS["inter_node"], "collective_efficiency": 1},
}
TABLE = {
    "num_microbatches": 2,
    "send_seconds": 0.1,
    "units": {
        "vision": {"stages": [{"forward": 1.0}, {"forward": [1.0, 2.0], "backward": 2.0}], "ranks": [0, 1]},
        "llm": {"upstream": ["vision"], "stages": [{"forward": 1, "input_gradient": 1, "weight_gradient": [1, 1]}]},
    },
}
LAYER = {
    "tensor_parallel_size": 2,
    "forward": [1e-5, 2e-7, 3e-12, 4e-6],
    "input_gradient": {"tokens": [64, 128], "seconds": [0.1, 0.2]},
    "weight_gradient": [1, 2, 3],
}
PROFILE = {
    "device": "CPU",
    "dtype": "float32",
    "units": {"llm": {"transformer": [LAYER, {**LAYER, "tensor_parallel_size": 4}], "head": [LAYER]}},
    "step": {"seconds": 1.0, "weight_update_seconds": 1e-9},
}
DOCUMENTS = {"model": MODEL, "plan": PLAN, "cluster": CLUSTER, "costs": TABLE, "profile": PROFILE}
KINDS = {"model": ModelGraph, "plan": Plan, "cluster": Cluster, "costs": CostTable, "profile": LayerProfile}
MOST_BYTES = 30e6


def deep(levels):
    return reduce(lambda inner, _: [inner], range(levels), [])


NUMBERS = (math.nan, math.inf, -math.inf, 5e-324, 1e308, 0, -1, 0.5, 4.9, 10**9, 10**12, 2**63, 10**400, 10**5000)
TEXTS = ("text", "3", "false", "1e-5", "", "x" * 5000, b"3")
NESTED = ([], {}, [[]], {"a": 1}, {1: 2}, {"a"}, deep(40), deep(400))
REPLACEMENTS = [None, True, False, *TEXTS, *NUMBERS, *NESTED, datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1)]


def places(value, *, path=()):
    """Yield the path of everything in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, path=(*path, key))


@st.composite
def mutated(draw, name):
    """One document with one slip."""
    document = copy.deepcopy(DOCUMENTS[name])
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
        validate_plan(value, graph=GRAPH, world_size=value.num_ranks)
    if hasattr(value, "to_dict"):
        assert type(value).from_dict(value.to_dict()) == value


@pytest.fixture
def traced_memory():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_slip_is_an_error_or_another_value(name, data, traced_memory):
    document = data.draw(mutated(name))
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        check_value(name, KINDS[name].from_dict(document))
    except BraidError as problem:
        assert len(str(problem)) < 1000
    assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("documents")


def written(document, suffix):
    return yaml.dump(document, sort_keys=False) if suffix == "yaml" else json.dumps(document, indent=1)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_documents_themselves_are_read(name, suffix, folder):
    path = folder / f"{name}.{suffix}"
    path.write_text(written(DOCUMENTS[name], suffix))
    value = KINDS[name].from_file(path)
    assert value == KINDS[name].from_dict(DOCUMENTS[name])
    check_value(name, value)
