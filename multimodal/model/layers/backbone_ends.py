"""The first and the last layer of the LLM: token embeddings; norm, output projection and loss of the target tokens.

Apart from the logits, neither direction of the loss holds more than a few rows of them in float32: the forward keeps two numbers
per token, and the backward recomputes probabilities directly into the gradient. Triton's kernels hold none of them.
"""

import dataclasses
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from multimodal.attention.block_attention import capped
from multimodal.model.adapter import adapter_of
from multimodal.model.collectives import RankLink, TensorParallelWaits, gather_rows, sum_rows
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear
from multimodal.model.layers.layer_kind import HeadOutput, LayerContext, LayerKind, StagePass
from multimodal.model.norm import Norm
from multimodal.model.stage_input import pad_channels

CHUNK_ENTRIES = 2**24
"""Number of logits that are held in float32 at a time: 64 MiB, or more if it were above MOST_CHUNKS times."""
MOST_CHUNKS = 16
"""Each takes four kernels forward and five backward."""
HAS_TRITON = find_spec("triton") is not None


class VocabularyShare(NamedTuple):
    """A rank's contiguous part of the padded vocabulary."""

    group: ProcessGroup
    first_id: int
    num_known: int
    """Columns before those that pad the vocabulary, which are excluded from the softmax."""


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, group: ProcessGroup, num_tokens_known: int | None = None
) -> Tensor:
    """Return the loss of each token, [num_tokens], in float32 (float64 for float64 logits), the same on every rank of the group.

    megatron-core has the same function, but it reads its process group from global state, casts to float32 (which exact checks in
    float64 must not do), and holds all logits three times. On CUDA, the backward overwrites the logits.
    logits: [num_tokens, vocab_size / tp], this rank's contiguous share; targets: [num_tokens], int64; num_tokens_known: of the
    vocabulary without its padding, None for all.
    """
    if logits.shape[0] == 0:
        return logits.sum(-1)
    width = logits.shape[-1]
    first_id = group.rank() * width
    num_known = width if num_tokens_known is None else min(max(num_tokens_known - first_id, 0), width)
    return _VocabParallelCrossEntropy.apply(logits, targets, VocabularyShare(group, first_id, num_known))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, share: VocabularyShare) -> Tensor:
        if takes_kernels(logits):
            logits = logits.contiguous()
            found = _kernels().row_sums(logits, targets, first_id=share.first_id, num_known=share.num_known)
        else:
            found = _row_sums(logits, targets, share)
        largest = found[0]
        if share.group.size() > 1:
            largest = largest.clone()
            all_reduce(largest, op=ReduceOp.MAX, group=share.group)
            found[1].mul_((found[0] - largest).exp_())
            all_reduce(found[1:], group=share.group)
        ctx.save_for_backward(logits, targets, largest, found[1])
        ctx.share = share
        return found[1].log() + (largest - found[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, largest, total = ctx.saved_tensors
        scale = gradient / total
        if takes_kernels(logits):
            sums = {"largest": largest, "totals": total, "scales": scale}
            _kernels().overwrite_by_gradient(logits, targets, **sums, first_id=ctx.share.first_id, num_known=ctx.share.num_known)
            increment_version(logits)  # so that torch refuses a second backward, which would find no logits
            return logits.detach(), None, None
        known, local, is_mine = _known_columns(logits, targets, ctx.share)
        of_logits = torch.empty_like(logits)
        of_logits[:, ctx.share.num_known :] = 0.0
        of_targets = torch.where(is_mine, -total, 0.0)
        for rows in _chunks(known) if ctx.share.num_known else ():
            found = _exponentials(known, largest, rows)
            found.scatter_add_(-1, local[rows, None], of_targets[rows, None])
            of_logits[rows, : ctx.share.num_known] = found.mul_(scale[rows, None])
        return of_logits, None, None


def takes_kernels(logits: Tensor) -> bool:
    """Return True if Triton's kernels compute the loss: on CUDA, but in float64."""
    return logits.is_cuda and logits.dtype != torch.float64 and HAS_TRITON


def _kernels() -> ModuleType:
    return import_module("multimodal.model.layers.cross_entropy_kernels")


def _row_sums(logits: Tensor, targets: Tensor, share: VocabularyShare) -> Tensor:
    """Return each row's maximum, sum of exponentials and target's logit (0 if it is not here): [3, num_tokens]."""
    known, local, is_mine = _known_columns(logits, targets, share)
    found = logits.new_zeros(3, len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
    if not share.num_known:
        found[0] = -torch.inf
        return found
    found[0] = known.amax(-1)
    for rows in _chunks(known):
        torch.sum(_exponentials(known, found[0], rows), -1, out=found[1, rows])
    found[2] = known.gather(-1, local[:, None])[:, 0].masked_fill_(~is_mine, 0.0)
    return found


def _known_columns(logits: Tensor, targets: Tensor, share: VocabularyShare) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits without padding, columns of targets (an arbitrary one for other ranks'), and which targets are here."""
    local = targets - share.first_id
    is_mine = (local >= 0) & (local < share.num_known)
    return logits[:, : share.num_known], local.clamp(0, max(share.num_known - 1, 0)), is_mine


def _exponentials(logits: Tensor, largest: Tensor, rows: slice) -> Tensor:
    """Return the exponentials of some rows' distances to their largest entries, in the wider of the two types."""
    return logits[rows].to(largest.dtype, copy=True).sub_(largest[rows, None]).exp_()


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yield rows to be computed at a time."""
    num_rows, width = logits.shape
    size = max(1, max(CHUNK_ENTRIES, logits.numel() // MOST_CHUNKS) // width)
    return (slice(start, start + size) for start in range(0, num_rows, size))


class TokenEmbedding(torch.nn.Module):
    """Word embeddings split over tensor parallel ranks; positions are rotary, so none are added."""

    waits: TensorParallelWaits | None = None

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        config, size = context.config, context.config.hidden_size
        self.scale = size**0.5 if context.unit.transformer.scales_embeddings else 1.0
        self.num_channels = context.graph.width_behind(context.unit.name, 0)
        self.word_embeddings = VocabParallelEmbedding(
            context.vocab_size, size, init_method=config.init_method, config=config, tp_group=context.groups.tp
        )
        self.link = RankLink(context.groups.tp, is_sequence_parallel=False)

    def forward(self, _: None, given: StagePass) -> Tensor:
        """Return the embeddings of all tokens, and of items: [num_tokens, 1, channels], the same on every tensor parallel rank.

        The inputs of the LLM's first layers from items (deepstack) are in the channels behind the hidden states.
        """
        batch = given.batch
        assert batch.token_ids is not None
        hidden = sum_rows(self._look_up(batch.token_ids), self.link._replace(waits=self.waits))
        if self.scale != 1.0:  # rounded to the type of the embeddings, as transformers do
            hidden = hidden * torch.tensor(self.scale, dtype=hidden.dtype, device=hidden.device)
        hidden = pad_channels(hidden, self.num_channels)
        if batch.item_rows is not None and given.item_embeddings is not None:
            items = pad_channels(given.item_embeddings, self.num_channels).to(hidden.dtype)
            if batch.item_ends is not None:
                items = torch.where(batch.item_ends[:, None], hidden.index_select(0, batch.item_rows), items)
            hidden = hidden.index_copy(0, batch.item_rows, items)
        return hidden[:, None]

    def _look_up(self, token_ids: Tensor) -> Tensor:
        """Return the rows of the ids that this rank holds, and zeros for the others."""
        if self.link.group.size() == 1:
            return self._rows(token_ids)
        local = token_ids - self.word_embeddings.vocab_start_index
        is_mine = (local >= 0) & (local < len(self.word_embeddings.weight))
        return self._rows(local.where(is_mine, 0)) * is_mine[:, None]

    def _rows(self, indices: Tensor) -> Tensor:
        """Return these rows of the matrix, with what is added to new ones."""
        found, adapter = torch.nn.functional.embedding(indices, self.word_embeddings.weight), adapter_of(self.word_embeddings)
        return found if adapter is None else found + torch.nn.functional.embedding(indices, adapter.up).matmul(adapter.down)


class TokenEmbeddingKind(LayerKind):
    """Reads `batch.token_ids`, and the encoders' outputs."""

    column_parallel = ("word_embeddings",)

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return token ids."""
        return {"token_ids": torch.randint(context.vocab_size, (num_tokens,), device=torch.cuda.current_device())}, None


class LanguageHead(torch.nn.Module):
    """Norm and output projection of target tokens only: other tokens have no loss, so their logits are never computed."""

    waits: TensorParallelWaits | None = None

    def __init__(self, context: LayerContext) -> None:
        """Build it for the padded vocabulary, without its own weights if the embeddings are tied."""
        super().__init__()
        config, self.group, self.softcap = context.config, context.groups.tp, context.unit.transformer.logit_softcap
        self.is_sequence_sharded = config.sequence_parallel
        self.num_tokens_known = context.unit.num_tokens_known(context.vocab_size)
        self.norm = Norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        whole = dataclasses.replace(config, sequence_parallel=False)
        given: dict[str, Any] = {"config": whole, "init_method": config.init_method, "tp_group": self.group, "bias": False}
        given |= {"gather_output": False, "skip_weight_param_allocation": context.unit.ties_embeddings}
        self.output_layer = DeferrableColumnParallelLinear(config.hidden_size, context.vocab_size, **given)

    def forward(self, hidden: Tensor, given: StagePass) -> HeadOutput:
        """Return the summed loss of the targets, and in evaluation which of them greedy decoding gets right.

        hidden: [num_rows, 1, hidden_size]; under sequence parallelism this rank's 1 / tp of the padded rows. Rows for generators
        (`batch.generator_rows`) are returned as `conditions`, [num_generator_rows, hidden_size]; None without generators.
        """
        batch, targets = given.batch, given.batch.targets
        assert batch.target_rows is not None and targets is not None
        hidden = gather_rows(self.norm(hidden), RankLink(self.group, self.is_sequence_sharded, self.waits))
        conditions = None if batch.generator_rows is None else hidden.index_select(0, batch.generator_rows)[:, 0]
        logits, _ = self.output_layer(hidden.index_select(0, batch.target_rows), weight=given.shared_weight)
        logits = capped(logits[:, 0], self.softcap)
        losses = vocab_parallel_cross_entropy(logits, targets, group=self.group, num_tokens_known=self.num_tokens_known)
        if batch.target_weights is not None:
            losses = losses * batch.target_weights.to(losses.dtype)
        if self.training:
            return HeadOutput(losses.sum(), None, conditions, token_losses=losses.detach())
        all_logits = gather_from_tensor_model_parallel_region(self._without_padding(logits.detach()), group=self.group)
        is_correct = all_logits.argmax(-1) == targets if len(targets) else torch.ones_like(targets, dtype=torch.bool)
        return HeadOutput(losses.sum(), is_correct, conditions, all_logits, losses.detach())

    def _without_padding(self, logits: Tensor) -> Tensor:
        """Exclude rows that pad the vocabulary from decoding; logits: [num_targets, vocab_size / tp]."""
        num_mine = self.num_tokens_known - self.group.rank() * logits.shape[-1]
        if num_mine >= logits.shape[-1]:
            return logits
        is_padding = torch.arange(logits.shape[-1], device=logits.device) >= num_mine
        return logits.masked_fill(is_padding, torch.finfo(logits.dtype).min)


class HeadKind(LayerKind):
    """Reads `batch.target_rows`, `batch.targets`, `batch.target_weights` and `batch.generator_rows`."""

    column_parallel = ("output_layer",)

    def random_input(self, context: LayerContext, *, num_tokens: int, num_sequences: int) -> tuple[dict[str, Any], Tensor | None]:
        """Return a target for every token."""
        device = torch.cuda.current_device()
        targets = torch.randint(context.unit.num_tokens_known(context.vocab_size), (num_tokens,), device=device)
        return {"target_rows": torch.arange(num_tokens, device=device), "targets": targets}, None
