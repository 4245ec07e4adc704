"""Options of a run that its costs depend on."""

from collections.abc import Callable
from dataclasses import dataclass

from multimodal.cost.engine_limits import Instead, LayerUse, limits_met
from multimodal.cost.layers.layer import Implementation, Recompute
from multimodal.cost.seconds.layer_costs import LayerCosts
from multimodal.cost.token_shares import DEFAULT_BLOCK_SIZE
from multimodal.values.model_graph import Unit

OVERLAPPED_PARTS = 4
"""Parts of `--tp-comm-overlap` unless a run says otherwise."""


@dataclass(frozen=True)
class RunOptions:
    """The flags of pretrain_mllm.py that affect costs."""

    recompute: Recompute | None = None
    zero_stage: int = 1
    """Shared by replicas: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights."""
    reduces_once: bool = False
    """ZeRO-3: gradients are reduced in the last backward of a step, not in each."""
    sequence_parallel: bool = True
    transformer_impl: Implementation = "transformer_engine"
    num_overlapped_parts: int = 1
    """Parts into which a transformer layer's tensor parallel collectives and the products beside them are cut; 1: not cut."""
    item_block_size: int | None = DEFAULT_BLOCK_SIZE
    """Tokens of a block of cut items, if context parallel ranks of encoders and generators have whole items; None: they share the
    tokens of every microbatch evenly."""
    layer_costs: Callable[..., LayerCosts] = LayerCosts
    """Builds the costs of layers, with the arguments of `LayerCosts`. Not a flag: for systems that run layers in other ways."""
    num_state_copies: int | None = None
    """Copies of the optimizer state that replicas keep, each shared by equally many replicas (`state_copies`), and in ZeRO-3 of
    weights; None: one copy, shared by all ranks that hold the same weights."""

    @property
    def hides_waits(self) -> bool:
        """True if nothing can run while a computation waits for tensor parallel ranks, because it does not report its waits."""
        return self.num_overlapped_parts > 1

    def hides_waits_of(self, unit: Unit) -> bool:
        """Return `hides_waits` for a unit, some of which do so with layers of Transformer Engine."""
        is_engine = self.transformer_impl != "local" and not unit.needs_local_layers
        return self.hides_waits or (is_engine and bool(limits_met(LayerUse(unit=unit), Instead.NOTHING_INSIDE)))


DEFAULT_OPTIONS = RunOptions()
"""ZeRO-1, sequence parallelism, fused layers, no recomputation."""
