"""megatron-core without CUDA (with it, nothing is changed): a table of replaced attributes, each of which must exist."""

import ctypes
import functools
import importlib
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
_TENSORBOARD = "torch.utils.tensorboard"


class Replacement(NamedTuple):
    """One replaced attribute."""

    target: str
    """`module:attribute` or `module:Class.attribute`."""
    wrap: Callable[[Any], Any]
    """Takes the original, returns its replacement."""
    reason: str


class CpuTorch:
    """`torch` for one module, with every tensor for device "cuda" made on the CPU instead."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        return _on_cpu(value) if name in ("tensor", "zeros", "ones", "empty") else value


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made_on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        return make(*args, device=CPU if device is not None else None, **kwargs)

    return made_on_cpu


def _do_nothing(original: Any) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _with_cuda_type_names(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def construct(self: Any, *args: Any, model_chunks: list[torch.nn.Module], **kwargs: Any) -> None:
        parameters = [parameter for chunk in model_chunks for parameter in chunk.parameters()]
        for parameter in parameters:
            name = torch.Tensor.type(parameter).replace("torch.", "torch.cuda.", 1)
            parameter.type = functools.partial(str, name)  # type: ignore[assignment]
        try:
            original(self, *args, model_chunks=model_chunks, **kwargs)
        finally:
            for parameter in parameters:
                del parameter.type

    return construct


def _with_states_of_adam(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        adam = self.optimizer
        if isinstance(adam, torch.optim.Adam) and not adam.state:
            for parameter in (each for group in adam.param_groups for each in group["params"]):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.zeros(()), **moments}
        return original(self)

    return state_dict


def _with_own_step(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: Any) -> None:
        if isinstance(self.optimizer, torch.optim.Adam):
            own = self._get_main_param_and_optimizer_states(model_param)
            step = self.optimizer.state[own["param"]]["step"] = own["step"].clone()
            tensors = {**tensors, "step": step}
        with torch.no_grad():
            original(self, model_param, tensors)

    return set_states


def _only_among_several(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def coalesce(group: dist.ProcessGroup, device: torch.device | None = None, async_ops: bool = False) -> Iterator[Any]:
        if group.size() > 1:
            with original(group, device, async_ops) as works:
                yield works
            return
        noted = dist.distributed_c10d._world.pg_coalesce_state
        noted[group] = []  # collectives inside are noted here, and not run: one rank has all shards, in their places
        try:
            yield dist.distributed_c10d._CoalescingManager()
        finally:
            del noted[group]

    return coalesce


def _with_fewer_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rotate(t: torch.Tensor, freqs: torch.Tensor, *args: Any, **options: Any) -> Any:
        others = [value for name, value in options.items() if name != "mscale"]
        if t.shape[-1] != freqs.shape[-1] or any((*args, *others)) or options.get("mscale", 1.0) != 1.0:
            return original(t, freqs, *args, **options)
        from multimodal.model.rotary import rotated

        return rotated(t, freqs)

    return rotate


REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement("torch.cuda:current_device", lambda original: lambda: CPU, "parameters and buffers are made there"),
    Replacement("torch.cuda:synchronize", _do_nothing, "checkpointing synchronizes the device before it writes"),
    Replacement("torch.cuda:current_stream", _do_nothing, "from 0.19 on, reducing gradients waits there for graph replays"),
    Replacement(
        "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
        _with_fewer_copies,
        "it copies all that it rotates once more for channels that pass, also where there are none, which kernels on CUDA do not",
    ),
    Replacement("megatron.core.optimizer.optimizer:torch", CpuTorch, 'the optimizer keeps its flags on device="cuda"'),
    Replacement(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
        _with_cuda_type_names,
        "it tells parameters apart by type names such as torch.cuda.FloatTensor",
    ),
    Replacement(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
        _with_states_of_adam,
        "loading asks it for a step, which torch's Adam keeps in states that it does not have before it made one",
    ),
    Replacement(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        _with_own_step,
        "it gives all parameters one step, which torch's Adam counts up for each, looks for it where none was loaded, and "
        "writes into weights that require gradients",
    ),
    Replacement(
        "megatron.core.distributed.param_and_grad_buffer:_coalescing_manager",
        _only_among_several,
        "gloo copies all gradients and parameters of a unit without replicas twice, to sum and to gather what is complete",
    ),
)

_installed = False


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB of freed memory: to give it back and take it again is a sixth of what deciding takes."""
    with suppress(AttributeError, OSError):  # another C library
        libc, m_trim_threshold, m_mmap_threshold = ctypes.CDLL(None), -1, -3
        libc.mallopt(m_trim_threshold, 256 << 20)
        libc.mallopt(m_mmap_threshold, 32 << 20)


def install() -> None:
    """Make megatron-core usable without CUDA, once. Raises RuntimeError if the installed megatron-core lacks a target."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    with _nothing_compiled():
        found = [(replacement, *_resolve(replacement.target)) for replacement in REPLACEMENTS]
    for replacement, owner, name in found:
        setattr(owner, name, replacement.wrap(getattr(owner, name)))
    keep_freed_memory()
    _installed = True


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Spare importing torch's compiler, a third of the time of a rank's imports, and TensorBoard: the CPU uses neither."""
    original, torch.compile = torch.compile, _as_it_is  # type: ignore[assignment]
    sys.modules.setdefault(_TENSORBOARD, None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.compile = original  # type: ignore[assignment]
        if sys.modules[_TENSORBOARD] is None:
            del sys.modules[_TENSORBOARD]


def _as_it_is(function: Any = None, **options: Any) -> Any:
    return function if function is not None else _as_it_is


def _resolve(target: str) -> tuple[Any, str]:
    module_name, _, path = target.partition(":")
    *parents, name = path.split(".")
    try:
        owner = functools.reduce(getattr, parents, importlib.import_module(module_name))
        getattr(owner, name)
    except (ImportError, AttributeError) as problem:
        if isinstance(problem, ImportError) and not (problem.name or "").startswith("megatron"):
            raise RuntimeError(f"{module_name} cannot be imported ({problem}); install what it needs") from problem
        raise RuntimeError(
            f"megatron-core has no {target} any more, which Braid replaces on machines without CUDA; "
            "install megatron-core 0.16.1, or adapt megatron/runtime/platform.py"
        ) from problem
    return owner, name


def device() -> torch.device:
    """The device of this process."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def memory_bytes() -> int:
    """The most memory that this process has had: reserved on its GPU, or resident on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
