"""Checkpoints: sharded, atomic, and independent of the plan.

Every rank writes the pieces it holds (`storage`) into a hidden folder that gets its final name when all of it is on the disk
(`folder`): a complete checkpoint is one that has its name. What fails on one rank becomes the same CheckpointError on all.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.runtime.checkpoint.folder import (
    complete_partial,
    damaged,
    find_newest_checkpoint,
    open_partial,
    prune_checkpoints,
    remove_checkpoint,
)
from megatron.runtime.checkpoint.index import TensorIndex, read_index
from megatron.runtime.checkpoint.manifest import (
    Manifest,
    capture_random_state,
    check_dtype,
    check_model,
    read_newest,
    restore_random_state,
    write_manifest,
)
from megatron.runtime.checkpoint.storage import read_tensors, write_tensors
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import HeldTensor, adopt_group_steps, make_room, model_tensors, optimizer_tensors
from multimodal.model.adapter import is_adapter
from multimodal.values.errors import CheckpointError
from multimodal.values.model_graph import ModelGraph

__all__ = ["LoadedCheckpoint", "find_newest_checkpoint", "load_checkpoint", "save_checkpoint"]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The contents of a checkpoint beside the values that went into the session."""

    step: int
    run_state: Mapping[str, Any]
    schedulers_state: Mapping[str, Any]
    path: Path
    units_with_fresh_optimizer: tuple[str, ...] = ()
    """Units with trained parameters that the checkpoint has no optimizer state of (they were frozen): it starts at zero."""


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    session: Session,
    schedulers_state: Mapping[str, Any],
    run_state: Mapping[str, Any],
    keep_last: int,
    retain_interval: int | None = None,
) -> Path:
    """Save the whole state of a run after `step` steps, and remove older ones; collective over all ranks.

    The `keep_last` newest stay, and those of steps that `retain_interval` divides.

    schedulers_state and run_state are rank 0's and must fit into JSON. Returns the checkpoint's folder, in which a checkpoint of
    the same step is replaced. Raises CheckpointError on every rank when it fails on any; earlier checkpoints are then untouched.
    """
    what = f"saving step {step} to {folder}"
    session.complete_parameters()
    partial = on_first_rank(lambda: open_partial(folder, step=step), what=what)
    try:
        tensors = [*model_tensors(session.state), *optimizer_tensors(session.state)]
        written = on_all_ranks(lambda: write_tensors(partial, tensors), what=what)
        manifest = Manifest(
            step=step,
            dtype=_dtype(session),
            model=session.graph.to_dict(),
            plan=session.plan.to_dict(),
            run_state=dict(run_state),
            schedulers_state=dict(schedulers_state),
            random_state=capture_random_state(),
            files={name: size for files in written for name, size in files.sizes.items()},
            index_crc32=written[0].index_crc32,
        )
        final = on_first_rank(lambda: _complete(partial, manifest), what=what)
    except CheckpointError as problem:
        if dist.get_rank() == 0 and partial.exists():
            with suppress(OSError):
                remove_checkpoint(partial)
        raise CheckpointError(f"{problem}; earlier checkpoints are untouched: make room or correct --save, and resume") from None
    what = f"{final} is complete, but removing older ones"
    on_first_rank(lambda: prune_checkpoints(folder, step=step, keep_last=keep_last, retain_interval=retain_interval), what=what)
    return final


def load_checkpoint(
    folder: Path,
    *,
    session: Session,
    load_optimizer: bool,
    load_rng: bool,
    check_run: Callable[[Path, Mapping[str, Any]], None] | None = None,
) -> LoadedCheckpoint:
    """Fill parameters, and on wish optimizers and random generators, from the newest complete checkpoint in `folder`; collective.

    The plan may be another than the one it was saved under. Learning rate and weight decay are left to the schedulers, the other
    hyperparameters to the run's flags. Adapters (LoRA) of units that had none start as they were initialised. Nothing that the
    files hold is executed, and every value that is read is held against its checksum.

    check_run: called on rank 0 with the checkpoint and its run_state, before anything is loaded; may raise CheckpointError.

    Raises CheckpointError on every rank when nothing is there, a file is damaged, or it is of another model or (with
    `load_optimizer`) precision.
    """
    dtype = _dtype(session) if load_optimizer else None
    path, manifest = on_first_rank(lambda: _find(folder, session.graph, dtype, check_run), what=f"loading {folder}")
    what = f"loading {path}"
    model = [tensor for tensor in model_tensors(session.state) if not _is_new_adapter(tensor, manifest)]
    index = on_this_rank(lambda: _read_index(path, manifest, model), what=what)
    on_this_rank(lambda: read_tensors(path, model, index=index), what=what)
    for optimizer in session.optimizers.values():
        optimizer.reload_model_params()
    fresh_units: list[set[str]] = []
    if load_optimizer:
        fresh_units = on_all_ranks(lambda: make_room(session.state, saved=index.keys()), what=what)
        tensors = [tensor for tensor in optimizer_tensors(session.state) if tensor.key in index]
        on_this_rank(lambda: _check_shapes(path, tensors, index=index), what=what)
        on_this_rank(lambda: read_tensors(path, tensors, index=index), what=what)
        adopt_group_steps(session.state, tensors)
    if load_rng:
        on_this_rank(lambda: _restore_random_state(path, manifest), what=what)
    return LoadedCheckpoint(
        step=manifest.step,
        run_state=manifest.run_state,
        schedulers_state=manifest.schedulers_state,
        path=path,
        units_with_fresh_optimizer=tuple(sorted(set().union(*fresh_units))),
    )


def _complete(partial: Path, manifest: Manifest) -> Path:
    write_manifest(partial, manifest)
    return complete_partial(partial, step=manifest.step)


def _find(
    folder: Path, graph: ModelGraph, dtype: str | None, check_run: Callable[[Path, Mapping[str, Any]], None] | None
) -> tuple[Path, Manifest]:
    path, manifest = read_newest(folder)
    check_model(path, manifest, graph=graph)
    if dtype is not None:
        check_dtype(path, manifest, dtype=dtype)
    if check_run is not None:
        check_run(path, manifest.run_state)
    return path, manifest


def _is_new_adapter(tensor: HeldTensor, manifest: Manifest) -> bool:
    """Return whether a tensor is of an adapter whose unit had none; such start as they were initialised."""
    return is_adapter(tensor.key) and manifest.model["units"][tensor.key.split(".")[1]].get("lora") is None


def _read_index(path: Path, manifest: Manifest, model: Sequence[HeldTensor]) -> TensorIndex:
    index = read_index(path, files=manifest.files, crc32=manifest.index_crc32)
    _check_shapes(path, model, index=index)
    return index


def _check_shapes(path: Path, tensors: Sequence[HeldTensor], *, index: TensorIndex) -> None:
    for tensor in tensors:
        saved = index.get(tensor.key)
        if saved is None or saved.shape != tensor.shape:
            found = f"has shape {list(saved.shape)}" if saved else "is missing"
            raise CheckpointError(
                f"{path}: {tensor.key} {found} but this run needs {list(tensor.shape)}; use the model, the tokenizer and the "
                "padding of the vocabulary that it was trained with"
            )


def _restore_random_state(path: Path, manifest: Manifest) -> None:
    try:
        restore_random_state(manifest.random_state)
    except Exception as problem:  # of whatever a stranger may have written there
        raise damaged(path, f"its random_state cannot be restored ({problem})") from problem


def _dtype(session: Session) -> str:
    return str(session.options.build.precision.params_dtype).removeprefix("torch.")


_Result = TypeVar("_Result")


def on_all_ranks(action: Callable[[], _Result], *, what: str) -> list[_Result]:
    """Run `action` on every rank and return the results of all of them, in rank order; for small ones.

    what: names the step in the error. Raises CheckpointError on every rank when the action failed on any.
    """
    result = on_this_rank(action, what=what)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    return results


def on_this_rank(action: Callable[[], _Result], *, what: str) -> _Result:
    """Run `action` on every rank and return this rank's result alone; errors as in `on_all_ranks`.

    Ranks tell each other in one number whether all went well, and more only if not.
    """
    found: list[_Result] = []
    problem = None
    try:
        found.append(action())
    except CheckpointError as error:
        problem = str(error)
    except CheckpointException as error:  # torch gathered it from all ranks
        rank, (cause, _) = min(error.failures.items())
        problem = str(cause) if isinstance(cause, CheckpointError) else f"{what} failed on rank {rank}: {_describe(cause)}"
    except Exception as error:
        problem = f"{what} failed on rank {dist.get_rank()}: {_describe(error)}"
    _raise_together(problem)
    return found[0]


def _raise_together(problem: str | None) -> None:
    has_failed = torch.tensor([problem is not None], dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(has_failed, op=dist.ReduceOp.MAX)
    if not has_failed.item():
        return
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    raise CheckpointError(_printable(next(filter(None, problems))))


def on_first_rank(action: Callable[[], _Result], *, what: str) -> _Result:
    """Run `action` on rank 0 alone and return its result on every rank; errors as in `on_all_ranks`."""
    result = on_this_rank(lambda: action() if dist.get_rank() == 0 else None, what=what)
    told: list[Any] = [result]
    dist.broadcast_object_list(told, src=0)
    first: _Result = told[0]
    return first


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _printable(message: str) -> str:
    """Return a text without control characters: a message may quote a stranger's text from a checkpoint."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in message)
