"""The LLM's first layer: token ids to hidden states, with the encoders' outputs in the places of their items."""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


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
