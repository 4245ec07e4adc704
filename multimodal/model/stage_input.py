"""Inputs of a stage in addition to the activations of the stage before it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from multimodal.attention.device_values import HoldsTensors
from multimodal.attention.packed_lengths import ItemSpan, PackedLengths, Windows, order_by_window
from multimodal.cost.token_shares import RankShare, WholeItemShares
from multimodal.model.latents import ItemsMade, NoisePath
from multimodal.values.model_graph import Unit


@dataclass(frozen=True)
class PackedInput(HoldsTensors):
    """One packed microbatch as a unit's stages see it; all tensors on the stage's device.

    With context parallelism, `lengths` and `items` describe the whole microbatch, from which the mask is derived; all else
    describes the tokens in `share` (see `share_input`).
    """

    lengths: tuple[int, ...]
    """Tokens of each packed sequence."""
    positions: Tensor
    """[num_tokens] (text), [num_tokens, 2] (rows and columns of patches), [num_tokens, 3] (time, row and column in an LLM; the
    values of `audio_positions` for tokens of sound) or [num_tokens, 4] (row and column of patches, and the image's numbers of
    both, if learned positions are interpolated to it)."""
    patches: Tensor | None = None
    """[num_tokens, patch_channels]: the input of an encoder's first stage, or the target of a generator's last stage (for
    `target_rows` if these are given)."""
    items_made: ItemsMade | None = None
    """For generators of latents, or with a module of diffusers; where it has pixels, `patches` are those of all images."""
    path: NoisePath | None = None
    """For generators that learn a flow."""
    token_ids: Tensor | None = None
    """[num_tokens]; for the LLM only."""
    items: tuple[ItemSpan, ...] = ()
    """Places of the encoders' items among the tokens, for the attention mask; for the LLM only, on every stage."""
    item_rows: Tensor | None = None
    """[num_item_tokens]: rows that encoder outputs fill, in the order in which they are given; for the first stage of the LLM, or
    of an encoder that other encoders feed."""
    item_ends: Tensor | None = None
    """[num_item_tokens]: True for those that keep the text's own token, behind the rows of an image; None: no rows have ends."""
    item_sources: Tensor | None = None
    """[num_item_tokens]: the unit that each row comes from, as its index in the order of the model's edges; for the first stage
    of an encoder, or a generator, that encoders feed."""
    target_rows: Tensor | None = None
    """[num_targets]: rows that count in the loss; for the LLM's last stage, and that of a generator that encoders feed."""
    targets: Tensor | None = None
    """[num_targets]."""
    target_weights: Tensor | None = None
    """[num_targets], or [num_patches] of a generator, float64; None: all 1."""
    generator_rows: Tensor | None = None
    """[num_conditions]: rows whose hidden states generators receive; for the LLM's last stage, if there are any."""
    condition_rows: Tensor | None = None
    """[num_tokens]: the received row that each token is made from; for a generator's first stage."""
    last_condition_rows: Tensor | None = None
    """[num_tokens]: the row that the patches of each token's item are made from, where other tokens need it, too."""
    windows: Windows | None = None
    """The windows of this rank's tokens; for encoders whose patches attend inside windows."""
    kept_rows: Tensor | None = None
    """[num_patches]: this rank's tokens that are not dropped; for encoders that drop some at their end. For encoders of images
    whose rows have ends in the LLM, as `find_row_ends` returns them."""
    share: RankShare | None = None
    """Tokens that this rank holds; None: all."""
    packed: PackedLengths | None = None
    """Lengths as layers take them, with everything derived from them (`prepare_input`); None: not prepared."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that this rank holds."""
        return sum(self.lengths) if self.share is None else self.share.num_tokens

    @property
    def places(self) -> Tensor:
        """The positions that rotate queries and keys."""
        is_stretched = self.positions.dim() > 1 and self.positions.shape[1] == 4
        return self.positions[:, :2] if is_stretched else self.positions

    @property
    def items_of_patches(self) -> Tensor:
        """[num_patches]: the item of each patch, if a generator learns a flow; without `target_rows` all tokens are patches."""
        assert self.path is not None, "the generator learns no flow"
        return self.path.items if self.target_rows is None else self.path.items.index_select(0, self.target_rows)

    def with_windows_of(self, unit: Unit) -> "PackedInput":
        """Return the same input with the windows of an encoder's images, or the chunks of its clips, if it has any."""
        if not unit.has_windows:
            return self
        if unit.audio is not None:
            places, size = self.positions[:, :1], unit.audio.chunk_tokens or 0
        else:
            assert unit.image is not None
            places, size = self.places, unit.image.window_patches
        return replace(self, windows=order_by_window(places, self.own_lengths, size=size))

    def with_kept_rows(self) -> "PackedInput":
        """Return the same input with the rows of all tokens that the encoder keeps: dropped ones have a last place below 0."""
        return replace(self, kept_rows=(self.positions[:, -1] >= 0).nonzero()[:, 0])

    @property
    def own_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence that this rank holds; of whole sequences if ranks share them."""
        if self.share is None:
            return self.lengths
        shares = self.share.shares
        assert isinstance(shares, WholeItemShares) and not shares.cut_lengths, "items are cut"
        return shares.lengths_of(self.share.rank)


def find_row_ends(places: Tensor) -> Tensor:
    """Return the patch of each output token, [num_patches + num_rows]: num_patches behind a row; places: [num_patches, 2]."""
    num_patches, columns = len(places), places[:, 1]
    is_last = torch.ones_like(columns, dtype=torch.bool)
    is_last[:-1] = columns[1:] != columns[:-1] + 1
    sources = torch.arange(num_patches, device=places.device).repeat_interleave(1 + is_last.long())
    sources[1:][sources[1:] == sources[:-1]] = num_patches
    return sources


def pack_lengths(batch: PackedInput, num_rows: int) -> PackedLengths:
    """Return lengths as layers take them; num_rows: of all tokens with padding, which counts as a sequence of its own."""
    lengths = batch.lengths
    if batch.share is None and num_rows > batch.num_tokens:
        lengths = (*lengths, num_rows - batch.num_tokens)
    return PackedLengths(lengths=lengths, items=batch.items, share=batch.share, windows=batch.windows)


def pad_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """Append zero rows up to `num_rows`."""
    missing = num_rows - tensor.shape[0]
    return tensor if missing == 0 else torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))


def pad_channels(rows: Tensor, num_channels: int) -> Tensor:
    """Append channels of zeros; rows: [num_rows, channels]."""
    missing = num_channels - rows.shape[1]
    return rows if missing == 0 else torch.nn.functional.pad(rows, (0, missing))


def stack_items(outputs: Iterable[Tensor]) -> Tensor | None:
    """Return the outputs of other units, stacked by rows; some encoders lack channels for the LLM's first layers."""
    found = list(outputs)
    widest = max((tensor.shape[1] for tensor in found), default=0)
    return torch.cat([pad_channels(tensor, widest) for tensor in found]) if found else None


def share_input(batch: PackedInput, share: RankShare) -> PackedInput:
    """Return the part of a batch that belongs to the tokens in `share`, in order; positions stay those in the sequence.

    batch: of the whole microbatch, on the CPU. Of encoder outputs, and of conditions from the LLM for a generator, a rank
    receives only those that its tokens take (`token_placement.py`), in the order of the whole; so the row numbers that refer to
    these are changed, too. Lists of rows without any on this rank become empty, not None: all ranks run the same layers.
    """

    def local_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
        is_held, local = share.local_rows(rows.numpy())
        return torch.from_numpy(is_held), torch.from_numpy(local)

    at = torch.from_numpy(share.positions)
    parts: dict[str, Any] = {"positions": batch.positions[at], "share": share}
    if batch.patches is not None and batch.target_rows is None:
        parts["patches"] = batch.patches[at]
    if batch.token_ids is not None:
        parts["token_ids"] = batch.token_ids[at]
    if batch.item_rows is not None:
        is_held, parts["item_rows"] = local_rows(batch.item_rows)
        parts["item_sources"] = None if batch.item_sources is None else batch.item_sources[is_held]
        parts["item_ends"] = None if batch.item_ends is None else batch.item_ends[is_held]
    if batch.generator_rows is not None:
        parts["generator_rows"] = local_rows(batch.generator_rows)[1]
    if batch.target_rows is not None:
        is_held, parts["target_rows"] = local_rows(batch.target_rows)
        for name in ("targets", "target_weights", "patches"):
            rows = getattr(batch, name)
            parts[name] = None if rows is None else rows[is_held]
    if batch.path is not None:
        parts["path"] = batch.path.of_tokens(at, at if batch.target_rows is None else is_held)
    if batch.items_made is not None:
        rows = batch.items_made.rows[at if batch.target_rows is None else is_held]
        parts["items_made"] = batch.items_made._replace(rows=rows)
        if batch.items_made.are_pixels:
            parts["patches"] = batch.patches
    if batch.condition_rows is not None:
        used = [rows[at] for rows in (batch.condition_rows, batch.last_condition_rows) if rows is not None]
        taken, own = torch.unique(torch.stack(used), return_inverse=True)
        parts |= dict(zip(("condition_rows", "last_condition_rows"), own, strict=False))
        if batch.item_sources is not None:
            parts["item_sources"] = batch.item_sources[taken]
    return replace(batch, **parts)
