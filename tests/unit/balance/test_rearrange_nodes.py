"""Batches on ranks near their samples: fewer bytes between nodes."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_matrix, csr_matrix

from benchmarks.node_optimum import lp_bound, rearrange_exactly, single_node_bound
from multimodal.balance import BALANCERS
from multimodal.balance.balance_options import BalanceOptions
from multimodal.balance.batch_work import BatchWork
from multimodal.balance.rearrange_nodes import NodeArrangement, rearrange_nodes
from multimodal.plan.plans_of_sizes import UnitSizes, plan_colocated, plan_disaggregated
from multimodal.values.assignment import Assignment
from multimodal.values.model_graph import ModelGraph
from multimodal.values.sample_lengths import ItemLengths, SampleLengths
from multimodal.values.validate import validate_assignment
from tests.unit.without_kernels import without_kernels

BOTH = pytest.mark.parametrize("rearrange", [rearrange_nodes, without_kernels(rearrange_nodes)])


@st.composite
def matrices(draw, max_ranks=12):
    num_ranks = draw(st.integers(1, max_ranks))
    rows = st.lists(st.one_of(st.just(0), st.integers(0, 9)), min_size=num_ranks, max_size=num_ranks)
    return np.array(draw(st.lists(rows, min_size=num_ranks, max_size=num_ranks)), dtype=np.int64)


def balanced_volumes(*, num_ranks, samples_per_rank=12, seed=0):
    """Long-tailed samples, dealt to new batches in the order of their lengths."""
    draw = np.random.default_rng(seed)
    lengths = draw.lognormal(5, 1, num_ranks * samples_per_rank).astype(np.int64) + 1
    batches = np.argsort(np.argsort(-lengths)) % num_ranks
    return coo_matrix((lengths, (np.repeat(np.arange(num_ranks), samples_per_rank), batches)), shape=(num_ranks, num_ranks))


def sent_to_other_nodes(volume, permutation, ranks_per_node):
    """Straight from equation (5)."""
    rank_of_batch = {batch: rank for rank, batch in enumerate(permutation)}
    return [
        sum(held for batch, held in enumerate(row) if rank_of_batch[batch] // ranks_per_node != rank // ranks_per_node)
        for rank, row in enumerate(volume.tolist())
    ]


def best_by_brute_force(volume, ranks_per_node):
    return min(max(sent_to_other_nodes(volume, order, ranks_per_node)) for order in permutations(range(len(volume))))


@BOTH
@pytest.mark.parametrize(
    ("volume", "ranks_per_node", "permutation", "before", "after"),
    [
        ([[0, 0, 5, 0], [0, 0, 0, 5], [5, 0, 0, 0], [0, 5, 0, 0]], 2, [2, 3, 0, 1], [5] * 4, [0] * 4),
        (np.diag([3] * 5) + np.fliplr(np.eye(5, dtype=np.int64)), 2, [0, 1, 2, 3, 4], [1, 1, 0, 1, 1], [1, 1, 0, 1, 1]),
        ([[4, 6], [0, 4]], 1, [1, 0], [6, 0], [4, 4]),
    ],
    ids=["where most of them is", "stay where they may", "the heaviest sender counts, not the sum"],
)
def test_batches_go(rearrange, volume, ranks_per_node, permutation, before, after):
    found = rearrange(np.array(volume), ranks_per_node=ranks_per_node)
    assert found.permutation.tolist() == permutation
    assert (found.bytes_before.tolist(), found.bytes_after.tolist()) == (before, after)


@given(volume=matrices(max_ranks=6), ranks_per_node=st.integers(1, 4))
@settings(max_examples=40)
def test_exact_is_the_optimum_and_search_is_near(volume, ranks_per_node):
    best = best_by_brute_force(volume, ranks_per_node)
    exact = rearrange_exactly(volume, ranks_per_node=ranks_per_node)
    found = rearrange_nodes(volume, ranks_per_node=ranks_per_node)
    assert exact.bytes_after.max() == best
    assert best <= found.bytes_after.max() <= found.bytes_before.max()
    assert lp_bound(volume, ranks_per_node=ranks_per_node) <= best + 1e-6
    for node in range(-(-len(volume) // ranks_per_node)):
        assert single_node_bound(volume, ranks_per_node=ranks_per_node, node=node) <= best + 1e-6


@BOTH
@given(volume=matrices(), ranks_per_node=st.integers(1, 5))
def test_the_bytes_are_those_of_the_permutation(rearrange, volume, ranks_per_node):
    found = rearrange(volume, ranks_per_node=ranks_per_node)
    assert sorted(found.permutation.tolist()) == list(range(len(volume)))
    assert found.bytes_before.tolist() == sent_to_other_nodes(volume, range(len(volume)), ranks_per_node)
    assert found.bytes_after.tolist() == sent_to_other_nodes(volume, found.permutation.tolist(), ranks_per_node)
    assert found.bytes_after.max() <= found.bytes_before.max()


@pytest.mark.parametrize("seed", range(2))
def test_search_comes_within_two_percent_of_the_optimum_on_long_tailed_samples(seed):
    volume = balanced_volumes(num_ranks=32, seed=seed)
    exact = rearrange_exactly(volume, ranks_per_node=8).bytes_after.max()
    found = rearrange_nodes(volume, ranks_per_node=8)
    assert exact <= found.bytes_after.max() <= 1.02 * exact
    assert found.bytes_after.max() < 0.9 * found.bytes_before.max()


def test_all_forms_of_a_matrix_are_the_same():
    rows = balanced_volumes(num_ranks=16).tocsr()
    halves = np.stack([rows.data // 2, rows.data - rows.data // 2], axis=1).ravel()
    in_duplicates = csr_matrix((halves, np.repeat(rows.indices, 2), 2 * rows.indptr), shape=rows.shape)
    forms = [rows.tocoo(), rows.tocsc(), in_duplicates, rows.toarray(), rows.toarray().astype(float)]
    expected = rearrange_nodes(rows, ranks_per_node=8)
    for form in forms:
        assert np.array_equal(rearrange_nodes(form, ranks_per_node=8).permutation, expected.permutation)
    assert in_duplicates.nnz == len(halves), "the caller's matrix stays as it is"
    assert expected.permutation.tolist() != list(range(16))


def test_large_volumes_stay_exact():
    volume = np.array([[0, 2**61 + 1, 2**61], [0, 0, 3], [2**61 - 1, 0, 2**61]])
    found = rearrange_nodes(volume, ranks_per_node=1)
    assert found.bytes_after.tolist() == sent_to_other_nodes(volume, found.permutation.tolist(), 1)


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
    return Assignment({"vision": encoded, "llm": [[[(sample, -1)]] for sample in range(4)]})


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


def test_a_generators_batches_go_to_the_nodes_of_their_samples() -> None:
    """All samples are drawn on the other node; hidden states of one token each, and their gradients, cross."""
    units = {"llm": {"role": "backbone", **SHAPE}, "painter": {"role": "generator", **SHAPE}}
    graph = ModelGraph.from_dict({"units": units})
    lengths = [SampleLengths(index, (ItemLengths("painter", 40, 0),), 20, 20) for index in range(4)]
    drawn = [[[(sample, -1)]] for sample in (2, 3, 0, 1)]
    before = Assignment({"llm": [[[(sample, -1)]] for sample in range(4)], "painter": drawn})
    plan = plan_colocated(graph, sizes={unit: UnitSizes() for unit in graph.unit_names}, world_size=4)
    found, sent = NodeArrangement(2).arrange(
        before, BatchWork(graph, lengths, OPTIONS), plan=plan, sample_ids=range(len(lengths))
    )
    validate_assignment(found, lengths, graph=graph, plan=plan)
    assert sent == (2 * 4 * 8 * 2, 0) and [batch[0][0].sample_id // 2 for batch in found.units["painter"]] == [0, 0, 1, 1]


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
