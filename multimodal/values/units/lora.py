"""Low-rank adapters (LoRA: Hu et al., 2021): what is trained beside the frozen weights of a unit."""

from dataclasses import dataclass, field

from multimodal.values.units.bounds import up_to


@dataclass(frozen=True)
class Lora:
    """To products with some frozen matrices W, that with alpha / rank x B x A is added; A and B are trained."""

    rank: int = field(metadata=up_to(2**14))
    """Rows of A, [rank, inputs], and columns of B, [outputs, rank]."""
    alpha: float | None = field(default=None, metadata={"above": 0, "maximum": 1e6})
    """None: as rank, so that B x A is added as it is."""
    targets: tuple[str, ...] = field(default=("*",), metadata={"min_entries": 1})
    """The linear layers, as `<kind of layer>.<module>`. A model file may have patterns, which its reader resolves."""

    @property
    def scale(self) -> float:
        """Factor of the added product."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def modules(self, kind: str) -> tuple[str, ...]:
        """Return the linear layers that are adapted in a layer of this kind."""
        return tuple(module for owner, _, module in (target.partition(".") for target in self.targets) if owner == kind)
