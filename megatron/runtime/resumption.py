"""Saves a run and takes it up again where it stopped."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.runtime.checkpoint import find_newest_checkpoint, load_checkpoint, save_checkpoint
from megatron.runtime.checkpoint_folder import step_of
from megatron.runtime.configuration import RunConfig
from megatron.runtime.run import Run
from multimodal.values.errors import CheckpointError

logger = logging.getLogger(__name__)


def resume(run: Run) -> None:
    """Load the newest checkpoint of --load, if that is given; collective.

    Raises CheckpointError when there is none (unless --save names the same folder), or it does not belong to this run.
    """
    if run.config.checkpoint.load is not None:
        _load(run, run.config.checkpoint.load)
    _warn_of_earlier_run(run)


def _load(run: Run, folder: Path) -> None:
    checkpoint = run.config.checkpoint
    if find_newest_checkpoint(folder) is None:
        if folder == checkpoint.save:
            logger.info("%s holds no checkpoint yet: starting anew", folder)
            return
        raise CheckpointError(
            f"--load {folder}: no complete checkpoint there; give a folder that --save wrote to, or leave --load out "
            "(with --load equal to --save, a run without a checkpoint starts anew)"
        )
    loaded = load_checkpoint(
        folder,
        graph=run.graph,
        plan=run.plan,
        runtime=run.runtime,
        optimizers=run.optimizers,
        load_optimizer=checkpoint.load_optim,
        load_rng=checkpoint.load_rng,
    )
    _check_same_data(run.config, loaded.run_state)
    for unit in loaded.units_with_fresh_optimizer:
        logger.info("unit '%s' is trained now but was not then: its optimizer starts anew", unit)
    if checkpoint.load_optim:
        run.scheduler.load_state_dict(dict(loaded.schedulers_state))
    else:
        run.scheduler.step(increment=loaded.step)
    run.done_steps = loaded.step


def _warn_of_earlier_run(run: Run) -> None:
    """Say so when --save names a folder where an older run got further than this one starts: --load would take that one up."""
    folder = run.config.checkpoint.save
    newest = find_newest_checkpoint(folder) if folder else None
    if newest is not None and step_of(newest) > run.done_steps:
        logger.warning(
            "--save %s already holds %s of another run, which --load would resume; give another folder to keep the two apart",
            folder,
            newest.name,
        )


def save(run: Run, number: int) -> int:
    """Write a checkpoint after step `number` and return the number; collective."""
    assert run.config.checkpoint.save is not None
    save_checkpoint(
        run.config.checkpoint.save,
        step=number,
        graph=run.graph,
        plan=run.plan,
        runtime=run.runtime,
        optimizers=run.optimizers,
        schedulers_state=run.scheduler.state_dict(),
        run_state=_run_state(run.config),
        keep_last=run.config.checkpoint.keep_last_checkpoints,
    )
    return number


def _run_state(config: RunConfig) -> dict[str, Any]:
    return {
        "seed": config.training.seed,
        "global_batch_size": config.training.global_batch_size,
        "data_path": config.data.data_path,
        "tokenizer_type": config.data.tokenizer_type,
        "dtype": config.training.dtype,
    }


def _check_same_data(config: RunConfig, saved: Mapping[str, Any]) -> None:
    for name in ("seed", "global_batch_size", "tokenizer_type"):
        now = _run_state(config)[name]
        if saved.get(name, now) != now:
            flag = "--" + name.replace("_", "-")
            raise CheckpointError(
                f"--load {config.checkpoint.load}: it was trained with {flag} {saved[name]}, this run has {now}, so the data "
                f"would not go on as it was; use {flag} {saved[name]}"
            )
