"""What all ranks know after a step, and after an evaluation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """What all ranks know after a training step; seconds are means over ranks, `step_seconds` the slowest rank's."""

    loss: float
    """What is trained: the mean over the LLM's target tokens, plus every generator's mean over its values."""
    generator_loss: float
    """The generators' part of it; 0 without one."""
    grad_norm: float
    learning_rate: float
    num_samples: int
    num_tokens: int
    num_target_tokens: int
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    waiting_seconds: float
    optimizer_seconds: float
    tokens_per_second: float
    mfu: float
    peak_activation_bytes: int
    """The largest of all ranks."""


@dataclass(frozen=True)
class EvaluationReport:
    """How the model does on held-out samples."""

    loss: float
    generator_loss: float
    """The generators' part of it; 0 without one."""
    token_accuracy: float
    """Share of target tokens that greedy decoding gets right, given all before."""
    answer_accuracy: float
    """Share of samples whose whole answer greedy decoding gives: each token is its first choice, after the right ones before.

    Of those that answer in words alone, as tokens cannot tell whether an image is right; NaN where none does.
    """
