"""Checkpoints: sharded, atomic, and independent of the plan.

Every rank writes its pieces (`storage`) into a hidden folder, which gets its final name when all of it is on the disk (`folder`).
A failure on one rank becomes the same CheckpointError on all (`on_all_ranks`).
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.runtime.checkpoint import storage
from megatron.runtime.checkpoint.folder import complete_partial, open_partial, prune_checkpoints, remove_checkpoint
from megatron.runtime.checkpoint.manifest import (
    Manifest,
    capture_random_state,
    check_model,
    read_newest,
    restore_random_state,
    write_manifest,
)
from megatron.runtime.checkpoint.storage import TensorIndex, failing_together, on_all_ranks, on_first_rank, on_this_rank
from megatron.runtime.communication.create_groups import create_groups
from megatron.runtime.session import Session
from megatron.runtime.state.held_tensors import (
    HeldTensor,
    average_key,
    fill_optimizers,
    is_average,
    model_tensors,
    optimizer_tensors,
)
from multimodal.model.adapter import is_adapter, is_new_rows
from multimodal.values.errors import CheckpointError

_ALIGNMENT = 16
"""Alignment in bytes of every piece of the copy, so that it can be read as numbers of any type."""

Write = Callable[[Sequence[HeldTensor], ProcessGroup | None], None]


class BackgroundSave:
    """This rank's part of a save in the background, over a process group of its own; all ranks call its methods alike."""

    def __init__(self, timeout: timedelta) -> None:
        """Create the group; collective. timeout: time that ranks wait for each other, including the slowest one's writing."""
        self._group = create_groups([range(dist.get_world_size())], backend="gloo", timeout=timeout)[0]
        self._room = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def start(self, write: Write, tensors: Sequence[HeldTensor], *, what: str) -> None:
        """Copy the tensors, and let a thread write the copies.

        write: gets the copies and the group of all ranks; its error is raised by `check` and `finish`. what: the save in words.
        Raises CheckpointError about it on all ranks if one of them lacks the memory for its copies.
        """
        assert self._thread is None, "a save is under way; finish it first"
        copies = on_this_rank(lambda: self._copy(tensors), what=what)
        self._thread = threading.Thread(target=self._run, args=(write, copies), name="save", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the current save, if it has failed by now; returns at once."""
        if self._problem is not None:
            self.finish()

    def finish(self) -> None:
        """Wait until the current save is complete; raises its error, CheckpointError on every rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _run(self, write: Write, copies: Sequence[HeldTensor]) -> None:
        try:
            write(copies, self._group)
        except BaseException as problem:
            self._problem = problem

    def _copy(self, tensors: Sequence[HeldTensor]) -> list[HeldTensor]:
        """Copy everything that this rank may have to write into one buffer, pinned for GPUs and kept for the next save."""
        held = [tensor for tensor in tensors if not tensor.is_copy]
        num_bytes = sum(_room_for(piece.values) for tensor in held for piece in tensor.pieces)
        if len(self._room) < num_bytes:
            self._room = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        copies, start = [], 0
        for tensor in held:
            pieces = []
            for piece in tensor.pieces:
                values = self._room[start : start + piece.values.nbytes].view(piece.values.dtype).view(piece.values.shape)
                pieces.append(piece._replace(values=values.copy_(piece.values.detach(), non_blocking=True)))
                start += _room_for(piece.values)
            copies.append(replace(tensor, pieces=tuple(pieces)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies


def _room_for(values: Tensor) -> int:
    return -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The contents of a checkpoint besides the values that were loaded into the session."""

    step: int
    run_state: Mapping[str, Any]
    schedulers_state: Mapping[str, Any]
    path: Path
    units_with_fresh_optimizer: tuple[str, ...] = ()
    """Units with trained parameters without optimizer state in the checkpoint (they were frozen): their state starts at zero."""


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    session: Session,
    schedulers_state: Mapping[str, Any],
    run_state: Mapping[str, Any],
    keep_last: int,
    retain_interval: int | None = None,
    check_right: Callable[[], None] = lambda: None,
    background: BackgroundSave | None = None,
    has_optimizer: bool = True,
) -> None:
    """Save the whole state of a run after `step` steps, and remove older ones; collective over all ranks.

    The `keep_last` newest stay, and those of steps that `retain_interval` divides; one of the same step is replaced.
    schedulers_state and run_state are rank 0's and must fit into JSON. check_right: called on rank 0 before anything is written,
    and before the checkpoint gets its name; may raise CheckpointError. background: writes it while training continues, once its
    previous save is done; this function then returns when the state is copied, and `check` and `finish` of the background save
    raise errors. has_optimizer: False: save only weights, and their averages. Raises CheckpointError on every rank if it fails on
    any; earlier checkpoints are then untouched.
    """
    if background is not None:
        background.finish()
    session.complete_parameters()
    manifest = Manifest(
        step=step,
        dtype=_dtype(session),
        model=session.graph.to_dict(),
        plan=session.plan.to_dict(),
        run_state=dict(run_state),
        schedulers_state=dict(schedulers_state),
        random_state=capture_random_state(),
        files={},
        index_crc32=0,
    )
    updated = [each for each in optimizer_tensors(session.state) if has_optimizer or is_average(each.key)]
    tensors = model_tensors(session.state) + updated
    keeping = partial(prune_checkpoints, folder, step=step, keep_last=keep_last, retain_interval=retain_interval)
    write = partial(_write, folder, manifest, prune=keeping, check_right=check_right)
    if background is None:
        write(tensors, None)
    else:
        background.start(write, tensors, what=f"copying step {step} for {folder}")


def _write(
    folder: Path,
    manifest: Manifest,
    tensors: Sequence[HeldTensor],
    group: ProcessGroup | None,
    *,
    prune: Callable[[], None],
    check_right: Callable[[], None],
) -> None:
    """Write a checkpoint of all ranks; manifest: without its files; collective over `group`, by default the run's."""
    step, what = manifest.step, f"saving step {manifest.step} to {folder}"

    def begin() -> Path:
        check_right()
        return open_partial(folder, step=step)

    def complete(partial_folder: Path, written: Sequence[tuple[dict[str, int], TensorIndex]]) -> Path:
        index_size, index_crc32 = storage.write_index(partial_folder, [index for _, index in written])
        sizes = {name: size for files, _ in written for name, size in files.items()} | {storage.INDEX_NAME: index_size}
        write_manifest(partial_folder, replace(manifest, files=sizes, index_crc32=index_crc32))
        check_right()
        return complete_partial(partial_folder, step=step)

    unfinished: Path | None = None
    try:
        unfinished = partial_folder = on_first_rank(begin, what=what, group=group)
        writers = storage.choose_writers(on_all_ranks(lambda: storage.offer_pieces(tensors), what=what, group=group))
        written = on_all_ranks(lambda: storage.write_tensors(partial_folder, tensors, writers), what=what, group=group)
        final = on_first_rank(lambda: complete(partial_folder, written), what=what, group=group)
    except CheckpointError as problem:
        if dist.get_rank() == 0 and unfinished is not None and unfinished.exists():
            with suppress(OSError):
                remove_checkpoint(unfinished)
        left = "earlier checkpoints are untouched: make room" if folder.is_dir() else "that is no folder any more: restore it"
        raise CheckpointError(f"{problem}; {left} or correct --save, and resume") from None
    on_first_rank(prune, what=f"{final} is complete, but removing older ones", group=group)


def load_checkpoint(
    folder: Path,
    *,
    session: Session,
    load_optimizer: bool,
    load_rng: bool,
    check_run: Callable[[Path, Mapping[str, Any]], None] | None = None,
    takes_averages: bool = False,
) -> LoadedCheckpoint:
    """Fill parameters, and on wish optimizers and random generators, from the newest complete checkpoint in `folder`; collective.

    The plan may differ from the one it was saved under. Learning rate and weight decay are left to the schedulers, the other
    hyperparameters to the flags; new adapters (LoRA) keep their initial values. Nothing in the files is executed, and every value
    that is read is compared with its checksum. check_run: called on rank 0 with the checkpoint and its run_state, before anything
    is loaded; may raise CheckpointError. takes_averages: fill parameters with their averages, where there are any. Raises
    CheckpointError on every rank if nothing is there, a file is damaged, or of another model or (`load_optimizer`) precision.
    """

    def find() -> tuple[Path, Manifest]:
        path, manifest = read_newest(folder)
        check_model(path, manifest, graph=session.graph, dtype=_dtype(session) if load_optimizer else None)
        if check_run is not None:
            check_run(path, manifest.run_state)
        return path, manifest

    path, manifest = on_first_rank(find, what=f"loading {folder}")
    what = f"loading {path}"

    def is_saved(key: str) -> bool:
        of_unit = "new_tokens" if is_new_rows(key) else "lora"
        return not is_adapter(key) or manifest.model["units"][key.split(".")[1]].get(of_unit) is not None

    def fill(tensors: Sequence[HeldTensor]) -> None:
        for tensor in tensors:
            saved = index.get(tensor.key)
            if saved is None or saved.shape != tensor.shape:
                found = f"has shape {list(saved.shape)}" if saved else "is missing"
                raise CheckpointError(
                    f"{path}: {tensor.key} {found} but this run needs {list(tensor.shape)}; use the model, the tokenizer and the "
                    "padding of the vocabulary that it was trained with"
                )
        storage.read_tensors(path, tensors, index=index)

    model = [tensor for tensor in model_tensors(session.state) if is_saved(tensor.key)]
    with failing_together(what=what):
        index = storage.read_index(path, files=manifest.files, crc32=manifest.index_crc32)
        averages = {tensor.key: average_key(tensor.key) for tensor in model if takes_averages}
        model = [replace(each, key=averages[each.key]) if averages.get(each.key) in index else each for each in model]
        fill(model)
    session.reload_optimizers()
    fresh_units: list[set[str]] = []
    if load_optimizer:
        fresh_units = on_all_ranks(lambda: fill_optimizers(session.state, saved=index.keys(), fill=fill), what=what)
    if load_rng:
        on_this_rank(lambda: restore_random_state(path, manifest.random_state), what=what)
    units = tuple(sorted(set().union(*fresh_units)))
    return LoadedCheckpoint(manifest.step, manifest.run_state, manifest.schedulers_state, path, units)


def _dtype(session: Session) -> str:
    return str(session.options.build.params_dtype).removeprefix("torch.")
