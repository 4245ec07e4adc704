"""Collectives inside a layer: their seconds, and the seconds for which ranks wait for them."""

from collections.abc import Sequence
from typing import NamedTuple

from multimodal.cost.cluster import Cluster, collective_seconds
from multimodal.cost.seconds.layer_curves import Quadratic

ATTENTION_BACKWARD = 2.5
"""Seconds of flash attention's backward over its forward: five products instead of two, since scores are recomputed (Dao et al.,
FlashAttention, section 3)."""
GATHERED_AT_ONCE_BYTES = 8 * 2**20
"""Most bytes of keys and values that context parallel ranks gather in one step, unless a single group of heads has more."""
GATHERED_STEPS = 2
"""Steps whose keys and values are in memory at a time: the one that is attended to, and the one that is gathered."""
LAYERS_AHEAD = 2
"""Layers whose weights are gathered while another one computes, if replicas share them (ZeRO-3)."""


def count_groups_at_once(num_groups: int, *, bytes_per_group: float) -> int:
    """Return the groups of heads that are gathered in one step, a divisor of all groups; small steps would be latency bound."""
    most = max(1, min(num_groups, int(GATHERED_AT_ONCE_BYTES / max(1.0, bytes_per_group))))
    return max(count for count in range(1, most + 1) if num_groups % count == 0)


def held_key_bytes(num_groups: int, *, bytes_per_group: float) -> float:
    """Return the bytes of gathered keys and values that are in memory at a time."""
    held = GATHERED_STEPS * count_groups_at_once(num_groups, bytes_per_group=bytes_per_group)
    return min(held, num_groups) * bytes_per_group


class LayerCollectives(NamedTuple):
    """Seconds of one layer's collectives in one pass (forward or backward), over all tokens of a load."""

    tensor: Quadratic = Quadratic()
    context: Quadratic = Quadratic()
    """Gathering the keys and values of all heads over context parallel ranks, or returning their gradients, in one step."""
    num_groups: int = 1
    """Groups of heads. `count_groups_at_once` are gathered in one step, while those of the step before are attended to."""
    bytes_per_key: float = 0.0
    """Bytes of one token's key and value in one group of heads."""
    experts: Quadratic = Quadratic()
    """Sending tokens to the ranks of their experts and their outputs back: two exchanges."""

    @property
    def is_spread(self) -> bool:
        """True if context parallel ranks share the tokens."""
        return self.context != Quadratic()

    def exposed_tensor(self, num_tokens: int, num_squared: int, *, products_seconds: float, num_parts: int) -> float:
        """Return the seconds that a pass waits for tensor parallel collectives if these and the products beside them are cut.

        It waits for the first part and for the time by which the other parts outlast the products; with one part, for everything.
        Every part has the latency of a collective. products_seconds: of the matrix products of the pass.
        """
        moving = self.tensor.at(num_tokens, num_squared) + (num_parts - 1) * self.tensor.constant
        return _beside(moving, products_seconds, num_parts) + moving / num_parts

    def exposed_keys(self, num_tokens: int, *, attention_seconds: float, num_ways: int = 1) -> float:
        """Return the seconds that a pass waits for keys and values: the first step, which has a latency as all have.

        The others run beside attention. num_ways: 2 for a backward, which gathers keys and values again, and returns their
        gradients. attention_seconds: of the pass, including a forward that it repeats.
        """
        num_steps = self.num_groups // count_groups_at_once(self.num_groups, bytes_per_group=num_tokens * self.bytes_per_key)
        moving = num_ways * (self.context.at(num_tokens, 0) + (num_steps - 1) * self.context.constant)
        return _beside(moving, attention_seconds, num_steps) + moving / num_steps


def _beside(moving: float, computing: float, num_parts: int) -> float:
    """Return the seconds by which all parts but one outlast the computing that runs beside them."""
    late = moving - computing
    return (late > 0) * late * (num_parts - 1) / num_parts  # not `max`: seconds of many loads may be arrays


def collective_per_token(bytes_per_token: float, *, ranks: Sequence[int], cluster: Cluster) -> Quadratic:
    """Return the seconds of one all-gather or reduce-scatter over tokens."""
    latency = collective_seconds(0.0, ranks=ranks, cluster=cluster)
    return Quadratic(latency, collective_seconds(bytes_per_token, ranks=ranks, cluster=cluster) - latency)
