from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from multimodal.balance.algorithms.greedy_assignment import effective_num_microbatches, stratify


def loads_of(loads, places, num_bins):
    totals = [0.0] * num_bins
    for load, place in zip(loads, places, strict=True):
        totals[place] += load
    return totals


def test_one_heavy_sample_lowers_the_number_of_microbatches():
    encoder = [10.0, 5.0, 5.0, 4.0]
    counts = {"members": range(4), "num_microbatches": 4}
    assert effective_num_microbatches([encoder], **counts) == 2
    assert effective_num_microbatches([encoder], **counts, min_num_microbatches=3) == 3
    assert effective_num_microbatches([[5.0, 5.0, 5.0, 5.0]], **counts) == 4


def test_the_number_of_microbatches_is_as_asked_where_no_encoder_has_work():
    assert effective_num_microbatches([[0.0] * 6], members=range(6), num_microbatches=4) == 4
    assert effective_num_microbatches([], members=range(6), num_microbatches=4) == 4
    assert effective_num_microbatches([], members=range(3), num_microbatches=4) == 3


def test_a_rare_modality_leaves_the_others_their_microbatches():
    vision, audio = [4.0] * 8, [0.0] * 7 + [9.0]
    assert effective_num_microbatches([vision, audio], members=range(8), num_microbatches=8) == 8


def test_a_tiny_load_does_not_overflow():
    assert effective_num_microbatches([[5e-324, 5e-324]], members=range(2), num_microbatches=2) == 2


def test_every_microbatch_gets_coarse_and_fine_samples():
    llm = [9.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0]
    encoder = [4.0, 3.0, 2.0, 2.0, 6.0, 5.0, 5.0, 4.0]
    places = stratify(llm, encoders=[encoder], members=range(8), num_microbatches=4)
    assert sorted(places[:4]) == sorted(places[4:]) == [0, 1, 2, 3]
    assert loads_of(encoder, places, 4) == [8.0, 8.0, 8.0, 7.0]


def test_samples_without_encoder_work_fill_the_llm():
    llm, encoder = [8.0, 2.0, 3.0, 3.0], [5.0, 5.0, 0.0, 0.0]
    places = stratify(llm, encoders=[encoder], members=range(4), num_microbatches=2)
    assert loads_of(llm, places, 2) == [8.0, 8.0]


def test_encoders_are_balanced_each_for_itself():
    vision, audio = [6.0, 6.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]
    places = stratify([1.0] * 4, encoders=[vision, audio], members=range(4), num_microbatches=2)
    assert loads_of(vision, places, 2) == [6.0, 6.0] and loads_of(audio, places, 2) == [1.0, 1.0]


@given(
    samples=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=7),
    num_microbatches=st.integers(1, 4),
)
def test_the_heaviest_encoder_microbatch_keeps_list_schedulings_bound(samples, num_microbatches):
    llm, encoder = ([float(each[index]) for each in samples] for index in (0, 1))
    count = min(num_microbatches, len(samples))
    places = stratify(llm, encoders=[encoder], members=range(len(samples)), num_microbatches=count)
    assert set(places) == set(range(count))
    best = min(max(loads_of(encoder, each, count)) for each in product(range(count), repeat=len(samples)))
    assert max(loads_of(encoder, places, count)) <= (2 - 1 / count) * best + 1e-9
