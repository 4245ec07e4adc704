"""The uses that layers of Transformer Engine leave to others: one table, for code, messages of flags and docs/gpu.md."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from multimodal.cost.layers.layer import LinearShape
from multimodal.cost.layers.registry import describe_layer
from multimodal.cost.layers.transformer import TransformerLayer
from multimodal.values.model_graph import ModelGraph, Unit


class Instead(Enum):
    """The way in which a run goes on where a limit is met."""

    LOCAL = "`local` layers"
    LOCAL_UNIT = "`local` layers in that unit"
    BFLOAT16 = "that product in bfloat16"
    SEPARATE = "weight gradients added to float32 buffers by kernels of their own"
    NOTHING_INSIDE = "nothing in the waits of that unit"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class LayerUse:
    """The facts that limits depend on; each caller gives those that it knows."""

    is_installed: bool = True
    has_cuda: bool = True
    delays_gradients: bool = True
    """Transformer Engine is of version 2.3 or newer."""
    dtype: str = "bfloat16"
    fp8_recipe: str | None = None
    """None: no product is in FP8."""
    recompute: str | None = None
    runs_segments: bool = False
    splits_backwards: bool = False
    tp_comm_overlap: bool = False
    has_user_buffers: bool = False
    """Its own overlap of tensor parallel collectives is asked for."""
    sequence_parallel: bool = True
    is_elastic: bool = False
    shards_weights: bool = False
    unit: Unit | None = None
    widths: tuple[int, ...] = ()
    """Inputs and outputs of one product, on one rank."""


@dataclass(frozen=True)
class EngineLimit:
    """One use that its layers are not made for."""

    use: str
    instead: Instead
    is_met: Callable[[LayerUse], bool]
    message: str = ""
    """The error of a run that asks for both."""


def fp8_multiple(recipe: str | None) -> int:
    """Return the number of which widths and rows of products in FP8 are multiples."""
    return 1 if recipe is None else 32 if recipe == "mxfp8" else 16


_IMPL, _SHARDED = "--transformer-impl transformer_engine", "--data-parallel-sharding-strategy optim_grads_params"
NARROW_PRODUCT = EngineLimit(
    "a product in FP8 with a width that is no multiple of 16 on a rank (32 with `mxfp8`), as of the MLP of Qwen2.5-VL's encoder",
    Instead.BFLOAT16,
    lambda use: any(width % fp8_multiple(use.fp8_recipe) for width in use.widths),
)
ADAPTED_WAITS = EngineLimit(
    "adapters: their collectives do not report waits", Instead.NOTHING_INSIDE, lambda use: bool(use.unit and use.unit.lora)
)
ADAPTED_SEGMENTS = EngineLimit(
    "adapters in pieces of layers on several tensor parallel ranks",
    Instead.REFUSED,
    ADAPTED_WAITS.is_met,
    "the schedule runs segments of a layer on their own, which adapters of Transformer Engine's layers over several tensor "
    "parallel ranks cannot; use --transformer-impl local, or a --schedule that runs whole stages",
)
FP8_SCALES = EngineLimit(
    "`--fp8-recipe delayed` with `--recompute-granularity full`",
    Instead.REFUSED,
    lambda use: use.fp8_recipe == "delayed" and use.recompute == "full",
    "--fp8-recipe delayed takes scales from forwards before, and a forward that --recompute-granularity full repeats would "
    "count twice; use --fp8-recipe tensorwise, or leave out recomputation",
)
ENGINE_LIMITS = (
    EngineLimit(
        "it is not installed",
        Instead.LOCAL,
        lambda use: not use.is_installed,
        f"{_IMPL}: Transformer Engine is not installed; install it or use --transformer-impl local",
    ),
    EngineLimit(
        "there is no CUDA device",
        Instead.LOCAL,
        lambda use: not use.has_cuda,
        f"{_IMPL} needs a CUDA device; use --transformer-impl local on a CPU",
    ),
    EngineLimit(
        "`--dtype float64`",
        Instead.LOCAL,
        lambda use: use.dtype == "float64",
        f"{_IMPL} has no float64; use --transformer-impl local for exact checks",
    ),
    EngineLimit(
        "split backwards with a version before 2.3",
        Instead.LOCAL,
        lambda use: use.splits_backwards and not use.delays_gradients,
        f"{_IMPL} splits backwards into input and weight gradients, as zero bubble schedules and --schedule-passes fill do, from "
        "version 2.3 on; install that, or use --transformer-impl local, or another schedule",
    ),
    EngineLimit(
        "pieces of layers (`optimus`) in FP8",
        Instead.LOCAL,
        lambda use: use.runs_segments and use.fp8_recipe is not None,
        "--schedule {c.training.schedule} runs pieces of layers, whose products are not in FP8; leave out --fp8-format, or use "
        "another schedule",
    ),
    EngineLimit(
        "`--tp-comm-overlap` without `--tp-comm-overlap-rows`",
        Instead.LOCAL,
        lambda use: use.tp_comm_overlap and not use.has_user_buffers,
        "--tp-comm-overlap cuts the collectives of --transformer-impl local; Transformer Engine's layers overlap the LLM's in "
        "user buffers of a fixed number of rows; add --tp-comm-overlap-rows N, use --transformer-impl local, or leave it out",
    ),
    EngineLimit(
        "`--tp-comm-overlap-rows` without sequence parallelism, or with split backwards, FP8, `--dtype float32` or `--elastic`",
        Instead.LOCAL,
        lambda use: (
            use.has_user_buffers
            and any((not use.sequence_parallel, use.dtype == "float32", use.fp8_recipe, use.splits_backwards, use.is_elastic))
        ),
        "--tp-comm-overlap-rows is for user buffers of Transformer Engine's layers, which hold bfloat16 of one pass at a time; "
        "add --sequence-parallel, choose a --schedule with whole backwards, leave out --fp8-format, --dtype float32 and "
        "--elastic, or leave it out",
    ),
    EngineLimit(
        "ZeRO-3 with split backwards or FP8",
        Instead.LOCAL,
        lambda use: use.shards_weights and (use.splits_backwards or use.fp8_recipe is not None),
        f"{_SHARDED} takes a layer's weights away between its forward and its backward, but layers of Transformer Engine keep "
        "copies of them in FP8, and give gradients of split backwards after that; use --transformer-impl local, "
        "--data-parallel-sharding-strategy optim, or a --schedule with whole backwards and no --fp8-format",
    ),
    EngineLimit(
        "norms behind branches (Gemma 2 and 3), or joint attention of a generator",
        Instead.LOCAL_UNIT,
        lambda use: use.unit is not None and use.unit.needs_local_layers,
    ),
    NARROW_PRODUCT,
    EngineLimit("split backwards: gradients come behind their hooks", Instead.SEPARATE, lambda use: use.splits_backwards),
    EngineLimit(
        "FP8: the microbatch that quantises weights would overwrite the buffer",
        Instead.SEPARATE,
        lambda use: use.fp8_recipe is not None,
    ),
    EngineLimit("ZeRO-3: its weights have no such buffers", Instead.SEPARATE, lambda use: use.shards_weights),
    ADAPTED_WAITS,
    ADAPTED_SEGMENTS,
    FP8_SCALES,
)


def limits_met(use: LayerUse, *instead: Instead) -> tuple[EngineLimit, ...]:
    """Return the limits that a use meets, of those kinds."""
    return tuple(limit for limit in ENGINE_LIMITS if limit.instead in instead and limit.is_met(use))


class EngineProduct(NamedTuple):
    """A product of Transformer Engine."""

    name: str
    """The name of its module."""
    widths: tuple[int, int]
    """Inputs and outputs on a rank."""
    is_in_fp8: bool


def engine_products(graph: ModelGraph, unit: Unit, tensor_parallel_size: int, fp8_recipe: str | None) -> Iterator[EngineProduct]:
    """Yield the products of a unit's kinds of layers, both of experts as one."""
    for kind in dict.fromkeys(unit.layers) if not unit.needs_local_layers else ():
        layer = describe_layer(graph, unit, kind, vocab_size=0)
        if not isinstance(layer, TransformerLayer):
            continue
        shapes = dict(layer.linear_layers)
        if layer.num_expert_weights:
            shapes["experts"] = LinearShape(unit.transformer.hidden_size, unit.transformer.expert_hidden_size)
        for name, shape in shapes.items():
            by_inputs = shape.is_split_by_inputs
            inputs = shape.num_inputs // (tensor_parallel_size if by_inputs else 1)
            outputs = shape.num_outputs // (1 if by_inputs else tensor_parallel_size)
            use = LayerUse(fp8_recipe=fp8_recipe, widths=(inputs, outputs))
            yield EngineProduct(name, (inputs, outputs), fp8_recipe is not None and not NARROW_PRODUCT.is_met(use))
