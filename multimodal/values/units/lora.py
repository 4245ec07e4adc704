"""Low-rank adapters (LoRA: Hu et al., 2021): trained matrices beside the frozen weights of a unit."""

from dataclasses import dataclass, field

from multimodal.values.units.bounds import up_to


@dataclass(frozen=True)
class Lora:
    """Adapters add alpha / rank x B A x to the products W x of some frozen matrices W; A and B are trained."""

    rank: int = field(metadata=up_to(2**14))
    """Rows of A, [rank, inputs], and columns of B, [outputs, rank]."""
    alpha: float | None = field(default=None, metadata={"above": 0, "maximum": 1e6})
    """None: equal to rank, so that B A is added without a factor."""
    targets: tuple[str, ...] = field(default=("*",), metadata={"min_entries": 1})
    """The linear layers, as `<kind of layer>.<module>`. A model file may contain patterns, which its reader resolves."""

    @property
    def scale(self) -> float:
        """The factor alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def modules(self, kind: str) -> tuple[str, ...]:
        """Return the linear layers that are adapted in a layer of this kind."""
        return tuple(module for owner, _, module in (target.partition(".") for target in self.targets) if owner == kind)
