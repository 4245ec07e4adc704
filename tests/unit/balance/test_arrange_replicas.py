"""Encoders' batches on replicas near the LLM's: the same batches, fewer bytes between nodes."""

import numpy as np
import pytest

from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.rearrange_nodes import NodeArrangement
from multimodal.plan.colocated import plan_colocated
from multimodal.plan.disaggregated import plan_disaggregated
from multimodal.plan.unit_sizes import UnitSizes
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.validate import validate_assignment

SHAPE = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8}
IMAGE = {"patch_size": 2, "in_channels": 3, "merge_size": 2}
OPTIONS = BalanceOptions(ranks_per_node=2)


def graph_of(*, frozen: bool = False) -> ModelGraph:
    freeze = {"freeze_module": True, "freeze_projector": True} if frozen else {}
    units = {"vision": {"role": "encoder", **SHAPE, "image": IMAGE, **freeze}, "llm": {"role": "backbone", **SHAPE}}
    return ModelGraph.from_dict({"units": units})


def colocated(graph: ModelGraph, tensor_parallel_size: int = 1):
    sizes = {"vision": UnitSizes(), "llm": UnitSizes(tensor_parallel_size=tensor_parallel_size)}
    return plan_colocated(graph, sizes=sizes, world_size=4)


def samples(count: int = 4) -> list[SampleLengths]:
    return [SampleLengths(index, (ItemLengths("vision", 40, 10),), 20, 20) for index in range(count)]


def placed(vision: list[int]) -> Assignment:
    """Sample n is the LLM replica n's, and its image is encoded by replica vision[n]."""
    encoded = [[[(sample, 0)] for sample, replica in enumerate(vision) if replica == each] for each in range(4)]
    return Assignment.from_dict({"vision": encoded, "llm": [[[(sample, -1)]] for sample in range(4)]})


def arranged(assignment: Assignment, *, frozen: bool = False, num_decoding_ranks: int = 0, plan=None, lengths=None):
    graph, lengths = graph_of(frozen=frozen), lengths or samples()
    arrangement = NodeArrangement(2, num_decoding_ranks=num_decoding_ranks)
    ids = [sample.sample_id for sample in lengths]
    work = BatchWork(graph, lengths, OPTIONS)
    return arrangement.arrange(assignment, work, plan=plan or colocated(graph), sample_ids=ids)


@pytest.mark.parametrize(("frozen", "passes"), [(False, 2), (True, 1)])
def test_batches_go_to_the_nodes_of_their_samples(frozen: bool, passes: int) -> None:
    """Nodes hold replicas 0 and 1, 2 and 3; all images are encoded on the other node: outputs, and gradients if any, cross."""
    found, sent = arranged(placed([2, 3, 0, 1]), frozen=frozen)
    assert sent == (passes * 4 * 10 * 8 * 2, 0)
    nodes = {atom.sample_id: replica // 2 for replica, batch in enumerate(found.units["vision"]) for mb in batch for atom in mb}
    assert nodes == {0: 0, 1: 0, 2: 1, 3: 1}


def test_what_is_in_place_stays() -> None:
    before = placed([1, 0, 2, 3])
    found, sent = arranged(before)
    assert found is before
    assert sent == (0, 0)


def test_raw_samples_count_where_they_are_decoded() -> None:
    """Decoded on rank n % 4, images of 40 patches with 12 bytes each count beside 2 x 10 outputs with 16 bytes."""
    lengths = samples()[::-1]  # so sample 3 is decoded on rank 0
    _, sent = arranged(placed([0, 1, 2, 3]), lengths=lengths, num_decoding_ranks=4)
    assert sent.before == 4 * 40 * 12
    assert sent.after == 4 * 320, "raw images weigh more than outputs"


def test_any_balancers_batches_are_the_same_and_nothing_is_sent_in_vain() -> None:
    graph, random = graph_of(), np.random.default_rng(0)
    lengths = [
        SampleLengths(index, (ItemLengths("vision", 4 * int(size), int(size)),) * 2, 20, 20)
        for index, size in enumerate(random.integers(1, 90, 40).tolist())
    ]
    plan, falls = colocated(graph, 2), []
    for name, row in BALANCERS.items():
        before = row(lengths, graph=graph, plan=plan, options=OPTIONS)
        for num_decoding in (0, 4):
            found, sent = arranged(before, plan=plan, lengths=lengths, num_decoding_ranks=num_decoding)
            validate_assignment(found, lengths, graph=graph, plan=plan)
            assert found.units["llm"] == before.units["llm"], name
            assert sorted(found.units["vision"]) == sorted(before.units["vision"])
            assert sent.after <= sent.before
            falls.append(sent.after < sent.before)
    assert any(falls)


def test_units_on_nodes_of_their_own_have_nothing_to_gain() -> None:
    graph = graph_of()
    plan = plan_disaggregated(graph, sizes={unit: UnitSizes(data_parallel_size=4) for unit in graph.unit_names}, world_size=8)
    before = placed([3, 2, 1, 0])
    found, sent = arranged(before, plan=plan)
    assert found is before
    assert sent.before == sent.after > 0
