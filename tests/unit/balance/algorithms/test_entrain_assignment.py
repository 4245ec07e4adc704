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


@settings(max_examples=50)
@given(batch=batches())
def test_every_sample_is_encoded_once_and_in_the_llm_at_once_or_one_microbatch_later(batch):
    found = assign_entrain(**batch)
    assert len(found) == batch["num_replicas"]
    everyone = list(range(len(batch["llm_loads"])))
    for side in ("encoder_microbatches", "llm_microbatches"):
        assert sorted(s for replica in found for members in getattr(replica, side) for s in members) == everyone
    for replica in found:
        assert all(replica.encoder_microbatches) or not np.any(batch["encoder_loads"])
        assert all(replica.llm_microbatches)
        assert len(replica.encoder_microbatches) == len(replica.llm_microbatches) <= batch["num_microbatches"]
        encoded = {s: index for index, members in enumerate(replica.encoder_microbatches) for s in members}
        run = {s: index for index, members in enumerate(replica.llm_microbatches) for s in members}
        assert {run[s] - encoded[s] for s in run} <= {0, 1}


def test_deferral_evens_the_llm_out_and_leaves_the_encoder_even():
    generator = np.random.default_rng(0)
    encoder, llm = generator.lognormal(5, 0.5, 512), generator.lognormal(5, 0.8, 512)
    found = assign_entrain(llm, encoder_loads=encoder, num_replicas=4, num_microbatches=8)

    def deviation(loads, groups):
        totals = np.array([loads[list(members)].sum() for members in groups])
        return totals.std() / totals.mean()

    in_order = np.arange(512).reshape(32, 16)
    assert deviation(encoder, [m for r in found for m in r.encoder_microbatches]) < 0.02
    assert deviation(llm, [m for r in found for m in r.llm_microbatches]) < 0.2 * deviation(llm, in_order)
    assert deviation(encoder, in_order) > 0.1
    at_once = sum(len({*e} & {*m}) for r in found for e, m in zip(r.encoder_microbatches, r.llm_microbatches, strict=True))
    assert 384 < at_once < 512


def test_the_number_of_microbatches_is_lowered_on_request_only():
    batch = {"encoder_loads": [9, 1, 1, 1, 1, 1, 1, 1], "num_replicas": 1, "num_microbatches": 4}
    for least, count in ((None, 4), (1, 1), (3, 3), (9, 4)):
        (replica,) = assign_entrain([1] * 8, **batch, min_num_microbatches=least)
        assert len(replica.llm_microbatches) == count


def test_several_encoders_are_balanced_each_for_itself():
    vision, audio = [4, 4, 0, 0], [0, 0, 4, 4]
    (replica,) = assign_entrain([1, 1, 1, 1], encoder_loads=[vision, audio], num_replicas=1, num_microbatches=2)
    assert all({s < 2 for s in members} == {True, False} for members in replica.encoder_microbatches)


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
