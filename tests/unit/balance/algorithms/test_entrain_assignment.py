import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimodal.balance.algorithms.entrain_assignment import assign_entrain
from multimodal.values.errors import AssignmentError
from tests.unit.without_kernels import without_kernels

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
    }


@given(batch=batches())
def test_the_kernel_equals_its_reference(batch):
    assert assign_entrain(**batch) == without_kernels(assign_entrain)(**batch)


def grouped(replicas, encoded, run, counts) -> list[tuple[list[list[int]], list[list[int]]]]:
    """The encoder and the LLM microbatches of every replica."""
    groups = [([[] for _ in range(count)], [[] for _ in range(count)]) for count in counts]
    for sample, (replica, *microbatches) in enumerate(zip(replicas, encoded, run, strict=True)):
        for own, microbatch in zip(groups[replica], microbatches, strict=True):
            own[microbatch].append(sample)
    return groups


@settings(max_examples=50)
@given(batch=batches())
def test_every_sample_is_encoded_once_and_in_the_llm_at_once_or_one_microbatch_later(batch):
    replicas, encoded, run, counts = assign_entrain(**batch)
    assert len(counts) == batch["num_replicas"] and len(replicas) == len(encoded) == len(run) == len(batch["llm_loads"])
    assert set(np.subtract(run, encoded).tolist()) <= {0, 1}
    for of_encoder, of_llm in grouped(replicas, encoded, run, counts):
        assert all(of_encoder) or not np.any(batch["encoder_loads"])
        assert all(of_llm) and len(of_llm) <= batch["num_microbatches"]


def test_deferral_evens_the_llm_out_and_leaves_the_encoder_even():
    generator = np.random.default_rng(0)
    encoder, llm = generator.lognormal(5, 0.5, 512), generator.lognormal(5, 0.8, 512)
    found = grouped(*assign_entrain(llm, encoder_loads=encoder, num_replicas=4, num_microbatches=8))

    def deviation(loads, groups):
        totals = np.array([loads[list(members)].sum() for members in groups])
        return totals.std() / totals.mean()

    in_order = np.arange(512).reshape(32, 16)
    assert deviation(encoder, [m for encoded, _ in found for m in encoded]) < 0.02
    assert deviation(llm, [m for _, run in found for m in run]) < 0.2 * deviation(llm, in_order)
    assert deviation(encoder, in_order) > 0.1
    at_once = sum(len({*e} & {*m}) for encoded, run in found for e, m in zip(encoded, run, strict=True))
    assert 384 < at_once < 512


def test_the_number_of_microbatches_is_lowered_on_request_only():
    batch = {"encoder_loads": [9, 1, 1, 1, 1, 1, 1, 1], "num_replicas": 1, "num_microbatches": 4}
    for least, count in ((None, 4), (1, 1), (3, 3), (9, 4)):
        assert list(assign_entrain([1] * 8, **batch, min_num_microbatches=least)[3]) == [count]


def test_several_encoders_are_balanced_each_for_itself():
    vision, audio = [4, 4, 0, 0], [0, 0, 4, 4]
    found = assign_entrain([1, 1, 1, 1], encoder_loads=[vision, audio], num_replicas=1, num_microbatches=2)
    ((encoded, _),) = grouped(*found)
    assert all({s < 2 for s in members} == {True, False} for members in encoded)


@pytest.mark.parametrize("assign", [assign_entrain, without_kernels(assign_entrain)])
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
        ({"encoder_loads": [[1e308, 1, 1], [1e308, 1, 1]]}, "encoder loads: the loads add up to inf"),
        ({"num_replicas": 0}, "num_replicas is 0; it must be from 1"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"num_replicas": 4}, "3 samples cannot fill 4 replicas; use a larger global batch or fewer replicas"),
    ],
)
def test_wrong_arguments_are_named(assign, change, message):
    batch = {"llm_loads": [1, 2, 3], "encoder_loads": [1, 2, 3], "num_replicas": 1, "num_microbatches": 2}
    with pytest.raises(AssignmentError, match=message):
        assign(**(batch | change))
