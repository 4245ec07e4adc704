"""Lengths of a global batch for a training process: its own samples' unpickled, the others' only when they are read."""

import pickle
from collections.abc import Collection, Iterator, Mapping

from multimodal.values.sample_lengths import SampleLengths


class FoldedLengths(Mapping[int, SampleLengths]):
    """Sample id -> lengths. A process that receives it from a loader unpickles thousands of samples only if it reads them."""

    def __init__(self, lengths: Mapping[int, SampleLengths], *, own: Collection[int]) -> None:
        """own: the samples that this rank computes with."""
        self._size = len(lengths)
        self._own = {sample: lengths[sample] for sample in own}
        self._folded = pickle.dumps(dict(lengths), protocol=pickle.HIGHEST_PROTOCOL)
        self._all: Mapping[int, SampleLengths] | None = None

    def __getitem__(self, sample: int) -> SampleLengths:
        return self._own[sample] if sample in self._own else self._unfold()[sample]

    def __iter__(self) -> Iterator[int]:
        return iter(self._unfold())

    def __len__(self) -> int:
        return self._size

    def _unfold(self) -> Mapping[int, SampleLengths]:
        if self._all is None:
            self._all = pickle.loads(self._folded)
        return self._all
