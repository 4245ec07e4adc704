"""Saves a run, resumes it where it stopped, and starts a run from another run's weights."""

import logging
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from megatron.runtime.checkpoint.checkpoint import LoadedCheckpoint, load_checkpoint, save_checkpoint
from megatron.runtime.checkpoint.claim import FolderClaim
from megatron.runtime.checkpoint.folder import damaged, find_newest_checkpoint, remove_checkpoint, step_of
from megatron.runtime.checkpoint.manifest import read_newest
from megatron.runtime.checkpoint.megatron_weights import load_megatron, save_megatron
from megatron.runtime.checkpoint.storage import on_first_rank
from megatron.runtime.feed.data_sets import RunData, check_same_data, describe_data
from megatron.runtime.feed.phase import find_phase
from megatron.runtime.flags.configuration import CheckpointConfig, OptimizerSettings, RunConfig
from megatron.runtime.hugging_face.load_adapter import load_adapter
from megatron.runtime.hugging_face.load_weights import gather_adapters, load_hugging_face
from megatron.runtime.hugging_face.unit_weights import load_units
from megatron.runtime.training.prediction import MeasuredCosts
from megatron.runtime.training.run import Run
from megatron.runtime.training.trainer import build_scheduler
from multimodal.values.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


FROM_HUGGING_FACE, FROM_MEGATRON = "--load-hf", "--load-megatron"
"""Flags that name folders which other software wrote."""


class Start(NamedTuple):
    """The start of a run."""

    folder: Path
    flag: str
    """The flag that named the folder, and so says what wrote it."""
    is_resumption: bool
    """False: from weights only, at step 0."""


def resume(run: Run, *, has_saved: bool = False) -> None:
    """Claim --save for this run, and load the checkpoints that the flags name; collective.

    has_saved: True if this run has written to --save, and resumes from there. Raises CheckpointError if another run writes there,
    if there is no checkpoint (unless --save names the same folder), or if it does not belong to this run.
    """
    checkpoint = run.config.checkpoint
    if checkpoint.save is not None:
        claim_folder(run)
    try:
        if checkpoint.save or checkpoint.load:
            described = on_first_rank(lambda: describe_data(run.config, run.data), what="reading --data-path")
            run.described_data = {**described, **_describe_training(run)}
        start = on_first_rank(lambda: choose_start(checkpoint), what="looking for checkpoints")
        if has_saved and checkpoint.save is not None:
            start = Start(checkpoint.save, "--save", is_resumption=True)
        if start is not None:
            _load(run, start)
        elif run.emulation is None:
            load_units(run.session)
        has_own = start is not None and start.is_resumption and start.flag != FROM_MEGATRON
        if checkpoint.load_adapter is not None and not has_own:
            base = checkpoint.load_hf or (run.config.model.model if run.config.model.model.is_dir() else None)
            load_adapter(checkpoint.load_adapter, session=run.session, base=base)
            logger.info("starting from the adapters of %s", checkpoint.load_adapter)
        newest = find_newest_checkpoint(checkpoint.save) if checkpoint.save and not has_saved else None
        if newest is not None and step_of(newest) > run.done_steps:
            found = f"{checkpoint.save} already holds {newest.name} of another run"
            logger.warning("--save %s, which --load would resume; give another folder to keep the two apart", found)
    except BaseException:
        release(run)
        raise


def claim_folder(run: Run, *, attempt: int | None = None) -> None:
    """Claim --save; as a later attempt of the same run, its rank 0 may be another process now; collective."""
    folder = run.config.checkpoint.save
    assert folder is not None
    release(run)
    environ = os.environ if attempt is None else {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    claim = FolderClaim(folder, environ=environ)
    while not on_first_rank(claim.try_to_take, what=f"writing to --save {folder}"):
        pass
    run.claim = claim


def release(run: Run) -> None:
    """Let other runs write to --save."""
    if run.claim is not None:
        run.claim.release()


def choose_start(checkpoint: CheckpointConfig) -> Start | None:
    """Return the start that the flags select; None: new weights.

    A run that starts from given weights and has saved since resumes from its own checkpoint, so it can be requeued unchanged.
    Raises CheckpointError if a folder that must hold a checkpoint does not.
    """
    if (save := checkpoint.save) and find_newest_checkpoint(save) == save:
        raise CheckpointError(f"--save {save}: is a checkpoint, in which no other would be found again; give {save.parent}")
    own, own_flag = checkpoint.load, "--load"
    given, given_flag = checkpoint.pretrained_checkpoint, "--pretrained-checkpoint"
    if checkpoint.finetune:
        own, own_flag, given, given_flag = save, "--save", checkpoint.load, "--load"
    newest = find_newest_checkpoint(own) if own else None
    if own and newest:
        if weights := given or checkpoint.load_hf or checkpoint.load_megatron:
            logger.info("%s %s holds %s: going on from there, not from the weights in %s", own_flag, own, newest.name, weights)
        return Start(own, own_flag, is_resumption=True)
    if given:
        if find_newest_checkpoint(given) is None:
            raise CheckpointError(f"{given_flag} {given}: no complete checkpoint there; give a folder that --save wrote to")
        return Start(given, given_flag, is_resumption=False)
    if checkpoint.load_hf:
        return Start(checkpoint.load_hf, FROM_HUGGING_FACE, is_resumption=False)
    if checkpoint.load_megatron:
        return Start(checkpoint.load_megatron, FROM_MEGATRON, is_resumption=not checkpoint.finetune)
    if own and own != save:
        raise CheckpointError(
            f"--load {own}: no complete checkpoint there; give a folder that --save wrote to, or leave --load out "
            "(with --load equal to --save, a run without a checkpoint starts anew)"
        )
    if own:
        logger.info("%s holds no checkpoint yet: starting anew", own)
    return None


def _load(run: Run, start: Start) -> None:
    checkpoint = run.config.checkpoint
    if start.flag == FROM_HUGGING_FACE:
        load_hugging_face(start.folder, session=run.session)
        logger.info("starting at step 0 from the weights of %s", start.folder)
        return

    def check_run(path: Path, saved: RunData) -> None:
        if start.is_resumption:
            is_new_phase = checkpoint.new_phase
            check_same_data(f"{start.flag} {path}", saved=saved, current=run.described_data, is_new_phase=is_new_phase)

    load_optimizer = start.is_resumption and checkpoint.load_optim
    if start.flag == FROM_MEGATRON:
        loaded = load_megatron(start.folder, session=run.session, load_optimizer=load_optimizer)
        logger.info("%s holds step %d of a run of Megatron", loaded.path, loaded.step)
    else:
        loaded = load_checkpoint(
            start.folder,
            session=run.session,
            check_run=check_run,
            load_optimizer=load_optimizer,
            load_rng=start.is_resumption and checkpoint.load_rng,
        )
    if not start.is_resumption:
        logger.info("starting at step 0 from the weights of %s", loaded.path)
        return
    for unit in loaded.units_with_fresh_optimizer:
        logger.info("unit '%s' is trained now but was not then: its optimizer starts anew", unit)
    _begin_phase(run, loaded)
    if not checkpoint.load_optim or not loaded.schedulers_state:
        run.trainer.scheduler.step(increment=loaded.step - run.phase.learning_rate_first_step)
    elif loaded.step > run.phase.learning_rate_first_step or not loaded.step:
        try:
            run.trainer.scheduler.load_state_dict(dict(loaded.schedulers_state))
        except Exception as problem:  # the content may be anything
            raise damaged(loaded.path, f"its schedulers_state cannot be restored ({problem!r})") from problem
    run.done_steps = loaded.step
    if (measured := loaded.run_state.get("measured")) is not None and run.config.measuring_interval:
        try:
            run.measured = MeasuredCosts.from_dict(measured)
        except (ConfigError, TypeError, ValueError, KeyError) as problem:  # the content may be anything
            raise damaged(loaded.path, f"its measured layers cannot be read ({problem})") from problem


def _describe_training(run: Run) -> RunData:
    """Return the values whose change makes --new-phase begin a new schedule of the learning rate."""
    settings = vars(run.config.optimizer)
    frozen = [unit.name for unit in run.session.graph.units if unit.freeze_module]
    projectors = [unit.name for unit in run.session.graph.units if unit.freeze_projector]
    adapted = [unit.name for unit in run.session.graph.units if unit.lora is not None]
    return {
        # Without projector_lr: earlier checkpoints do not have it, and rates of units follow the flags without a new schedule.
        "learning_rate": {name: value for name, value in settings.items() if "lr" in name and name != "projector_lr"},
        "trained": {"frozen": frozen, "frozen_projectors": projectors, "adapted": adapted},
        "phase": asdict(run.phase),
    }


def _begin_phase(run: Run, loaded: LoadedCheckpoint) -> None:
    """Continue the checkpoint's phase, or begin another one; raises CheckpointError or ConfigError."""
    try:
        run.phase = find_phase(loaded.run_state, run.described_data, step=loaded.step, may_change=run.config.checkpoint.new_phase)
    except (TypeError, ValueError, KeyError, AttributeError) as problem:  # the content may be anything
        raise damaged(loaded.path, f"its phase cannot be read ({problem!r})") from problem
    run.described_data = {**run.described_data, "phase": asdict(run.phase)}
    if run.phase.first_step == loaded.step and run.config.checkpoint.new_phase:
        logger.info("a new phase begins after step %d, %d samples", loaded.step, run.phase.first_sample)
    if first_step := run.phase.learning_rate_first_step:
        settings, left = schedule_of_phase(run.config, first_step=first_step), run.config.training.train_iters - first_step
        run.trainer.scheduler = build_scheduler(settings, run.session, train_iters=left)
        logger.info("the learning rate's schedule began after step %d", first_step)


def schedule_of_phase(config: RunConfig, *, first_step: int) -> OptimizerSettings:
    """Return the settings of a learning rate whose schedule begins after `first_step`; ConfigError if too few steps are left."""
    settings, left = config.optimizer, config.training.train_iters - first_step
    decay = (settings.lr_decay_iters or 0) if "lr_decay_iters" in config.given else max(0, left)
    found = settings.in_steps(decay)
    if left < 1 or found.lr_warmup_iters >= decay:
        raise ConfigError(
            f"--new-phase: of --train-iters {config.training.train_iters}, {first_step} steps are done, which leaves "
            f"{max(left, 0)} for a schedule of the learning rate with {found.lr_warmup_iters} steps of warm-up; raise "
            "--train-iters or shorten the warm-up"
        )
    return found


def save_due(run: Run, number: int) -> int:
    """Write checkpoints of step `number`, with --async-save in the background; returns it; collective. Raises CheckpointError."""
    checkpoint, scheduler = run.config.checkpoint, run.trainer.scheduler.state_dict()
    if checkpoint.save is not None:
        save_checkpoint(
            checkpoint.save,
            step=number,
            session=run.session,
            schedulers_state=scheduler,
            run_state={**run.described_data, **({"measured": run.measured.to_dict()} if run.measured else {})},
            keep_last=checkpoint.keep_last_checkpoints,
            retain_interval=checkpoint.save_retain_interval,
            check_right=run.claim.check if run.claim is not None else lambda: None,
            background=run.background_save,
        )
    if (folder := checkpoint.save_megatron) is not None:
        adapters, size = gather_adapters(run.session), run.config.training.global_batch_size
        save_megatron(folder, session=run.session, step=number, adapters=adapters, scheduler=scheduler, global_batch_size=size)
    return number


def save_weights(run: Run, number: int, *, name: str, **state: Any) -> Path:
    """Write the weights after step `number`, and `state`, into a folder of their own in --save; collective; CheckpointError."""
    checkpoint, claim = run.config.checkpoint, run.claim
    assert checkpoint.save is not None and claim is not None, "the rules of the flags ask for --save"
    save_checkpoint(
        checkpoint.save / name,
        step=number,
        session=run.session,
        schedulers_state={},
        run_state={**run.described_data, **state},
        keep_last=1,
        check_right=claim.check,
        has_optimizer=False,
    )
    return checkpoint.save / name


def keep_best(run: Run, number: int, value: float) -> str | None:
    """Save the weights if an evaluation gives a better value than all of earlier steps; returns a line if so; collective."""
    metric, save_folder = run.config.checkpoint.save_best, run.config.checkpoint.save
    assert metric is not None and save_folder is not None, "a rule of the flags asks for --save"
    folder, key = save_folder / "best", f"best_{metric}"

    def is_best() -> bool:
        while (newest := find_newest_checkpoint(folder)) is not None and step_of(newest) >= number:
            remove_checkpoint(newest)
        before = None if newest is None else read_newest(folder)[1].run_state.get(key)
        is_better = before is None or (value < before if metric == "loss" else value > before)
        return is_better and not math.isnan(value)

    if not on_first_rank(is_best, what=f"looking into {folder}"):
        return None
    save_weights(run, number, name=folder.name, **{key: value})
    return f"step {number}: the best {metric} so far, {value:.4f}: its weights are in {folder}"
