"""The first layer of encoders that other encoders feed: joins their outputs for each item by channels or by tokens."""

from typing import Any

import torch
from torch import Tensor

from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass


class JoinedTokens(torch.nn.Module):
    """Puts rows of encoders, padded with zeros where they have fewer channels, into their places; has no weights."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.hidden_size, self.dtype = context.unit.transformer.hidden_size, context.options.precision.params_dtype
        self.widths = _widths(context) if context.unit.join == "features" else ()
        """Channels of each encoder, which are concatenated; empty: encoders have equal widths, and separate tokens."""

    def forward(self, _: None, given: StagePass) -> Tensor:
        """Put all rows into their places; returns [num_tokens, 1, hidden_size]."""
        found, rows, sources = given.item_embeddings, given.batch.item_rows, given.batch.item_sources
        assert rows is not None and sources is not None
        num_tokens = given.batch.num_tokens
        if found is None:
            return torch.zeros(num_tokens, 1, self.hidden_size, device=rows.device, dtype=self.dtype)
        if not self.widths:
            return found.new_zeros(num_tokens, self.hidden_size).index_put((rows,), found)[:, None]
        of_source = found.new_zeros(len(self.widths), num_tokens, found.shape[1]).index_put((sources, rows), found)
        parts = zip(of_source, self.widths, strict=True)
        return torch.cat([part[:, :width] for part, width in parts], dim=-1)[:, None]


class JoinedTokensKind(LayerKind):
    """Reads the outputs of other encoders, `batch.item_rows` and `batch.item_sources`."""

    takes_hidden = False
    module = JoinedTokens

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return random rows: as many of each encoder as there are tokens, or (joined as a sequence) as many of all together."""
        widths, device = _widths(context), torch.cuda.current_device()
        num_sources = len(widths) if context.unit.join == "features" else 1
        rows = torch.arange(num_tokens, device=device).repeat(num_sources)
        sources = torch.arange(num_sources, device=device).repeat_interleave(num_tokens)
        return {"item_rows": rows, "item_sources": sources}, context.random(len(rows), max(widths)).requires_grad_()


def _widths(context: LayerContext) -> tuple[int, ...]:
    graph = context.graph
    names = graph.upstream(context.unit.name)
    return tuple(graph.width_behind(name, len(graph.unit(name).layers) - 1) for name in names)
