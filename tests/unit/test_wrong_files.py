"""What is said to wrong files of models, plans, costs, data and others: tests/golden/files.txt (`tests/unit/golden_answers.py`).

`python -m tests.unit.test_wrong_files` writes the answers anew.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron.runtime.launch.rank_place import find_rank_place
from multimodal.cost.cluster import Cluster
from multimodal.cost.cost_table import CostTable, build_table_step
from multimodal.cost.layers.registry import read_model
from multimodal.cost.seconds.layer_profile import LayerProfile
from multimodal.data.blend import read_mixture
from multimodal.data.length_table import read_length_table
from multimodal.plan.planners.templates.simulate_trace import read_trace
from multimodal.plan.planners.templates.template_set import TemplateSet
from multimodal.schedule.builders import BUILDERS
from multimodal.values.model_graph import ModelGraph
from multimodal.values.validate import read_plan
from tests.unit.cost.cost_cases import CLUSTER
from tests.unit.golden_answers import Kinds, differing, write
from tests.unit.hugging_face.test_item_configs import PUBLISHED
from tests.unit.hugging_face.test_text_configs import LLAMA
from tests.unit.plan.planners.templates.test_plan_templates import ONE_NODE

SHAPE = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
ENCODER = {"role": "encoder", **SHAPE, "image": {"patch_size": 2, "merge_size": 2, "in_channels": 1}}
JOINT = {"role": "encoder", **SHAPE, "join": "sequence", "queries": {"num_queries": 3}}
BACKBONE, GENERATOR = ({"role": role, **SHAPE} for role in ("backbone", "generator"))
EDGES = [["one", "joint"], ["two", "joint"], ["joint", "llm"]]
MODEL = {"units": {"vision": {"role": "encoder", **SHAPE}, "llm": BACKBONE}}
STAGE = {"forward": 1.0}


def in_file(document: Any, read: Callable[[Path], object]) -> None:
    Path("file.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    read(Path("file.yaml"))


def in_folder(document: Mapping[str, Any]) -> None:
    """Read a folder of Hugging Face; `processor` is none of its config's keys."""
    config = dict(document)
    Path("preprocessor_config.json").write_text(json.dumps(config.pop("processor", {})))
    Path("config.json").write_text(json.dumps(config))
    read_model(Path())


def in_table(document: Mapping[str, str]) -> None:
    head = "sample_id,image_sizes,text_words,text_tokens_gpt2,answer_words,audio_seconds,colour"
    Path("lengths.csv").write_text(f"{head}\n{document['rows']}")
    read_length_table(Path("lengths.csv"), graph=ModelGraph.from_dict(MODEL))


def in_trace(document: Mapping[str, str]) -> None:
    Path("trace.csv").write_text(document["text"])
    read_trace(Path("trace.csv"), num_nodes=4)


def in_mixture(document: Mapping[str, str]) -> None:
    """Read words of --data-path, among them a metadataset, m.yaml."""
    Path("set/.nv-meta").mkdir(parents=True, exist_ok=True)
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:"
    Path("m.yaml").write_text(f"{head} {{train: {{{document['train']}}}, other: {{path: o.jsonl}}}}\n")
    read_mixture(document["words"].split())


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
        partial(in_file, read=lambda path: build_table_step(CostTable.from_file(path))),
    ),
    "costs of layers": (
        {"units": {"llm": {"head": [{"forward": [1, 2, 3], "input_gradient": [0, 0, 0], "weight_gradient": [0, 0, 0]}]}}},
        partial(in_file, read=LayerProfile.from_file),
    ),
    "lengths": ({"rows": "x,56x56,1,1,1,0,red\n"}, in_table),
    "mixture": ({"train": "path: set", "words": "m.yaml"}, in_mixture),
    "templates": (ONE_NODE.to_dict(), TemplateSet.from_dict),
    "schedule's name": ({"name": "dip:rounds=2"}, lambda document: BUILDERS[document["name"]]),
    "environment": ({"environ": {}}, lambda document: find_rank_place(document["environ"])),
    "trace": ({"text": "10,-2\n"}, in_trace),
    "llama": (LLAMA, in_folder),
    **{name: (config, in_folder) for name, config in PUBLISHED.items()},
}


def test_every_file_is_answered_as_written() -> None:
    assert differing("files.txt", FILES) == []


if __name__ == "__main__":
    write("files.txt", FILES)
