"""The experts that take the place of one MLP in a transformer layer (mixture of experts)."""

from dataclasses import dataclass, field

from multimodal.values.units.bounds import up_to


@dataclass(frozen=True)
class Experts:
    """MLPs, of which a router selects a few for every token; no token is dropped. Names are Megatron's, without `moe_`."""

    num_experts: int = field(metadata=up_to(2**14))
    router_topk: int = field(default=2, metadata=up_to(2**10))
    """Experts that compute each token."""
    ffn_hidden_size: int | None = field(default=None, metadata=up_to(2**24))
    """Inner width of every expert; None: that of the unit's other MLPs."""
    shared_expert_intermediate_size: int | None = field(default=None, metadata=up_to(2**24))
    """Inner width of an additional MLP that computes every token; None: there is none."""
    aux_loss_coeff: float = field(default=0.0, metadata={"minimum": 0, "maximum": 1000})
    """Weight of the loss that balances experts within every sequence (DeepSeek-V3, 2.1.2), so that no plan changes it."""
    router_pre_softmax: bool = False
    """Weigh the selected experts by their share among all experts instead of among the selected ones."""

    @property
    def activated(self) -> float:
        """Share of the experts' weights that multiply a token."""
        return self.router_topk / self.num_experts
