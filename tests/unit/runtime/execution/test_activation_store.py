import gc
import weakref

import pytest
import torch

from megatron.runtime.execution.activation_store import ActivationStore, SavedTensors, size_of


def test_the_peak_is_the_most_that_was_stored_at_once() -> None:
    store = ActivationStore()
    store.put("a", 1, size_bytes=100)
    store.put("b", 2, size_bytes=50)
    assert store.take("a") == 1
    store.put("c", 3, size_bytes=80)
    store.grow(10)
    assert store.peak_bytes == 150
    store.grow(20)
    assert store.peak_bytes == 160


def test_an_entry_is_taken_once_and_then_freed() -> None:
    class Value:
        pass

    store, value = ActivationStore(), Value()
    reference = weakref.ref(value)
    store.put("a", value, size_bytes=0)
    del value
    assert store.take("a") is reference()
    gc.collect()
    assert reference() is None
    with pytest.raises(KeyError):
        store.take("a")


def test_a_key_is_stored_once_and_named_if_it_is_left_over() -> None:
    store = ActivationStore()
    store.check_empty()
    store.put("forgotten", 1, size_bytes=0)
    with pytest.raises(AssertionError, match="forgotten is stored already"):
        store.put("forgotten", 2, size_bytes=0)
    with pytest.raises(AssertionError, match=r"left over at the end of a step: \['forgotten'\]"):
        store.check_empty()


def test_saved_tensors_count_each_storage_once_and_parameters_never() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    hidden = torch.ones(2, 4)
    saved = SavedTensors(frozenset({weight.untyped_storage().data_ptr()}))
    with saved:
        product = hidden @ weight  # keeps `hidden` and `weight`
        squares = product * product  # keeps `product`, twice
    assert saved.size_bytes == size_of(hidden) + size_of(product)
    squares.sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 4), 16.0))


def test_saved_tensors_are_freed_with_the_graph() -> None:
    weight = torch.ones(4, requires_grad=True)
    with SavedTensors(frozenset()):
        output = (weight * 2).exp()
    reference = weakref.ref(output)
    del output
    assert reference() is None, "the graph is held by a reference cycle"


def test_sizes_are_of_elements() -> None:
    assert (size_of(None), size_of(torch.zeros(3, dtype=torch.bfloat16))) == (0, 6)
