"""The training loop: load -> assign -> schedule -> execute -> update -> report, with evaluation and checkpoints."""

import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import cast

from megatron.runtime import platform
from megatron.runtime.feed.agreement import agree_to_stop, check_agreement
from megatron.runtime.feed.data_sets import DataSet
from megatron.runtime.flags.configuration import DEFAULT_SAVE_INTERVAL, GROUPS, HELD_OUT
from megatron.runtime.generation.sample_prompts import answer_prompts
from megatron.runtime.hugging_face.save_weights import find_folder_to_follow, save_adapter, save_hugging_face
from megatron.runtime.launch.failure import StopReason
from megatron.runtime.orchestrator.choose_plan import Choice
from megatron.runtime.orchestrator.orchestrate import Planned, under_choice
from megatron.runtime.recovery.member import NodesJoinError
from megatron.runtime.report.reporting import LINES_PER_BALANCE_LINE, EvaluationReport, Reporter, Silence, StepReport
from megatron.runtime.report.step_profile import StepProfile, Stragglers
from megatron.runtime.step.balance_report import BalanceReport
from megatron.runtime.step.step import Step
from megatron.runtime.training.describe_run import Progress, describe_end, describe_run
from megatron.runtime.training.measuring import Measuring
from megatron.runtime.training.plan_steps import load_evaluation_steps, load_training_steps, predictor_by
from megatron.runtime.training.prediction import describe_better_pair, describe_small_batch, predict_timeline
from megatron.runtime.training.resumption import keep_best, release, save_due, save_weights
from megatron.runtime.training.run import Run, change_plan
from multimodal.cost.cost_table import TableCosts
from multimodal.data.source_views import BlankImages
from multimodal.data.tokenizer import MISSING
from multimodal.schedule.simulate import simulate_schedule
from multimodal.values.errors import DataError
from multimodal.values.timeline import TimelineEvent


def train(run: Run) -> None:
    """Train up to --train-iters, with evaluation, checkpoints and reports."""
    reporter, progress = build_reporter(run, done_steps=run.done_steps), Progress(run.done_steps, run.done_steps)
    if run.review is not None:
        run.review.first_step = run.done_steps
    try:
        reporter.begin(describe_run(run))
        train_on(run, reporter, progress)
    finally:
        reporter.close()
        release(run)
    reporter.say(describe_end(run, progress))


class _StoppedError(Exception):
    """All ranks have agreed to stop before the last step, for the reason in `args`."""


def train_on(run: Run, reporter: Reporter, progress: Progress) -> None:
    """Train from the run's current state: the rest of an interrupted last step is done first."""
    training, done_steps = run.config.training, run.done_steps
    last_step = done_steps if training.skip_train else max(done_steps, training.train_iters)
    if training.exit_interval:
        last_step = min(last_step, (done_steps // training.exit_interval + 1) * training.exit_interval)
    run.stop_requests.is_training = True
    try:
        if last_step > done_steps:
            _run_steps(run, reporter, progress, last_step=last_step)
        while progress.step < last_step:  # under another plan
            _run_steps(run, reporter, progress, last_step=last_step)
        _save_last(run, progress)
        if run.config.evaluation.eval_iters and progress.evaluated_step != last_step:
            progress.evaluation = _evaluate(run, reporter, last_step)
        if progress.step == training.train_iters or training.skip_train:
            flags = run.config.checkpoint
            if flags.save_hf or flags.save_adapter:
                like = find_folder_to_follow(run.config.model.model, load_hf=flags.load_hf)
            if flags.save_hf:
                tokens = {name: token for name, token in asdict(run.data.tokenizer.special).items() if token != MISSING}
                save_hugging_face(flags.save_hf, session=run.session, like=like, special_tokens=tokens)
                reporter.say(f"the model is in {flags.save_hf}, in the form of Hugging Face")
            if flags.save_adapter:
                save_adapter(flags.save_adapter, session=run.session, like=like)
                reporter.say(f"the adapters are in {flags.save_adapter}, as Hugging Face's PEFT loads them")
    except _StoppedError as stopped:
        (progress.stop,) = stopped.args
        _save_last(run, progress)


def _run_steps(run: Run, reporter: Reporter, progress: Progress, *, last_step: int) -> None:
    config, device, first = run.config, platform.device(), progress.step
    name_actions = partial(setattr, run.session.executor.clock, "names_ranges")
    profile = StepProfile(config.logging, rank=run.world.rank, name_actions=name_actions)
    stragglers = Stragglers(run.session.plan)
    if progress.step > run.done_steps:  # the rest of a step that was interrupted after its update
        if progress.reported_step < progress.step and run.world.rank == 0:
            last_report, last = run.trainer.last_report()
            _report_step(run, reporter, progress, last_report, last.balance)
        _evaluate_and_save(run, reporter, progress)
    measuring, emulated_seconds = Measuring(run), list[float]()
    with closing(load_training_steps(run, range(first, last_step), known_at=measuring.known_at)) as steps:
        for number in range(first + 1, last_step + 1):
            start = time.perf_counter()
            step = next(steps)
            wait_seconds = time.perf_counter() - start
            wish = run.wish_to_stop(can_leave=True)
            longest_wait, stop = check_agreement(step, number=number, wait_seconds=wait_seconds, stop=wish, device=device)
            if stop is StopReason.JOIN:
                raise NodesJoinError("nodes have joined")
            has_trained = progress.step > run.done_steps  # time limits allow one step
            if stop >= StopReason.SIGUSR1 or (stop and has_trained):
                raise _StoppedError(stop)
            if run.background_save is not None:
                run.background_save.check()
            if run.bad_samples is not None:
                step = run.bad_samples.leave_out(step, device=device)
            if number == run.done_steps + 1 and run.world.rank == 0:  # the others wait for it in the step
                session, lengths = run.session, tuple(step.lengths.values())
                reporter.say(describe_better_pair(run.config, lengths, predictor=predictor_by(run, run.measured)))
                reporter.say(describe_small_batch(run.config, run.data.train.source, graph=session.graph, plan=session.plan))
            with profile.step(number):
                report, events = run.trainer.train_step(step, number=number)
            progress.step = number
            _report_step(run, reporter, progress, report, replace(step.balance, assign_wait_ms=1e3 * longest_wait))
            if config.logging.log_straggler:
                stragglers.add(run.trainer.compute_seconds)
                if number % (LINES_PER_BALANCE_LINE * config.logging.log_interval) == 0 or number == last_step:
                    reporter.say(stragglers.tell())
            progress.peak_bytes = max(progress.peak_bytes, report.peak_activation_bytes)
            if run.emulation and (timeline := run.session.gather_timeline(events)):
                emulated_seconds.append(timeline.duration_seconds)
                if number == last_step:
                    _compare_with_simulation(run.emulation, reporter, step, emulated_seconds)
            is_drawn = number == last_step or _is_multiple(number, config.logging.timeline_interval)
            if config.logging.report_dir is not None and is_drawn and (timeline := run.session.gather_timeline(events)):
                predicted = predict_timeline(run.config, step, timeline, predictor_by(run, run.measured), run.emulation)
                reporter.timeline(number, timeline, predicted)
            reporter.say(measuring.add(number, step, report, events))
            _evaluate_and_save(run, reporter, progress)
            if _review_plan(run, reporter, number, step=step, report=report, events=events):
                break
    profile.close()


def _review_plan(
    run: Run, reporter: Reporter, number: int, *, step: Step, report: StepReport, events: tuple[TimelineEvent, ...]
) -> bool:
    """Add a step to the trial or review, and conclude it when due; collective. Returns True if the run has another plan now."""
    review = run.review
    if review is None or number not in review.measured:
        return False
    timeline = run.session.gather_timeline(events)
    if timeline is not None:
        review.add(step, timeline, seconds=report.step_seconds, tflops=report.tflops_per_device)
    if number != review.measured[-1]:
        return False
    planned = review.planned
    line, chosen = run.world.from_first(f"review/{number}", lambda: review.conclude(number))
    reporter.say(line)
    if chosen is not None:
        choice = Choice.from_dict(chosen)
        with run.world.in_turn(f"plan/{number}"):
            config = under_choice(run.config, choice)
        change_plan(run, config)
        planned = Planned(config, choice, planned.request)
    run.review = review.after(planned, number=number)
    return chosen is not None


def _report_step(run: Run, reporter: Reporter, progress: Progress, report: StepReport, balance: BalanceReport) -> None:
    reporter.step(progress.step, report, balance, num_consumed_samples=run.num_consumed_samples(progress.step))
    progress.reported_step = progress.step
    if run.world.rank == 0:
        run.note_reported(progress.step)


def _evaluate_and_save(run: Run, reporter: Reporter, progress: Progress) -> None:
    config, number = run.config, progress.step
    save_interval = config.checkpoint.save_interval or DEFAULT_SAVE_INTERVAL if config.checkpoint.saves_steps else None
    is_due = config.evaluation.eval_iters and _is_multiple(number, config.evaluation.eval_interval)
    if is_due and progress.evaluated_step != number:
        progress.evaluation, progress.evaluated_step = _evaluate(run, reporter, number), number
    if _is_multiple(number, save_interval) and progress.saved_step != number:
        progress.saved_step = save_due(run, number)


def _save_last(run: Run, progress: Progress) -> None:
    if run.config.checkpoint.saves_steps and progress.saved_step != progress.step and progress.step > run.done_steps:
        progress.saved_step = save_due(run, progress.step)
    if run.background_save is not None:
        run.background_save.finish()


def _compare_with_simulation(emulation: TableCosts, reporter: Reporter, step: Step, measured: Sequence[float]) -> None:
    """Compare a step's simulation with the median of the measured steps; the first step sets connections up."""
    took = statistics.median(measured[1:] or measured)
    simulated = simulate_schedule(step.schedule, emulation).iteration_seconds
    reporter.say(f"emulated step: {took:.4f} s measured (median), {simulated:.4f} s simulated, ratio {took / simulated:.3f}")


def _evaluate(run: Run, reporter: Reporter, number: int) -> tuple[EvaluationReport, EvaluationReport | None]:
    def evaluate(name: str, data: DataSet) -> EvaluationReport:
        report = run.trainer.evaluate(steps_until_stopped(data))
        reporter.evaluation(number, name, report)
        return report

    def steps_until_stopped(data: DataSet) -> Iterator[Step]:  # it may take minutes
        for step in load_evaluation_steps(run, data):
            if reason := agree_to_stop(run.wish_to_stop(can_leave=False), device=platform.device()):
                raise _StoppedError(reason)
            yield step if run.bad_samples is None else run.bad_samples.leave_out(step, device=platform.device())

    flags, found = run.config.evaluation, []
    held_out = {HELD_OUT: run.data.valid} if len(run.data.valid.source) else {}
    for name, data in {**held_out, **run.data.valid_sets}.items():
        evaluation, blank = evaluate(name, data), None
        if flags.eval_blank_images:
            without = data._replace(source=BlankImages(data.source, graph=run.session.graph))
            blank = evaluate(f"{name}, blank images", without)
        found.append((evaluation, blank))
    first = found[0]
    if run.config.checkpoint.save_best is not None:
        reporter.say(keep_best(run, number, getattr(first[0], run.config.checkpoint.save_best)))
    if flags.sample_prompts is not None:
        _answer_prompts(run, reporter, number, flags.sample_prompts)
    return first


def _answer_prompts(run: Run, reporter: Reporter, number: int, prompts: Path) -> None:
    """Report what the current weights answer; collective until they are written; the others then wait in the next step."""
    folder = save_weights(run, number, name=".samples")
    if run.world.rank != 0:
        return
    try:
        tokens, scale = run.config.evaluation.sample_max_new_tokens, run.config.evaluation.sample_guidance_scale
        answers = answer_prompts(folder, prompts, max_new_tokens=tokens, guidance_scale=scale, timeout=run.world.timeout / 2)
        reporter.samples(number, answers)
    except DataError as problem:
        reporter.say(f"warning: --sample-prompts {prompts}: no answers ({problem}); training goes on without them")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_reporter(run: Run, *, done_steps: int) -> Reporter:
    """Return the reporter of this rank for a run that continues after this many steps."""
    if run.world.rank != 0:
        return cast(Reporter, Silence())
    settings = {name: str(value) for group in GROUPS for name, value in vars(getattr(run.config, group)).items()}
    return Reporter(
        run.config.logging,
        train_iters=run.config.training.train_iters,
        first_step=done_steps,
        run_config=settings,
        save_folder=run.config.checkpoint.save,
        data_sets=[named.path for named in run.config.data.mixture],
    )


def _is_multiple(number: int, interval: int | None) -> bool:
    return interval is not None and number % interval == 0
