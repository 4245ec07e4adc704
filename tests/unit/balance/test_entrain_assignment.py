import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.balance import entrain_assignment
from multimodal.balance.entrain_assignment import assign_entrain, assign_entrain_reference
from multimodal.values.errors import AssignmentError

LOAD = st.one_of(st.integers(0, 20), st.floats(0, 1e6), st.just(0), st.floats(0, 1e300))


@st.composite
def batches(draw):
    num_samples = draw(st.integers(1, 40))
    row = st.lists(LOAD, min_size=num_samples, max_size=num_samples)
    encoders = draw(st.lists(row, max_size=3))
    return {
        "llm_loads": draw(row),
        "encoder_loads": np.array(encoders, dtype=float).reshape(len(encoders), num_samples),
        "num_replicas": draw(st.integers(1, min(4, num_samples))),
        "num_microbatches": draw(st.integers(1, 12)),
        "min_num_microbatches": draw(st.one_of(st.none(), st.integers(1, 6))),
        "max_subset_sums": draw(st.sampled_from([1, 3, 16, 256])),
        "sample_ids": draw(st.one_of(st.none(), st.permutations(range(num_samples)))),
        "merge_encoders": draw(st.booleans()),
    }


@given(batch=batches())
def test_the_kernel_equals_its_reference(batch):
    assert assign_entrain(**batch) == assign_entrain_reference(**batch)


@settings(max_examples=50)
@given(batch=batches())
def test_every_sample_is_encoded_once_and_in_the_llm_at_once_or_one_microbatch_later(batch):
    found = assign_entrain(**batch)
    assert len(found.replicas) == batch["num_replicas"]
    everyone = list(range(len(batch["llm_loads"])))
    for side in ("encoder_microbatches", "llm_microbatches"):
        assert sorted(s for replica in found.replicas for members in getattr(replica, side) for s in members) == everyone
    for replica in found.replicas:
        assert all(replica.encoder_microbatches) or not np.any(batch["encoder_loads"])
        assert all(replica.llm_microbatches)
        assert len(replica.encoder_microbatches) == len(replica.llm_microbatches) <= batch["num_microbatches"]
        encoded = {s: index for index, members in enumerate(replica.encoder_microbatches) for s in members}
        run = {s: index for index, members in enumerate(replica.llm_microbatches) for s in members}
        assert {run[s] - encoded[s] for s in run} <= {0, 1}
        assert sorted(s for s in run if run[s] > encoded[s]) == sorted(replica.deferred)


@settings(max_examples=50)
@given(batch=batches(), seed=st.integers(0, 9))
def test_the_order_of_the_samples_does_not_matter(batch, seed):
    batch["sample_ids"] = list(range(len(batch["llm_loads"])))
    shuffled = np.random.default_rng(seed).permutation(len(batch["llm_loads"])).tolist()
    moved = batch | {
        "llm_loads": [batch["llm_loads"][s] for s in shuffled],
        "encoder_loads": batch["encoder_loads"][:, shuffled],
        "sample_ids": shuffled,
    }
    of_ids = [
        [[[shuffled[s] for s in members] for members in replica.llm_microbatches] for replica in assign_entrain(**moved).replicas]
    ]
    assert of_ids == [[[list(members) for members in replica.llm_microbatches] for replica in assign_entrain(**batch).replicas]]


def test_without_the_kernel_the_reference_runs(monkeypatch):
    batch = {"llm_loads": [3, 1, 2, 5], "encoder_loads": [1, 2, 3, 4], "num_replicas": 2, "num_microbatches": 2}
    expected = assign_entrain(**batch)
    monkeypatch.setattr(entrain_assignment, "kernels", None)
    assert assign_entrain(**batch) == expected


def test_deferral_evens_the_llm_out_and_leaves_the_encoder_even():
    generator = np.random.default_rng(0)
    encoder, llm = generator.lognormal(5, 0.5, 512), generator.lognormal(5, 0.8, 512)
    found = assign_entrain(llm, encoder_loads=encoder, num_replicas=4, num_microbatches=8)

    def deviation(loads, groups):
        totals = np.array([loads[list(members)].sum() for members in groups])
        return totals.std() / totals.mean()

    in_order = np.arange(512).reshape(32, 16)
    replicas = found.replicas
    assert deviation(encoder, [m for r in replicas for m in r.encoder_microbatches]) < 0.02
    assert deviation(llm, [m for r in replicas for m in r.llm_microbatches]) < 0.2 * deviation(llm, in_order)
    assert deviation(encoder, in_order) > 0.1
    assert 0 < sum(len(replica.deferred) for replica in replicas) < 128


def test_the_number_of_microbatches_is_lowered_on_request_only():
    batch = {"encoder_loads": [9, 1, 1, 1, 1, 1, 1, 1], "num_replicas": 1, "num_microbatches": 4}
    for least, count in ((None, 4), (1, 1), (3, 3), (9, 4)):
        (replica,) = assign_entrain([1] * 8, **batch, min_num_microbatches=least).replicas
        assert len(replica.llm_microbatches) == count


def test_merged_encoders_are_balanced_as_one():
    vision, audio = [4, 4, 0, 0], [0, 0, 4, 4]
    batch = {"encoder_loads": [vision, audio], "num_replicas": 1, "num_microbatches": 2}
    merged = assign_entrain([1, 1, 1, 1], **batch, merge_encoders=True)
    assert merged == assign_entrain([1, 1, 1, 1], **(batch | {"encoder_loads": [4, 4, 4, 4]}))
    (replica,) = assign_entrain([1, 1, 1, 1], **batch).replicas
    assert all({s < 2 for s in members} == {True, False} for members in replica.encoder_microbatches)


@pytest.mark.parametrize("assign", [assign_entrain, assign_entrain_reference])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llm_loads": [], "encoder_loads": []}, r"LLM loads of shape \(0,\): give one per sample"),
        ({"llm_loads": [1, float("nan"), 1]}, "LLM loads: entry 1 is nan; loads must be finite and not negative"),
        ({"llm_loads": [1, 1, 10**400]}, "LLM loads: .*give numbers that double precision can hold"),
        ({"llm_loads": [1e308, 1e308, 1]}, "LLM loads: the loads add up to inf"),
        ({"encoder_loads": [1, -2, 3]}, r"encoder loads: entry 1 is -2.0; loads must be finite and not negative"),
        ({"encoder_loads": [[1, 2, 3], [4, float("inf"), 6]]}, r"encoder loads: entry \(1, 1\) is inf"),
        ({"encoder_loads": [1, 2]}, r"encoder loads of shape \(1, 2\) for 3 samples"),
        ({"encoder_loads": [[1e308, 1, 1], [1e308, 1, 1]], "merge_encoders": True}, "encoder loads: the loads add up to inf"),
        ({"num_replicas": 0}, "num_replicas is 0; it must be from 1"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"num_replicas": 4}, "3 samples cannot fill 4 replicas; use a larger global batch or fewer replicas"),
        ({"sample_ids": [7, 8]}, "2 sample ids for 3 samples"),
        ({"sample_ids": [7, 8, 7]}, "sample 7 is in the global batch twice"),
    ],
)
def test_wrong_arguments_are_named(assign, change, message):
    batch = {"llm_loads": [1, 2, 3], "encoder_loads": [1, 2, 3], "num_replicas": 1, "num_microbatches": 2}
    with pytest.raises(AssignmentError, match=message):
        assign(**(batch | change))
