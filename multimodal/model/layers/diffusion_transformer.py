"""A diffusion transformer of the diffusers library (SD3, DiT) around Braid's layers: its embeddings, its modulation and its head.

The time of an item, and the condition beside it, are embedded once, in the first layer, and carried along as channels behind the
hidden states of the item's tokens, so that no stage shares weights with another. DiT embeds them anew in every layer, so the
condition is carried, too.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import silu

from multimodal.cost.layers.transformer import NUM_MODULATIONS
from multimodal.model.adapter import adapter_of
from multimodal.model.collectives import RankLink, gather_for_products, gather_rows, sum_rows
from multimodal.model.deferrable_linear import DeferrableColumnParallelLinear, DeferrableRowParallelLinear, deferrable_linear
from multimodal.model.latents import NUM_TIMES
from multimodal.model.layers.generator_ends import GeneratorLoss, GeneratorProjector, mixed_patches, position_features
from multimodal.model.layers.layer_kind import LayerContext, StagePass
from multimodal.model.stage_input import pad_channels
from multimodal.values.errors import ModelError, require_package
from multimodal.values.file_form import read_mapping
from multimodal.values.model_graph import Unit

NORM_EPSILON = 1e-6
"""Of the norms that diffusers gives no weights."""


@cache
def config_of(unit: Unit) -> dict[str, Any]:
    """Return the config.json of a unit's folder; raises ModelError."""
    require_package("diffusers", extra="diffusion", needed_by=f"unit '{unit.name}', flow", error=ModelError)
    assert unit.weights is not None
    return read_mapping(Path(unit.weights) / "config.json", error=ModelError)


def of_items(rows: Tensor, items: Tensor, num_items: int) -> Tensor:
    """Return each item's first row, [num_items, ...]; for an item without tokens on this rank, any row.

    rows: [at least num_tokens, ...]; items: [num_tokens] the item of each of the first rows, int64.
    """
    places = torch.arange(len(items), device=items.device)
    none = torch.zeros(num_items, dtype=torch.long, device=items.device)
    return rows.index_select(0, none.scatter_reduce(0, items, places, "amin", include_self=False))


class _Embedding(Module):
    """The modules of diffusers before the layers, under their names there."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        from diffusers.models import embeddings

        config, width = config_of(unit), unit.transformer.hidden_size
        sizes = {"height": config["sample_size"], "width": config["sample_size"], "patch_size": config["patch_size"]}
        sizes |= {"in_channels": config["in_channels"], "pos_embed_max_size": config.get("pos_embed_max_size")}
        self.pos_embed = embeddings.PatchEmbed(**sizes, embed_dim=width)
        if "joint_attention_dim" in config:
            self.time_text_embed = embeddings.CombinedTimestepTextProjEmbeddings(width, config["pooled_projection_dim"])
            self.context_embedder = torch.nn.Linear(config["joint_attention_dim"], width)
        else:
            self.emb = _label_embedding(unit)

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """Return the values that are added to the patches of an item, [rows x columns, hidden_size]."""
        from diffusers.models.embeddings import get_2d_sincos_pos_embed

        known: Any = self.pos_embed
        rows, columns = grid
        if known.pos_embed_max_size:
            if max(grid) > known.pos_embed_max_size:
                raise ModelError(
                    f"an item of {rows} x {columns} patches is larger than the positions of the generator's weights, "
                    f"{known.pos_embed_max_size} on a side; lower max_pixels of its image, or leave such items out"
                )
            found: Tensor = known.cropped_pos_embed(rows * known.patch_size, columns * known.patch_size)[0]
            return found
        found = get_2d_sincos_pos_embed(known.pos_embed.shape[-1], grid, base_size=known.base_size, output_type="pt")
        return found.float().to(known.pos_embed)


def _label_embedding(unit: Unit) -> Any:
    from diffusers.models.embeddings import CombinedTimestepLabelEmbeddings

    return CombinedTimestepLabelEmbeddings(config_of(unit)["num_embeds_ada_norm"], unit.transformer.hidden_size)


def _embed_labels(module: Any, times: Tensor, conditions: Tensor) -> Tensor:
    """Return the embedding of each item's time and, beside the vector of no class, of its condition."""
    given = module.time_proj(times * NUM_TIMES).to(conditions.dtype)
    embedded: Tensor = module.timestep_embedder(given) + (module.class_embedder.embedding_table.weight[-1] + conditions)
    return embedded


class DiffusionEmbedding(GeneratorProjector):
    """The projectors of conditions, and behind them the embeddings of patches, conditions and time."""

    def __init__(self, context: LayerContext) -> None:
        unit = context.unit
        config = config_of(unit)
        self.is_joint = "joint_attention_dim" in config
        super().__init__(context, width=config.get("joint_attention_dim"))
        assert unit.image is not None and unit.flow is not None
        if not self.is_joint and context.graph.takes_tokens(unit.name):
            raise ModelError(
                f"unit '{unit.name}': a DiTTransformer2DModel has one condition an item and no tokens of encoders; remove the "
                "edges from encoders, or take an SD3Transformer2DModel"
            )
        self.image, self.flow, self.wide = unit.image, unit.flow, context.options.rotary_dtype
        self.embedding = context.placed(_Embedding(unit))
        if unit.freeze_module or unit.lora is not None:
            self.fixed = frozenset(name for name, _ in self.named_parameters() if name.startswith("embedding."))

    def forward(self, _: None, given: StagePass) -> Tensor:
        """Return [num_tokens, 1, hidden_size and as many channels for each state that is carried]."""
        conditions, batch, known = given.item_embeddings, given.batch, self.embedding
        assert conditions is not None and batch.condition_rows is not None and batch.items_made is not None
        assert batch.path is not None and batch.patches is not None and batch.path.noise is not None
        path, num_items = batch.path, len(batch.path.times)
        projected = self.project_all(conditions, batch.item_sources)
        is_patch = torch.arange(len(path.items), device=path.items.device) if batch.target_rows is None else batch.target_rows
        items = batch.items_of_patches
        last = batch.condition_rows if batch.last_condition_rows is None else batch.last_condition_rows
        # A rank without tokens of any item, or of one, computes something for it that no token takes.
        last = of_items(torch.cat((last, last.new_zeros(1))), path.items, num_items)
        told = path.is_told.to(projected.dtype)[:, None]
        pooled = projected.index_select(0, last) * told
        times = path.times
        if self.is_joint:
            size = known.time_text_embed.text_embedder.linear_1.in_features
            pooled = pad_channels(pooled, max(size, pooled.shape[1]))[:, :size]
            carried = known.time_text_embed((times * NUM_TIMES).to(pooled.dtype), pooled)
            mapped = deferrable_linear(projected, known.context_embedder.weight, None).index_select(0, batch.condition_rows)
            hidden = mapped * told.index_select(0, path.items) + known.context_embedder.bias
        else:
            carried = torch.cat((_embed_labels(known.emb, times, pooled), pooled), 1)
            hidden = carried.new_zeros(len(path.items), carried.shape[1] // 2)
        noisy = mixed_patches(self.image, self.flow, batch, dtype=self.wide).to(hidden.dtype)
        linear = known.pos_embed.proj
        patches = deferrable_linear(noisy, linear.weight.flatten(1), linear.bias) + self._positions(batch, items, is_patch)
        hidden = hidden.index_copy(0, is_patch, patches)
        return torch.cat((hidden, carried.index_select(0, path.items)), 1)[:, None]

    def _positions(self, batch: Any, items: Tensor, is_patch: Tensor) -> Tensor:
        grids, places = batch.items_made.grids, batch.positions.index_select(0, is_patch)
        tables = [self.embedding.positions(grid) for grid in grids]
        sizes = [0, *(rows * columns for rows, columns in grids)]
        given: dict[str, Any] = {"dtype": torch.long, "device": items.device}
        starts, columns = torch.tensor(sizes[:-1], **given), torch.tensor([grid[1] for grid in grids], **given)
        at = starts.cumsum(0)[items] + places[:, 0] * columns[items] + places[:, 1]
        return torch.cat([self.embedding.pos_embed.pos_embed[0, :0], *tables]).index_select(0, at)


class Modulation(Module):
    """Maps an item's time to shift, scale and gate of both branches, the same on all tensor parallel ranks (DiT, section 3.2).

    Every layer embeds the time by a map of its own, where DiT's layers share it, so that no stage shares weights with another; in
    a `form` the embedding is carried along, or as diffusers' (DiT) anew.
    """

    def __init__(self, context: LayerContext, index: int) -> None:
        super().__init__()
        assert context.unit.flow is not None
        size, self.num_carried = context.config.hidden_size, context.unit.flow.num_carried
        self.hidden_size, self.wide = size, context.options.rotary_dtype
        if not self.num_carried:
            self.time_weight, self.time_bias = context.empty(size, size), context.empty(size)
        num_outputs = context.unit.flow.num_streams * NUM_MODULATIONS * size
        self.weight, self.bias = context.empty(num_outputs, size), context.empty(num_outputs)
        self.emb = context.placed(_label_embedding(context.unit)) if self.num_carried > 1 and index > 1 else None
        for parameter in self.parameters():
            parameter.sequence_parallel = context.config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, times: Tensor, carried: Tensor | None = None) -> Tensor:
        """times: [num_items]; carried: [num_items, channels]; returns [num_items, 6 x hidden_size], and as many if joint."""
        made = deferrable_linear(silu(self.embed(times, carried)), self.weight, self.bias)
        return torch.cat(made.split(NUM_MODULATIONS * self.hidden_size, dim=1))

    def embed(self, times: Tensor, carried: Tensor | None) -> Tensor:
        """Return the embedding of each item's time, [num_items, hidden_size]; arguments as of `forward`."""
        if carried is None:
            places = (NUM_TIMES * times.to(self.wide))[:, None].expand(-1, 2)
            features = position_features(places, hidden_size=self.hidden_size, base=NUM_TIMES, dtype=self.wide)
            return deferrable_linear(features.to(self.weight.dtype), self.time_weight, self.time_bias)
        embedded, *conditions = carried.chunk(self.num_carried, 1)
        return embedded if self.emb is None else _embed_labels(self.emb, times, *conditions)


class PlainNorm(torch.nn.LayerNorm):
    """A LayerNorm without weights."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = NORM_EPSILON) -> None:
        super().__init__(hidden_size, eps, elementwise_affine=False)


class FirstNorm(PlainNorm):
    """The same before attention, where diffusers fixes what is added to the variance."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = NORM_EPSILON) -> None:
        super().__init__(config, hidden_size)


class JointRows(NamedTuple):
    """Which rows are conditions."""

    order: Tensor
    """[num_rows of the tensor parallel group]: patches, with padding, before conditions."""
    num_patches: int
    are_conditions: Tensor
    """[num_rows], of this rank under sequence parallelism."""


class JointColumnParallelLinear(DeferrableColumnParallelLinear):
    """Its own weights are for patches, those of `conditions` for the others, which attend together (MMDiT; SD3, section 4).

    Rows are sorted into both kinds, each is multiplied by its own weights, and the collective beside the product is one for both;
    `rows` is set before each forward.
    """

    rows: JointRows

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conditions = DeferrableColumnParallelLinear(*args, **options)

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        """input_: [num_rows, 1, input_size]. Returns the products with their biases."""
        gathered = gather_for_products(input_, RankLink(self.tp_group, self.sequence_parallel, self.waits))
        return _multiply(gathered, self, has_bias=True), None


class JointRowParallelLinear(DeferrableRowParallelLinear):
    """The same with a sum behind the products."""

    rows: JointRows

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conditions = DeferrableRowParallelLinear(*args, **options)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """input_: [num_rows, 1, input_size / num_ranks]. Returns the products with their biases."""
        made = sum_rows(_multiply(input_, self), RankLink(self.tp_group, self.sequence_parallel, self.waits))
        if self.bias is not None:
            made = made + torch.where(self.rows.are_conditions[:, None, None], self.conditions.bias, self.bias)
        return made, None


def _multiply(inputs: Tensor, linear: Any, *, has_bias: bool = False) -> Tensor:
    order, num_patches, _ = linear.rows
    parts = inputs.index_select(0, order).tensor_split((num_patches,))
    products = [
        deferrable_linear(part, each.weight, each.bias if has_bias else None, adapter_of(each))
        for part, each in zip(parts, (linear, linear.conditions), strict=True)
    ]
    return torch.cat(products).index_select(0, order.argsort())


class JointHeadNorm(Module):
    """An RMSNorm of the channels of each head with other weights for conditions; the mean of squares is in float32."""

    rows: JointRows

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = NORM_EPSILON) -> None:
        super().__init__()
        given: dict[str, Any] = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **given))
        self.conditions = torch.nn.RMSNorm(hidden_size, **given)  # of which the weight is used
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows of the tensor parallel group, 1, heads, channels]; returns the same shape."""
        are_conditions = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        are_conditions = are_conditions.index_fill(0, self.rows.order[self.rows.num_patches :], True)
        scale = torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + self.eps)
        weight = torch.where(are_conditions[:, None, None, None], self.conditions.weight, self.weight)
        return (hidden * scale).to(hidden.dtype) * weight


class DiffusionHead(GeneratorLoss):
    """The last modulated norm and the map to the values of patches, whose variances are left out."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context)
        assert context.unit.flow is not None
        config, width = config_of(context.unit), context.config.hidden_size
        self.side, self.num_carried = config["patch_size"], context.unit.flow.num_carried
        self.num_made = config.get("out_channels") or config["in_channels"]
        self.modulation = context.placed(torch.nn.Linear(width, 2 * width))
        self.out = context.placed(torch.nn.Linear(width, self.side**2 * self.num_made))

    def predict(self, hidden: Tensor, given: StagePass) -> Tensor:
        """hidden: with carried states behind its channels."""
        hidden = gather_rows(hidden, RankLink(self.group, self.is_sequence_sharded, self.waits))
        path, rows = given.batch.path, given.batch.target_rows
        assert path is not None and self.image is not None
        hidden, *carried = hidden[:, 0].chunk(1 + self.num_carried, 1)
        embedded = of_items(carried[0], path.items, len(path.times))
        first, second = deferrable_linear(silu(embedded), self.modulation.weight, self.modulation.bias).chunk(2, 1)
        shift, scale = (second, first) if self.num_carried == 1 else (first, second)
        hidden = hidden[: len(path.items)] if rows is None else hidden.index_select(0, rows)
        items = given.batch.items_of_patches
        normal = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], eps=NORM_EPSILON)
        modulated = normal * (1 + scale.index_select(0, items)) + shift.index_select(0, items)
        made = deferrable_linear(modulated, self.out.weight, self.out.bias).unflatten(1, (self.side, self.side, self.num_made))
        return made[..., : self.image.num_made_channels].permute(0, 3, 1, 2).flatten(1)
