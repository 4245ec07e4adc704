"""The first layer of encoders that other encoders feed: joins their outputs for each item by channels or by tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass


class JoinedTokens(torch.nn.Module):
    """Puts rows into their places; has no weights.

    widths: channels of each encoder, which are concatenated; empty: encoders have equal widths, and separate tokens.
    """

    def __init__(self, hidden_size: int, *, widths: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden_size, self.widths, self.dtype = hidden_size, widths, dtype

    def forward(self, given: Tensor | None, rows: Tensor, sources: Tensor, num_tokens: int) -> Tensor:
        """given: [num_rows, channels], padded with zeros for encoders with fewer channels; rows, sources: [num_rows].

        Returns [num_tokens, 1, hidden_size].
        """
        if given is None:
            return torch.zeros(num_tokens, 1, self.hidden_size, device=rows.device, dtype=self.dtype)
        if not self.widths:
            return given.new_zeros(num_tokens, self.hidden_size).index_put((rows,), given)[:, None]
        of_source = given.new_zeros(len(self.widths), num_tokens, given.shape[1]).index_put((sources, rows), given)
        parts = zip(of_source, self.widths, strict=True)
        return torch.cat([part[:, :width] for part, width in parts], dim=-1)[:, None]


class JoinedTokensKind(LayerKind):
    """Reads the outputs of other encoders, `batch.item_rows` and `batch.item_sources`."""

    takes_hidden = False

    def build(self, context: LayerContext, index: int) -> JoinedTokens:
        """Build it for the encoders that feed the unit."""
        widths = self._widths(context) if context.unit.join == "features" else ()
        return JoinedTokens(context.unit.transformer.hidden_size, widths=widths, dtype=context.options.precision.params_dtype)

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Put all rows into their places."""
        batch = given.batch
        return layer(given.item_embeddings, batch.item_rows, batch.item_sources, batch.num_tokens)

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return random rows: as many of each encoder as there are tokens, or (joined as a sequence) as many of all together."""
        widths, device = self._widths(context), torch.cuda.current_device()
        num_sources = len(widths) if context.unit.join == "features" else 1
        rows = torch.arange(num_tokens, device=device).repeat(num_sources)
        sources = torch.arange(num_sources, device=device).repeat_interleave(num_tokens)
        return {"item_rows": rows, "item_sources": sources}, context.random(len(rows), max(widths)).requires_grad_()

    def _widths(self, context: LayerContext) -> tuple[int, ...]:
        graph = context.graph
        names = graph.upstream(context.unit.name)
        return tuple(graph.width_behind(name, len(graph.unit(name).layers) - 1) for name in names)
