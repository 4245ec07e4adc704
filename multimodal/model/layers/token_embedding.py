"""The LLM's first layer: token ids to hidden states, with the encoders' outputs in the places of their items."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module

from multimodal.model.layers.layer_kind import LayerContext, LayerKind, StagePass


class TokenEmbedding(torch.nn.Module):
    """Word embeddings split over tensor parallel ranks; positions are rotary, so there are no others."""

    def __init__(self, *, config: TransformerConfig, groups: ProcessGroupCollection, vocab_size: int) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, config.hidden_size, init_method=config.init_method, config=config, tp_group=groups.tp
        )

    def forward(self, token_ids: Tensor, item_rows: Tensor | None, item_embeddings: Tensor | None) -> Tensor:
        """Look up and fill in.

        token_ids: [num_tokens]; item_rows: [num_item_tokens], where each row of item_embeddings [num_item_tokens, hidden_size]
        goes.

        Returns [num_tokens, 1, hidden_size], the same on every tensor parallel rank.
        """
        hidden: Tensor = self.word_embeddings(token_ids)
        if item_rows is not None and item_embeddings is not None:
            hidden = hidden.index_copy(0, item_rows, item_embeddings.to(hidden.dtype))
        return hidden[:, None]


class TokenEmbeddingKind(LayerKind):
    """Reads `batch.token_ids`, and the encoders' outputs."""

    column_parallel = ("word_embeddings",)
    takes_hidden = False

    def build(self, context: LayerContext, index: int) -> TokenEmbedding:
        """Build it for the padded vocabulary."""
        return TokenEmbedding(config=context.config, groups=context.groups, vocab_size=context.vocab_size)

    def run(self, layer: Module, hidden: Tensor, given: StagePass) -> Tensor:
        """Look all tokens up."""
        embedded: Tensor = layer(given.batch.token_ids, given.batch.item_rows, given.item_embeddings)
        return embedded

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Token ids."""
        return {"token_ids": torch.randint(context.vocab_size, (num_tokens,), device=torch.cuda.current_device())}, None
