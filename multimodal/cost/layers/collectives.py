"""Collectives inside a layer: their seconds, and the share of them in which ranks wait."""

from collections.abc import Sequence
from typing import NamedTuple

from multimodal.cost.cluster import Cluster
from multimodal.cost.communication import collective_seconds
from multimodal.cost.seconds.layer_curves import Quadratic

ATTENTION_BACKWARD = 2.5
"""Flash attention's backward over its forward: five products instead of two, since scores are not kept but computed again
(Dao et al., FlashAttention, section 3)."""


class LayerCollectives(NamedTuple):
    """Seconds of one layer's collectives in one pass (forward or backward), over all tokens of a load."""

    tensor: Quadratic = Quadratic()
    """Over tensor parallel ranks."""
    context: Quadratic = Quadratic()
    """Gathering the keys and values of all heads over context parallel ranks, or sending their gradients home."""
    num_steps: int = 1
    """Groups of heads that are gathered one after another; one group is attended to while the next one comes."""

    @property
    def is_spread(self) -> bool:
        """True if context parallel ranks share the tokens."""
        return self.context != Quadratic()

    def exposed_tensor(self, num_tokens: int, num_squared: int, *, products_seconds: float, num_parts: int) -> float:
        """Seconds that a pass waits for tensor parallel collectives cut into parts, as are the products beside them.

        The first part is waited for, and what outlasts the products; with one part, everything. Every part pays the latency of a
        collective. products_seconds: of the matrix products of the pass.
        """
        moving = self.tensor.at(num_tokens, num_squared) + (num_parts - 1) * self.tensor.constant
        return _beside(moving, products_seconds, num_parts) + moving / num_parts

    def exposed_gathering(self, num_tokens: int, num_squared: int, *, attention_seconds: float) -> float:
        """Seconds that a forward waits for keys and values: for the first group, and where gathering outlasts attention."""
        gathering = self.context.at(num_tokens, num_squared)
        return _beside(gathering, attention_seconds, self.num_steps) + gathering / self.num_steps

    def exposed_way_back(self, num_tokens: int, num_squared: int, *, attention_seconds: float) -> float:
        """Seconds that a backward waits: it gathers again, repeats attention, and sends gradients home.

        It waits for the first group to come and for the gradients of the last one to go; in between, both run beside attention's
        forward and backward. attention_seconds: of a forward.
        """
        gathering = self.context.at(num_tokens, num_squared)
        computing = (1 + ATTENTION_BACKWARD) * attention_seconds
        return _beside(2 * gathering, computing, self.num_steps) + 2 * gathering / self.num_steps


def _beside(moving: float, computing: float, num_parts: int) -> float:
    """Seconds by which all parts but one outlast the computing that runs beside them."""
    return max(0.0, moving - computing) * (num_parts - 1) / num_parts


def collective_per_token(bytes_per_token: float, *, ranks: Sequence[int], cluster: Cluster) -> Quadratic:
    """Return the seconds of one all-gather or reduce-scatter over tokens."""
    latency = collective_seconds(0.0, ranks=ranks, cluster=cluster)
    return Quadratic(latency, collective_seconds(bytes_per_token, ranks=ranks, cluster=cluster) - latency)
