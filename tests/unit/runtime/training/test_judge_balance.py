"""Verdicts on balancing by a run's own steps."""

import pytest

from megatron.runtime.training.judge_balance import TriedStep, Verdict, judge_balance, lost_by_exchanging


def left(seconds: float) -> TriedStep:
    return TriedStep(seconds, predicted_seconds=1.0, in_order_seconds=1.0, deciding_seconds=None, is_balanced=False)


def decided(seconds: float, *, is_balanced: bool = True) -> TriedStep:
    own = 0.8 if is_balanced else 1.0
    return TriedStep(seconds, predicted_seconds=own, in_order_seconds=1.0, deciding_seconds=0.2, is_balanced=is_balanced)


LEFT = [left(seconds) for seconds in (1.0, 1.1, 0.9, 1.0)]


@pytest.mark.parametrize(
    ("steps", "num_cores", "expected"),
    [
        ([decided(0.8)] * 4, 0, Verdict(0.0, keeps_order=False, took=0.8)),
        ([decided(0.8)] * 4, 2, Verdict(0.1 / 0.85, keeps_order=False, took=0.8)),
        ([decided(0.95)] * 4, 0, Verdict(1 - 0.8 / 0.95, keeps_order=False, took=0.95)),  # less than predicted
        ([decided(0.95)] * 4, 2, Verdict(0.1 / 0.95 + 1 - 0.8 / 0.95, keeps_order=True, took=0.95)),  # less than deciding takes
        ([decided(1.0)] * 4, 0, Verdict(0.2, keeps_order=True, took=1.0)),
        ([decided(1.0, is_balanced=False)] * 4, 0, Verdict(0.0, keeps_order=False, took=None)),
        ([decided(1.0, is_balanced=False)] * 4, 2, Verdict(0.1, keeps_order=True, took=None)),
    ],
)
def test_balancing_goes_on_while_its_steps_are_shorter(steps: list[TriedStep], num_cores: int, expected: Verdict) -> None:
    """Deciding takes 0.2 s of a core, which counts where the cores compute, too."""
    verdict = judge_balance([*LEFT, *steps], num_cores=num_cores)
    assert verdict is not None and verdict[1:] == expected[1:]
    assert verdict.margin == pytest.approx(expected.margin)


def test_batches_of_unlike_work_are_compared_by_what_was_predicted_for_them() -> None:
    heavy = TriedStep(2.6, predicted_seconds=2.7, in_order_seconds=3.0, deciding_seconds=0.0, is_balanced=True)
    verdict = judge_balance([*LEFT, heavy], num_cores=0)
    assert verdict is not None and verdict.took == pytest.approx(2.6 / 3) and not verdict.keeps_order


def test_nothing_is_said_without_steps_of_both_kinds() -> None:
    assert (
        judge_balance(LEFT, num_cores=2) is judge_balance([decided(2.0)], num_cores=2) is judge_balance([], num_cores=2) is None
    )


def test_a_verdict_says_why() -> None:
    assert Verdict(0.031, keeps_order=False, took=0.9).said == "balance keeps the data's order unless it gains 3.1%"
    assert Verdict(0.0, keeps_order=True, took=None).said.endswith("until it is tried again, as it gained nothing")
    assert Verdict(0.0, keeps_order=True, took=1.043).said.endswith("as what it balanced took 1.04 times as long")


@pytest.mark.parametrize(
    ("balanced", "lost"), [([1.25, 1.3, 1.2], 1 - 1.0 / 1.25), ([1.25, 1.05, 1.3], 0.0), ([0.9, 0.8, 0.9], 0.0)]
)
def test_what_exchanging_loses_shows_in_all_steps(balanced: list[float], lost: float) -> None:
    assert lost_by_exchanging(balanced, [1.0, 0.95, 1.1]) == pytest.approx(lost)
