"""The items of an encoder, in the order in which the LLM needs them."""

from collections.abc import Iterable, Mapping

from multimodal.values.assignment import Atom, Microbatch
from multimodal.values.sample_lengths import SampleLengths


def list_items(samples: Iterable[Atom], *, unit: str, lengths_by_sample: Mapping[int, SampleLengths]) -> Microbatch:
    """List the items of `samples` that `unit` encodes, sample by sample, in document order."""
    return tuple(
        Atom(sample.sample_id, index)
        for sample in samples
        for index, item in enumerate(lengths_by_sample[sample.sample_id].items)
        if item.unit == unit
    )
