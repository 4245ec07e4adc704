"""Reviews the plan of a run that planned by itself, and continues under a better one in the running processes."""

from megatron.runtime.orchestrator.orchestrate import Planned, under_choice
from megatron.runtime.orchestrator.review import Verdict
from megatron.runtime.report.reporting import Reporter, StepReport
from megatron.runtime.step.step import Step
from megatron.runtime.training.run import Run, change_plan
from multimodal.values.timeline import TimelineEvent


def review_plan(
    run: Run, reporter: Reporter, number: int, *, step: Step, report: StepReport, events: tuple[TimelineEvent, ...]
) -> bool:
    """Add a step to the review, and conclude it when due; collective. Returns True if the run has another plan now."""
    review = run.review
    if review is None or not review.measures(number):
        return False
    timeline = run.session.gather_timeline(events)
    if timeline is not None:
        review.add(step, timeline, seconds=report.step_seconds)
    if not review.is_due(number):
        return False
    run.review = None
    verdict = Verdict.from_text(run.world.from_first(f"review/{number}", lambda: review.conclude(number).to_text()))
    reporter.say(verdict.line)
    if verdict.choice is None:
        return False
    with run.world.in_turn(f"plan/{number}"):
        config = under_choice(run.config, verdict.choice)
    change_plan(run, config)
    run.review = review.after_change(Planned(config, verdict.choice, review.planned.request), number=number)
    return True
