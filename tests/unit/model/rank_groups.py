"""Process groups as layers see them while they are built; nothing can be sent through them."""

from megatron.core.process_groups_config import ProcessGroupCollection


class GroupOfSize:
    """What layers ask of a tensor parallel group while they are built."""

    def __init__(self, size: int, *, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def groups_of(size: int, *, rank: int = 0) -> ProcessGroupCollection:
    """Rank `rank` of a tensor parallel group of `size`; all other groups are this rank alone."""
    tensor, alone = GroupOfSize(size, rank=rank), GroupOfSize(1, rank=0)
    return ProcessGroupCollection(tp=tensor, cp=alone, pp=alone, ep=alone, expt_tp=alone, tp_ep=alone, tp_cp=tensor)
