"""A stand-in for `transformer_engine_torch`, the compiled module of Transformer Engine, in torch on the CPU.

Products, norms, and rounding to E4M3 and E5M2 are the module's own arithmetic, in torch's dtypes; in float64 everything is, so
that exact checks hold. What is missing raises NotImplementedError with its name when it is called.
"""

import enum
import types
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

NAME = "transformer_engine_torch"
_FORMATS = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6}
_FORMATS |= {"kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10}
DType = enum.IntEnum("DType", _FORMATS)
"""The module's number formats; Transformer Engine compares the names with its own."""
FLOAT64 = 11
"""The number of a format that only the stand-in has, for exact checks."""
_PRODUCTS = (1, 2, 3)
FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors", [f"GEMM{n}_{end}" for n in _PRODUCTS for end in ("INPUT", "WEIGHT", "OUTPUT")], start=0
)
FP8BwdTensors = enum.IntEnum("FP8BwdTensors", [f"GRAD_{end}{n}" for n in _PRODUCTS for end in ("OUTPUT", "INPUT")], start=0)
"""Places of a layer's tensors in its tables of scales, forward and backward."""


class _WithOlderNames(enum.EnumMeta):
    def __getattr__(cls, name: str) -> int:
        if name.startswith("NVTE_"):
            return 0
        raise AttributeError(name)


class NVTE_Fused_Attn_Backend(enum.IntEnum, metaclass=_WithOlderNames):  # noqa: N801
    """Its attention, which Braid does not use; from 2.20 on the names are compared, and versions before have others."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


TORCH: dict[int, torch.dtype] = {DType.kByte: torch.uint8, DType.kInt32: torch.int32, FLOAT64: torch.float64}
TORCH |= {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
TORCH |= {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
BLOCK = 128


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products and norms accumulate."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _largest(fp8_dtype: DType) -> float:
    return float(torch.finfo(TORCH[fp8_dtype]).max)


def _to_float8(values: Tensor, scale: Tensor, fp8_dtype: DType) -> Tensor:
    """Round scaled values to FP8; returns bytes."""
    bound = _largest(fp8_dtype)
    return (values.float() * scale).clamp(-bound, bound).to(TORCH[fp8_dtype]).view(torch.uint8)


def _from_float8(data: Tensor, fp8_dtype: DType) -> Tensor:
    return data.view(TORCH[fp8_dtype]).float()


def _scale(amax: Tensor, fp8_dtype: DType, *, epsilon: float, is_power: bool) -> Tensor:
    """The factor that brings the largest magnitude to the format's largest number; 1 where there is none."""
    amax = amax.float().clamp_min(epsilon)
    scale = torch.where(amax > 0, _largest(fp8_dtype) / amax, torch.ones_like(amax))
    scale = torch.where(scale.isinf(), torch.full_like(scale, torch.finfo(torch.float32).max), scale)
    return torch.exp2(torch.floor(torch.log2(scale))) if is_power else scale


def _tensor_scale(source: Tensor, quantizer: Any) -> Tensor:
    """The scale of a whole tensor: from the history (delayed), or from the tensor itself (current scaling)."""
    amax = source.detach().abs().amax().float().reshape(1) if source.numel() else torch.zeros(1)
    if not hasattr(quantizer, "with_amax_reduction"):
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.reshape(quantizer.amax.shape)))
        return quantizer.scale
    if quantizer.with_amax_reduction:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    return _scale(amax, quantizer.dtype, epsilon=quantizer.amax_epsilon, is_power=quantizer.force_pow_2_scales)


def _block_scales(rows: Tensor, quantizer: Any, block_rows: int) -> Tensor:
    """Scales [rows, columns] of blocks of `block_rows` x 128, repeated for every element."""
    num_rows, num_columns = rows.shape
    padded = torch.nn.functional.pad(rows.abs().float(), (0, -num_columns % BLOCK, 0, -num_rows % block_rows))
    blocks = padded.reshape(padded.shape[0] // block_rows, block_rows, padded.shape[1] // BLOCK, BLOCK)
    scale = _scale(blocks.amax((1, 3)), quantizer.dtype, epsilon=quantizer.amax_epsilon, is_power=quantizer.force_pow_2_scales)
    return scale.repeat_interleave(block_rows, 0)[:num_rows].repeat_interleave(BLOCK, 1)[:, :num_columns]


def quantize(source: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Round to FP8, rowwise and columnwise as the quantizer asks; `noop` of 1 leaves the output as it is."""
    if output is None:
        output = quantizer.make_empty(source.shape, dtype=source.dtype, device=source.device)
    if noop is not None and noop.item() != 0:
        return output
    source = source.detach()
    if hasattr(quantizer, "block_scaling_dim"):
        block_rows = BLOCK if quantizer.block_scaling_dim == 2 else 1
        rows = source.reshape(-1, source.shape[-1])
        for side, values in (("rowwise", rows), ("columnwise", rows.t().contiguous())):
            data = getattr(output, f"_{side}_data")
            if data is not None:
                scales = _block_scales(values, quantizer, block_rows)
                data.copy_(_to_float8(values, scales, quantizer.dtype).reshape(data.shape))
                data.inverse_scales = scales.reciprocal()  # by element; real layouts of scales are the kernels' own affair
        return output
    scale = _tensor_scale(source, quantizer)
    output._scale_inv.copy_(scale.reciprocal().reshape(output._scale_inv.shape))
    data = _to_float8(source, scale, quantizer.dtype)
    if output._data is not None:
        output._data.copy_(data.reshape(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(data.reshape(-1, data.shape[-1]).t().reshape(output._transpose.shape))
        output._transpose_invalid = False
    return output


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return gradient.reshape(-1, gradient.shape[-1]).sum(0), quantizer(gradient)


def numbers_of(tensor: Any, *, columnwise: bool = False) -> Tensor:
    """The numbers that a product reads, of a plain tensor or one in FP8, whichever copy it would read."""
    if hasattr(tensor, "_rowwise_data") or hasattr(tensor, "_columnwise_data"):
        if columnwise and tensor._columnwise_data is not None:
            data = tensor._columnwise_data
            flat = _from_float8(data, tensor._fp8_dtype).reshape(data.inverse_scales.shape) * data.inverse_scales
            return flat.t().contiguous().reshape(*data.shape[1:], data.shape[0])
        data = tensor._rowwise_data
        return (_from_float8(data, tensor._fp8_dtype).reshape(data.inverse_scales.shape) * data.inverse_scales).reshape(
            data.shape
        )
    if hasattr(tensor, "_fp8_dtype"):
        if tensor._data is not None and tensor._data.numel():
            return _from_float8(tensor._data, tensor._fp8_dtype) * tensor._scale_inv
        return (_from_float8(tensor._transpose, tensor._fp8_dtype) * tensor._scale_inv).movedim(0, -1).contiguous()
    return tensor


def _product(left: Any, is_transposed_left: bool, right: Any, is_transposed_right: bool, dtype: torch.dtype) -> Tensor:
    """Return right x left^T in column-major terms: TN is y = x w^T, NN dx = dy w, NT dw = dy^T x."""
    # Products read rows along the axis that is summed: of a matrix that is not transposed, the columnwise copy.
    a = numbers_of(left, columnwise=not is_transposed_left)
    b = numbers_of(right, columnwise=is_transposed_right)
    wide = _wide(torch.promote_types(a.dtype, b.dtype))
    rows_a, rows_b = a.reshape(-1, a.shape[-1]).to(wide), b.reshape(-1, b.shape[-1]).to(wide)
    result = (rows_b.t() if is_transposed_right else rows_b) @ (rows_a.t() if is_transposed_left else rows_a)
    return result if is_transposed_right else result.reshape(*b.shape[:-1], result.shape[-1])


def generic_gemm(
    a: Any,
    is_transposed_a: bool,
    b: Any,
    is_transposed_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: DType | None,
    bias: Tensor | None,
    bias_dtype: DType,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **kwargs: Any,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """The product of Transformer Engine's linear layers, with its bias or the gradient of it."""
    if gelu or kwargs.get("bulk_overlap"):
        raise NotImplementedError(f"{NAME}.generic_gemm with GELU or collectives of other products")
    buffer = kwargs.get("comm_overlap")
    if buffer is not None and kwargs["comm_type"] == CommOverlapType.AG:
        buffer.gather()  # into what `b` is a view of
    result = _product(a, is_transposed_a, b, is_transposed_b, torch.float32)
    bias_gradient = None
    if bias is not None and grad:
        values = numbers_of(b)
        bias_gradient = values.reshape(-1, values.shape[-1]).to(_wide(values.dtype)).sum(0).to(bias.dtype)
    elif bias is not None:
        result = result + bias.to(result.dtype)
    if buffer is not None and kwargs["comm_type"] == CommOverlapType.RS:
        buffer.scatter(result, kwargs["extra_output"])
        return None, bias_gradient, None, kwargs["extra_output"]
    if out is not None:
        out.copy_((out.to(result.dtype) + result if accumulate else result).reshape(out.shape))
        return out, bias_gradient, None, None
    result = result if out_dtype is None else result.to(TORCH[out_dtype])
    return (result if quantizer is None else quantizer(result)), bias_gradient, None, None


CommOverlapType = enum.IntEnum("CommOverlapType", {"RS": 0, "AG": 1})


class CommOverlapHelper:
    def __init__(self, world: Any, domain: Any = None) -> None:
        self.world, self.domain = world, domain or world


class CommOverlap:
    """A user buffer [rows, channels]: as its kernels do, it takes tensors of exactly its size, and knows a rank by its number."""

    num_products = 0
    """Products of this process that had a collective beside them."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, helper: CommOverlapHelper, size: int, *_: Any, **__: Any
    ) -> None:
        assert torch.distributed.get_world_size(helper.domain) == size
        self._buffer, self._group, self._size = torch.zeros(*shape, dtype=dtype), helper.domain, size
        self._place = torch.distributed.get_rank(helper.world) % size

    def is_fp8_ubuf(self) -> bool:
        """Return False: it holds numbers as they are, and is none of cuBLASMp's."""
        return False

    with_cublasmp = is_fp8_ubuf

    def copy_into_buffer(self, source: Tensor, *_: Any, local_chunk: bool = False) -> None:
        """Take this rank's part of the rows."""
        assert local_chunk and source.dtype == self._buffer.dtype and source.numel() * self._size == self._buffer.numel()
        self._buffer.chunk(self._size)[self._place].copy_(source.reshape(-1, source.shape[-1]))

    def get_buffer(self, *_: Any, local_chunk: bool = False, shape: Sequence[int] | None = None) -> Tensor:
        """Return this rank's rows or, in this shape, all rows, which the product that follows fills."""
        return self._buffer.chunk(self._size)[self._place] if local_chunk else self._buffer.view(*shape or self._buffer.shape)

    def gather(self) -> None:
        CommOverlap.num_products += 1
        parts = [torch.empty_like(part) for part in self._buffer.chunk(self._size)]
        torch.distributed.all_gather(parts, self._buffer.chunk(self._size)[self._place].clone(), group=self._group)
        self._buffer.copy_(torch.cat(parts))

    def scatter(self, rows: Tensor, out: Tensor) -> None:
        """Give each rank its part of the sum over ranks."""
        CommOverlap.num_products += 1
        assert rows.numel() == self._buffer.numel() == out.numel() * self._size
        total = rows.reshape(self._buffer.shape).to(out.dtype)
        torch.distributed.all_reduce(total, group=self._group)
        out.copy_(total.chunk(self._size)[self._place].reshape(out.shape))


class CommOverlapP2P(CommOverlap):
    """The same in a ring."""


def _normalised(
    source: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, is_centred: bool, is_zero_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = source.to(_wide(source.dtype))
    mean = wide.mean(-1, keepdim=True) if is_centred else torch.zeros_like(wide[..., :1])
    factor = ((wide - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    gamma = weight.to(wide.dtype) + (1 if is_zero_centred else 0)
    result = (wide - mean) * factor * gamma
    return (result if bias is None else result + bias.to(wide.dtype)), mean.squeeze(-1), factor.squeeze(-1)


def _finish(result: Tensor, out: Tensor | None, quantizer: Any, dtype: DType, source: Tensor) -> Any:
    result = result.to(TORCH[dtype])
    if quantizer is not None:
        return quantizer(result) if out is None else quantize(result, quantizer, out)
    return result if out is None else out.copy_(result)


def layernorm_fwd(
    source: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: DType,
    margin: int,
    zero_centred: bool,
) -> tuple[Any, Tensor, Tensor]:
    result, mean, factor = _normalised(source, weight, bias, eps, is_centred=True, is_zero_centred=zero_centred)
    return _finish(result, out, quantizer, dtype, source), mean, factor


def rmsnorm_fwd(
    source: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: DType, margin: int, zero_centred: bool
) -> tuple[Any, None, Tensor]:
    result, _, factor = _normalised(source, weight, None, eps, is_centred=False, is_zero_centred=zero_centred)
    return _finish(result, out, quantizer, dtype, source), None, factor


def layernorm_bwd(
    gradient: Tensor, source: Tensor, mean: Tensor, factor: Tensor, weight: Tensor, margin: int, zero_centred: bool
) -> list[Tensor]:
    centred, of_weight = _norm_gradients(gradient, source, mean.unsqueeze(-1), factor, weight, zero_centred)
    return [centred, of_weight, gradient.to(_wide(source.dtype)).flatten(0, -2).sum(0).to(weight.dtype)]


def rmsnorm_bwd(
    gradient: Tensor, source: Tensor, factor: Tensor, weight: Tensor, margin: int, zero_centred: bool
) -> list[Tensor]:
    return _norm_gradients(gradient, source, None, factor, weight, zero_centred)


def _norm_gradients(
    gradient: Tensor, source: Tensor, mean: Tensor | None, factor: Tensor, weight: Tensor, is_zero_centred: bool
) -> list[Tensor]:
    """Gradients of input and weight; mean: what was subtracted."""
    wide = gradient.to(_wide(source.dtype))
    normal = (source.to(wide.dtype) - (0 if mean is None else mean)) * factor.unsqueeze(-1)
    scaled = wide * (weight.to(wide.dtype) + (1 if is_zero_centred else 0))
    found = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
    found = (found if mean is None else found - scaled.mean(-1, keepdim=True)) * factor.unsqueeze(-1)
    return [found.to(gradient.dtype), (wide * normal).flatten(0, -2).sum(0).to(weight.dtype)]


def _rotated(vectors: Tensor, angles: Tensor, *, sign: int) -> Tensor:
    """Rotate the channels that have angles, [rows, 1, 1, channels], in pairs half of them apart."""
    count = angles.shape[-1]
    turned, rest = vectors[..., :count].to(_wide(vectors.dtype)), vectors[..., count:]
    first, second = turned.chunk(2, dim=-1)
    angles = angles.to(turned.dtype)
    return torch.cat((turned * angles.cos() + sign * torch.cat((-second, first), -1) * angles.sin(), rest), -1).to(vectors.dtype)


def fused_rope_forward(vectors: Tensor, angles: Tensor, *layout: Any) -> Tensor:
    return _rotated(vectors, angles, sign=1)


def fused_rope_backward(gradient: Tensor, angles: Tensor, *layout: Any) -> Tensor:
    return _rotated(gradient, angles, sign=-1)


def _tensor_lists(lists: Iterable[Sequence[Tensor]]) -> Iterable[tuple[Tensor, ...]]:
    return zip(*lists, strict=True)


def multi_tensor_adam(
    chunk: int,
    noop: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of Adam (mode 0: L2 regularisation) or AdamW (mode 1); lists: gradients, weights, moments, and perhaps masters."""
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for gradient, weight, first, second, *copies in _tensor_lists(lists):
        master = copies[0] if copies else weight
        wide = _wide(master.dtype)
        value, slope = master.to(wide), gradient.to(wide)
        if mode == 0:
            slope = slope + weight_decay * value
        first.copy_(beta1 * first.to(wide) + (1 - beta1) * slope)
        second.copy_(beta2 * second.to(wide) + (1 - beta2) * slope * slope)
        update = (first.to(wide) / correction1) / ((second.to(wide) / correction2).sqrt() + eps)
        if mode == 1:
            update = update + weight_decay * value
        master.copy_(value - lr * update)
        if copies:
            weight.copy_(master)


def fused_amax_and_scale_update_after_reduction(
    amaxes: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], algorithm: str, fp8_dtype: DType, margin: float
) -> None:
    """Delayed scaling: new scales from the history of largest magnitudes, which moves on by one."""
    for amax, history, scale in zip(amaxes.split([each.shape[1] for each in histories]), histories, scales, strict=True):
        history[0] = amax
        largest = history.amax(0) if algorithm == "max" else history[0].clone()
        found = (_largest(fp8_dtype) / largest) / 2**margin
        scale.copy_(torch.where((largest > 0) & torch.isfinite(largest) & torch.isfinite(found), found, scale))
        history.copy_(torch.roll(history, -1, 0))
        history[0] = 0


class _Missing(types.ModuleType):
    """Classes that are only named exist; functions that are not written here say so when they are called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Any = _missing(name) if name[0].islower() else _Named(name, (), {})
        setattr(self, name, found)
        return found


class _Named(type):
    """The type of classes whose members only have to differ."""

    def __getattr__(cls, member: str) -> int:
        if member.startswith("__"):
            raise AttributeError(member)
        return zlib.crc32(f"{cls.__name__}.{member}".encode())


def _missing(name: str) -> Callable[..., Any]:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{NAME}.{name}{[getattr(each, 'shape', each) for each in args]} {kwargs}")

    return missing


def stand_in() -> types.ModuleType:
    module = _Missing(NAME)
    constants = {"get_num_cublas_streams": 4, "get_cublasLt_version": 130000, "device_supports_multicast": True}
    constants |= {"ubuf_built_with_mpi": False, "get_stream_priority_range": (0, -1)}
    for name, value in constants.items():
        setattr(module, name, lambda value=value: value)
    for name, value in globals().items():
        if not name.startswith("_") and getattr(value, "__module__", None) == __name__ and name != "stand_in":
            setattr(module, name, value)
    return module
